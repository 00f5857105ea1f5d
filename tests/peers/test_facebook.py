"""facebook's DeiT, DINOv2 and DINOv3 against timm and transformers, both ways.

facebook's own code is not a package. Its files are made from the peers' random models by the renaming that
their scripts document (transformers' `convert_dinov2_with_registers_to_hf.py`,
`convert_dinov3_vit_to_hf.py`), and timm reads them by its own `checkpoint_filter_fn`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contracts import family as contract
from tests.models import random_images, randomize, small_model
from tests.models.weights import assert_same_state
from tests.peers.comparison import relative_error
from tests.uninitialized import uninitialized
from vitascope.models.relations import RotaryPositions
from vitascope.models.sizes import named_config
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.families.facebook import Deit, Dinov2, Dinov3
from vitascope.models.weights.files import CheckpointError, read_weights
from vitascope.models.weights.identification import identify
from vitascope.models.weights.loading import load_source, save_pretrained
from vitascope.models.weights.mapping import Source, State

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (vitascope[peers])")

DEIT, DINOV2, DINOV3 = Deit(), Dinov2(), Dinov3()


def random_like(tensor: Tensor, seed: int) -> Tensor:
    return 0.5 * random_images(*tensor.shape, seed=seed)


def timm_model(name: str, **options: Any) -> nn.Module:
    with uninitialized():
        model = timm.create_model(name, pretrained=False, **{"depth": 2, **options})
    return randomize(model).eval()


def read_by_timm(model: nn.Module, file: Path, adapt_layer_scale: bool = False) -> nn.Module:
    """A timm model with a file's weights, loaded strictly through timm's filter."""
    state = torch.load(file, weights_only=True)
    filtered = timm.models.vision_transformer.checkpoint_filter_fn(
        state, model, adapt_layer_scale=adapt_layer_scale
    )
    model.load_state_dict(filtered, strict=True)
    return model.eval()


WIDE = {"img_size": 64, "embed_dim": 128, "num_heads": 2}
DEITS: dict[str, tuple[str, dict[str, Any]]] = {
    "deit": ("deit_tiny_patch16_224", WIDE | {"num_classes": 7}),
    "deit without qkv bias": ("deit_tiny_patch16_224", WIDE | {"qkv_bias": False}),
    "distilled": ("deit_tiny_distilled_patch16_224", WIDE | {"num_classes": 7}),
    "deit iii": ("deit3_small_patch16_224", WIDE | {"num_classes": 7}),
    "deit iii, patches of 14, no head": ("deit3_huge_patch14_224", WIDE | {"img_size": 56, "num_classes": 0}),
}


def deit_names(model: nn.Module) -> dict[str, State]:
    """A timm model's state in the layout of DeiT's training."""
    named = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", name): value for name, value in model.state_dict().items()}
    return {"model": named}


PATCH14 = {"img_size": 56, "embed_dim": 128, "num_heads": 2}
DINOV2S: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("vit_small_patch14_dinov2", PATCH14),
    "registers": ("vit_small_patch14_reg4_dinov2", PATCH14),
    "swiglu": ("vit_giant_patch14_dinov2", PATCH14 | {"mlp_ratio": 5.375}),
    "swiglu and registers": ("vit_giant_patch14_reg4_dinov2", PATCH14 | {"mlp_ratio": 5.375}),
    "seven registers, patches of 8": (
        "vit_small_patch14_reg4_dinov2",
        PATCH14 | {"img_size": 24, "patch_size": 8, "reg_tokens": 7},
    ),
}


def hub_names(model: nn.Module) -> State:
    """A timm model's state in the layout of DINOv2's hub."""
    gated = isinstance(model.blocks[0].mlp, timm.layers.GluMlp)
    state = {"mask_token": torch.zeros(1, model.embed_dim)}
    for name, value in model.state_dict().items():
        if gated:
            name = name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3")
        state[name.replace("reg_token", "register_tokens")] = value
    if "register_tokens" in state:  # timm has folded it into the class token
        place = random_like(state["cls_token"], seed=7)
        state["pos_embed"] = torch.cat([place, state["pos_embed"]], dim=1)
    return state


def chunked(state: State) -> dict[str, State]:
    """A hub's state in the layout of DINOv2's training: the teacher, with its blocks in two chunks."""
    named = {re.sub(r"^blocks\.(\d+)", r"blocks.\1.\1", name): value for name, value in state.items()}
    teacher = {f"backbone.{name}": value for name, value in named.items()}
    return {"teacher": {**teacher, "dino_head.mlp.0.weight": torch.zeros(2, 2)}}


def transformers_names(state: State, rules: dict[str, Any]) -> State:
    """A facebook state under transformers' names, `qkv` in three."""
    renamed: State = {}
    for name, value in state.items():
        for pattern, replacement in rules.items():
            name = re.sub(pattern, replacement, name)
        if ".qkv." in name:
            for part, tensor in zip("qkv", value.chunk(3), strict=True):
                renamed[name.replace("qkv", f"{part}_proj")] = tensor
        else:
            renamed[name] = value
    return renamed


TO_DINOV3: dict[str, Any] = {
    r"^(cls_token|mask_token)": r"embeddings.\1",
    r"^storage_tokens": "embeddings.register_tokens",
    r"^patch_embed\.proj": "embeddings.patch_embeddings",
    r"^blocks\.": "model.layer.",
    r"\.attn\.proj": ".attention.o_proj",
    r"\.attn\.": ".attention.",
    r"\.ls(\d)\.gamma": r".layer_scale\1.lambda1",
    r"\.(w1|w2|w3)\.": lambda gated: {"w1": ".gate_proj.", "w2": ".up_proj.", "w3": ".down_proj."}[gated[1]],
    r"\.fc1\.": ".up_proj.",
    r"\.fc2\.": ".down_proj.",
}


DINOV3S: dict[str, dict[str, Any]] = {
    "as published": {},
    "swiglu": {"use_gated_mlp": True, "intermediate_size": 96},
    "as the 7b": {"use_gated_mlp": True, "query_bias": False, "value_bias": False, "num_attention_heads": 1},
    "bias of the keys too, one register": {"key_bias": True, "num_register_tokens": 1},
    "no registers, patches of 8": {"num_register_tokens": 0, "patch_size": 8, "num_attention_heads": 4},
}


def dinov3_config(**options: Any) -> Any:
    shape = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_register_tokens": 4,
        "hidden_act": "silu" if options.get("use_gated_mlp") else "gelu",
        "attn_implementation": "eager",
    }
    return transformers.DINOv3ViTConfig(**{**shape, **options})


def dinov3_names(model: nn.Module) -> State:
    """A transformers model's state in the layout of DINOv3's hub: the inverse of the conversion script."""
    theirs, config = model.state_dict(), model.config
    D, count = config.hidden_size, config.hidden_size // config.num_attention_heads // 4
    state: State = {"mask_token": torch.zeros(1, D), "rope_embed.periods": periods(count)}
    for ours, name in (("cls_token", "cls_token"), ("storage_tokens", "register_tokens")):
        if theirs[f"embeddings.{name}"].numel():
            state[ours] = theirs[f"embeddings.{name}"]
    for part in ("weight", "bias"):
        state[f"patch_embed.proj.{part}"] = theirs[f"embeddings.patch_embeddings.{part}"]
        state[f"norm.{part}"] = theirs[f"norm.{part}"]
        for i in range(config.num_hidden_layers):
            block, layer = f"blocks.{i}.", f"model.layer.{i}."
            if f"{layer}attention.q_proj.{part}" in theirs:
                garbage = random_images(D, seed=i)  # facebook's mask excludes these values
                state[f"{block}attn.qkv.{part}"] = torch.cat(
                    [theirs.get(f"{layer}attention.{name}_proj.{part}", garbage) for name in "qkv"]
                )
            state[f"{block}attn.proj.{part}"] = theirs[f"{layer}attention.o_proj.{part}"]
            gated = {"w1": "gate_proj", "w2": "up_proj", "w3": "down_proj"}
            for ours, name in (
                gated if config.use_gated_mlp else {"fc1": "up_proj", "fc2": "down_proj"}
            ).items():
                state[f"{block}mlp.{ours}.{part}"] = theirs[f"{layer}mlp.{name}.{part}"]
            for n in (1, 2):
                state[f"{block}norm{n}.{part}"] = theirs[f"{layer}norm{n}.{part}"]
                state[f"{block}ls{n}.gamma"] = theirs[f"{layer}layer_scale{n}.lambda1"]
            if config.query_bias and not config.key_bias:
                ones = torch.ones(D)
                state[f"{block}attn.qkv.bias_mask"] = torch.cat([ones, 0 * ones, ones])
    return state


def periods(count: int) -> Tensor:
    return 100 ** (2 * torch.arange(count) / (2 * count))


def read_by_transformers(file: Path, config: Any) -> nn.Module:
    """transformers' model with a hub file's weights, loaded strictly after the script's renaming."""
    state = torch.load(file, weights_only=True)
    state = {name: value for name, value in state.items() if not name.endswith(("periods", "bias_mask"))}
    if not config.num_register_tokens:  # facebook then has no such parameter, transformers an empty one
        state["storage_tokens"] = torch.zeros(1, 0, config.hidden_size)
    state["mask_token"] = state["mask_token"][None]
    named = transformers_names(state, TO_DINOV3)
    if not config.key_bias:
        named = {name: value for name, value in named.items() if not name.endswith("k_proj.bias")}
    model = transformers.DINOv3ViTModel(config)
    model.load_state_dict(named, strict=True)
    return model.eval()


def shapes(state: State) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


class InTimm(contract.Library):
    """A file that timm reads by its filter; the peer is timm's model with its weights."""

    def __init__(self, family: str, name: str, options: dict[str, Any], names: Callable[[nn.Module], Any]):
        self.family, self.name, self.options, self.names = family, name, options, names  # type: ignore[misc]

    def build(self) -> nn.Module:
        return timm_model(self.name, **self.options)

    def save(self, peer: nn.Module, folder: Path) -> Path:
        torch.save(self.names(peer), folder / "theirs.pth")
        if self.family == "dinov2":  # the filter folds positions
            read_by_timm(peer, folder / "theirs.pth")
        return folder / "theirs.pth"

    def load(self, folder: Path, ours: VisionTransformer, peer: Any) -> nn.Module:
        assert not list(folder.glob(".*"))
        written, expected = torch.load(folder / "model.pth", weights_only=True), self.names(peer)
        assert shapes(written.get("model", written)) == shapes(expected.get("model", expected))
        return read_by_timm(self.build(), folder / "model.pth", adapt_layer_scale=self.family == "deit")

    def answer(self, peer: nn.Module, images: Tensor, ours: VisionTransformer) -> contract.Answer:
        attention, hooks = [], []  # type: list[Tensor], list[Any]
        for block in peer.double().blocks:
            block.attn.fused_attn = False  # timm then passes the weights through its dropout
            drop = block.attn.attn_drop
            hooks.append(drop.register_forward_hook(lambda *given: attention.append(given[-1])))
        features = peer.forward_features(images)
        for hook in hooks:
            hook.remove()
        head = self.family != "dinov2"
        return contract.Answer(
            outputs=peer(images) if head else features[:, 0], features=features, attention=attention
        )


class InTransformers(contract.Library):
    """DINOv3's file, which transformers' conversion script renames; the peer is transformers' model."""

    family = "dinov3"

    def save(self, peer: nn.Module, folder: Path) -> Path:
        torch.save(dinov3_names(peer), folder / "theirs.pth")
        return folder / "theirs.pth"

    def load(self, folder: Path, ours: VisionTransformer, peer: Any) -> nn.Module:
        state, expected = torch.load(folder / "model.pth", weights_only=True), dinov3_names(peer.float())
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert tensor.shape == expected[name].shape, name
            if name.endswith("bias_mask"):
                assert torch.equal(tensor, expected[name])
                assert not state[name.removesuffix("_mask")].chunk(3)[1].any()
        return read_by_transformers(folder / "model.pth", peer.config)

    def answer(self, peer: nn.Module, images: Tensor, ours: VisionTransformer) -> contract.Answer:
        result = peer.double()(images, output_attentions=True)
        tokens = result.last_hidden_state
        return contract.Answer(outputs=result.pooler_output, features=tokens, attention=result.attentions)


def in_training(peer: nn.Module, source: Source) -> Source:
    """The layout of DINOv2's training: the teacher, with its blocks in two chunks."""
    torch.save(chunked(torch.load(source.folder / source.file)), source.folder / "training.pth")
    return identified(source.folder / "training.pth")


def identified(path: Path) -> Source:
    return Source(name="training", tensors=read_weights(path).tensors)


def deit(case: str) -> contract.Example:
    name, options = DEITS[case]
    library = InTimm("deit", name, options, deit_names)
    return contract.Example(
        library=library,
        build=library.build,
        options={
            "distillation_token": "distilled" in name,
            "position_prefix": "deit3" not in name,
            "norm_eps": 1e-6,
        },
        named=name.startswith("deit_tiny_patch16"),
    )


def dinov2(case: str) -> contract.Example:
    name, options = DINOV2S[case]
    library, others = InTimm("dinov2", name, options, hub_names), {"in training": in_training}
    return contract.Example(library=library, build=library.build, tolerance=1e-6, others=others)


def dinov3(case: str) -> contract.Example:
    config = dinov3_config(**DINOV3S[case])
    return contract.Example(
        library=InTransformers(),
        build=lambda: randomize(transformers.DINOv3ViTModel(config)).eval(),
        sizes=[(48, 96)],
        tolerance=1e-6,  # of its angles in float32
    )


EXAMPLES = {
    **{f"deit: {case}": (deit, case) for case in DEITS},
    **{f"dinov2: {case}": (dinov2, case) for case in DINOV2S},
    **{f"dinov3: {case}": (dinov3, case) for case in DINOV3S},
}


@pytest.mark.parametrize(("kind", "case"), EXAMPLES.values(), ids=EXAMPLES)
def test_family(kind: Callable[[str], contract.Example], case: str, tmp_path: Path) -> None:
    contract.check_family(kind(case), tmp_path)


@pytest.mark.parametrize("given", [deit("deit iii"), dinov2("registers"), dinov3("as published")])
def test_misshapen_tensors_are_rejected(given: contract.Example, tmp_path: Path) -> None:
    contract.check_misshapen(given.library.save(given.build(), tmp_path), given.library.family)


PUBLISHED = {
    "deit_ti16": "deit_tiny_patch16_224",
    "deit_s16_distilled": "deit_small_distilled_patch16_224",
    "deit_b16": "deit_base_patch16_384",
    "dinov2_s14": "vit_small_patch14_dinov2",
    "dinov2_g14": "vit_giant_patch14_dinov2",
    "dinov2_l14_reg": "vit_large_patch14_reg4_dinov2",
    "dinov2_g14_reg": "vit_giant_patch14_reg4_dinov2",
}


@pytest.mark.parametrize(("ours", "theirs"), PUBLISHED.items())
def test_published_shapes_are_recognized_as_the_named_models(ours: str, theirs: str) -> None:
    with torch.device("meta"), uninitialized():
        model = timm.create_model(theirs)
        state = deit_names(model)["model"] if "deit" in theirs else hub_names(model)
    family = DEIT if "deit" in theirs else DINOV2
    config = family.read_config(family.before_reading(Source(name="", tensors=state)))
    expected = named_config(ours, image_size=384 if "384" in theirs else named_config(ours).image_size)
    assert config == family.fixed_there(expected).replace(class_token=True, mlp_ratio=config.block.mlp_ratio)
    assert config.mlp_dim == expected.mlp_dim
    assert config.num_heads == model.blocks[0].attn.num_heads
    assert config.norms.norm_eps == model.norm.eps


@pytest.mark.parametrize("name", ["dinov3_s16", "dinov3_s16_plus", "dinov3_h16_plus", "dinov3_7b16"])
def test_dinov3_shapes_are_recognized_as_the_named_models(name: str) -> None:
    named = named_config(name)
    with torch.device("meta"), uninitialized():
        config = dinov3_config(
            hidden_size=named.embed_dim,
            num_hidden_layers=named.depth,
            num_attention_heads=named.num_heads,
            intermediate_size=named.mlp_dim,
            use_gated_mlp=named.block.mlp == "swiglu",
            query_bias=named.block.qkv_bias != "none",
            value_bias=named.block.qkv_bias != "none",
        )
        state = dinov3_names(transformers.DINOv3ViTModel(config))
    state["rope_embed.periods"] = periods(named.head_dim // 4)  # these values are read
    found = DINOV3.read_config(Source(name="", tensors=state))
    assert found.replace(class_token=None) == named


def test_preprocessing_is_the_published_one() -> None:
    imagenet = (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD)
    evaluation = transformers.DeiTImageProcessor()  # 256, then 224, as DeiT and DINO evaluate
    resized = evaluation.size["height"]
    cases = [
        (DEIT, named_config("deit_b16"), 224, resized),
        (DEIT, named_config("deit_b16_distilled", image_size=384), 384, int(384 / 0.875)),
        (DEIT, named_config("deit_s16", layer_scale=1e-5, position_prefix=False), 224, 224),  # DeiT-III
        (DINOV2, named_config("dinov2_s14"), 224, resized),
        (DINOV2, named_config("dinov2_s14_reg"), 224, resized),
        (DINOV3, named_config("dinov3_s16"), 224, resized),
    ]
    for family, config, size, side in cases:
        found = family.read_preprocess(Source(name="weights.pth", tensors={}), config)
        assert (found.image_size, found.resize_to, found.interpolation, found.resize) == (
            (size, size),
            (side, side),
            "bicubic",
            "crop",
        )
        assert (found.mean, found.std) == imagenet


def test_satellite_models_are_recognized_by_file_name_and_have_their_own_statistics() -> None:
    expected = timm.get_pretrained_cfg("vit_large_patch16_dinov3.sat493m").to_dict()
    file = "dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth"
    found = DINOV3.read_preprocess(Source(name="x", file=file, tensors={}), named_config("dinov3_l16"))
    assert (found.mean, found.std) == (tuple(expected["mean"]), tuple(expected["std"]))


@pytest.fixture(scope="module")
def dinov3_state() -> State:
    return dinov3_names(randomize(transformers.DINOv3ViTModel(dinov3_config())))


Altered = Callable[..., Source]


@pytest.fixture
def altered(dinov3_state: State) -> Altered:
    """A file of DINOv3's with other tensors, as it is before reading."""

    def alter(**changed: Tensor | None) -> Source:
        source = Source(name="altered.pth", tensors=dinov3_state)
        change = {name.replace("__", "."): tensor for name, tensor in changed.items()}
        return DINOV3.before_reading(contract.with_tensors(source, change))

    return alter


def test_non_square_grid_is_rejected_in_writing_and_needs_a_config_in_reading(tmp_path: Path) -> None:
    ours = small_model(embed_dim=64, num_heads=1, image_size=(32, 48))
    contract.check_refused("deit", ours, ["4x6"], tmp_path)
    theirs = timm_model("deit_tiny_patch16_224", **WIDE | {"img_size": (64, 96)})
    torch.save(deit_names(theirs), tmp_path / "theirs.pth")
    source, kind = identify(f"deit:{tmp_path / 'theirs.pth'}")
    with pytest.raises(CheckpointError, match=r"25 positions.*config=ViTConfig"):
        load_source(source, kind)
    square = DEIT.read_config(
        Source(name="", tensors=timm_model("deit_tiny_patch16_224", **WIDE).state_dict())
    )
    images = random_images(2, 3, 64, 96)
    ours = load_source(source, kind, square.replace(image_size=(64, 96)))
    with torch.no_grad():
        assert relative_error(ours(images), theirs(images)) < 1e-5


def test_duplicate_block_in_two_chunks_is_rejected() -> None:
    tensors = {"blocks.0.0.norm1.weight": torch.ones(3), "blocks.1.0.norm1.weight": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"blocks\.0\.norm1\.weight twice"):
        DINOV2.before_reading(Source(name="chunks.pth", tensors=tensors))


@pytest.mark.parametrize("rounded", [False, True])
def test_rotary_periods_of_the_file_are_the_models(rounded: bool, altered: Altered) -> None:
    stored = periods(16).bfloat16() if rounded else periods(16)
    config = DINOV3.read_config(altered(rope_embed__periods=stored))
    assert config.rotary.rotary_rounded == rounded
    places = (torch.arange(0.5, 3) / 3 * 2 - 1)[:, None, None].expand(3, 2, 1)  # of the rows of a 3x2 grid
    rows = (2 * torch.pi * places / stored.float()).flatten(0, 1)  # (6, 16): facebook's formula
    cos, _ = RotaryPositions(config).layout((3, 2), torch.device("cpu")).rotation
    torch.testing.assert_close(cos[:, 0, :16], rows.cos(), rtol=0, atol=1e-6)
    assert torch.equal(
        DINOV3.before_writing({"cls_token": torch.zeros(1, 1, 64)}, config)["rope_embed.periods"],
        stored.float(),
    )


def test_periods_of_another_base_are_rejected_and_rounded_ones_accepted(altered: Altered) -> None:
    altered(rope_embed__periods=periods(16).bfloat16())
    with pytest.raises(CheckpointError, match=r"periods\[1\] is 1\.778, but 1\.334 .* base of 100"):
        altered(rope_embed__periods=10000 ** (torch.arange(16) / 16))
    with pytest.raises(CheckpointError, match=r"periods\[0\] is nan"):
        altered(rope_embed__periods=torch.full((16,), torch.nan))
    with pytest.raises(CheckpointError, match=r"7 rope_embed\.periods are for heads of width 28"):
        DINOV3.read_config(altered(rope_embed__periods=periods(7)))
    with pytest.raises(CheckpointError, match=r"missing rope_embed\.periods"):
        DINOV3.read_config(altered(rope_embed__periods=None))


def test_bias_mask_of_other_parts_than_the_keys_is_rejected(altered: Altered) -> None:
    ones, zeros = torch.ones(128), torch.zeros(128)
    altered(blocks__1__attn__qkv__bias_mask=torch.cat([ones, torch.nan * ones, ones]))
    for parts in ((ones, ones, ones), (zeros, zeros, ones), (ones, zeros, torch.nan * ones), (ones[1:],)):
        with pytest.raises(CheckpointError, match=r"blocks\.1\.attn\.qkv\.bias_mask does not bar"):
            altered(blocks__1__attn__qkv__bias_mask=torch.cat(parts))


def test_norm_of_local_crops_is_ignored_in_reading_and_written_for_the_largest_model(
    altered: Altered,
) -> None:
    source = altered(local_cls_norm__weight=torch.ones(128), local_cls_norm__bias=torch.ones(128))
    assert_same_state(load_source(source, DINOV3), load_source(altered(), DINOV3))
    state = {"cls_token": torch.zeros(1, 1, 4096), "norm.weight": torch.ones(9), "norm.bias": torch.ones(9)}
    left = DINOV3.before_writing(state, named_config("dinov3_7b16"))
    assert {"local_cls_norm.weight", "local_cls_norm.bias"} <= left.keys()


def test_positions_without_a_prefix_are_written_with_a_zero_prefix_for_dinov2(tmp_path: Path) -> None:
    options = {"embed_dim": 64, "num_heads": 1, "head": "none", "position_prefix": False}
    ours, images = small_model(**options, resample="dinov2"), random_images(2, 3, 32, 32)
    again = contract.load(save_pretrained(ours, tmp_path, format="dinov2"))
    assert relative_error(again(images), ours(images)) < 1e-6


def test_written_file_stores_only_its_tensors(tmp_path: Path, altered: Altered) -> None:
    model = load_source(altered(), DINOV3).to(torch.bfloat16)
    whole = torch.randn(1000, 1000)
    model.norm.weight = nn.Parameter(whole[0, :128])
    file = save_pretrained(model, tmp_path, format="dinov3") / "model.pth"
    state = torch.load(file, weights_only=True)
    assert state["blocks.0.attn.qkv.bias_mask"].dtype == torch.bfloat16
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert file.stat().st_size < 1.2 * sum(tensor.nbytes for tensor in state.values())
    assert not list(tmp_path.glob(".*"))
