"""facebook's DeiT, DINOv2 and DINOv3 against timm and transformers, both ways.

facebook's own code is not a package. Its files are made from the peers' random models by the renaming that
their scripts document (transformers' `convert_dinov2_with_registers_to_hf.py`,
`convert_dinov3_vit_to_hf.py`), and timm reads them by its own `checkpoint_filter_fn`.
"""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model import random_images, randomize, small_config, small_model
from tests.peers.comparison import relative_error
from tests.uninitialized import uninitialized
from vitascope.model.config import ViTConfig
from vitascope.model.relations import RotaryPositions
from vitascope.model.sizes import named_config
from vitascope.model.vit import VisionTransformer
from vitascope.weights.families.facebook import Deit, Dinov2, Dinov3
from vitascope.weights.files import CheckpointError, read_weights
from vitascope.weights.mapping import Family, Source, State, from_family, to_family

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (vitascope[peers])")

DEIT, DINOV2, DINOV3 = Deit(), Dinov2(), Dinov3()


def opened(family: Family, path: Path, recognized: bool = True) -> Source:
    source = Source(name=str(path), file=path.name, tensors=read_weights(path).tensors)
    assert [kind.recognizes(source) for kind in (DEIT, DINOV2, DINOV3)] == [
        recognized and kind is family for kind in (DEIT, DINOV2, DINOV3)
    ]
    return family.before_reading(source)


def loaded(family: Family, source: Source, config: ViTConfig | None = None) -> VisionTransformer:
    config = config or family.read_config(source)
    state = from_family(family, source, config)
    with torch.device("meta"):
        model = VisionTransformer(config)
    model.load_state_dict(state, assign=True)
    return model.eval()


def written(family: Family, model: VisionTransformer, folder: Path) -> Path:
    preprocess = family.read_preprocess(Source(name="", tensors={}), model.config)
    [file] = to_family(family, model, preprocess, folder)
    return file


def saved(state: Any, folder: Path) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.pth"  # a new file: open ones stay mapped into memory
    torch.save(state, path)
    return path


def random_like(tensor: Tensor, seed: int) -> Tensor:
    return 0.5 * random_images(*tensor.shape, seed=seed)


def assert_same_tensors(model: VisionTransformer, other: VisionTransformer) -> None:
    assert model.config == other.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def assert_same_attention(model: VisionTransformer, images: Tensor, expected: list[Tensor]) -> None:
    for found, theirs in zip(model.trace(images, attention=True).attention or [], expected, strict=True):
        assert relative_error(found, theirs) < 1e-5


# --- timm: it reads facebook's files by its own filter


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


def timm_attention(model: nn.Module, images: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False  # timm then passes the weights through its dropout
        block.attn.attn_drop.register_forward_hook(lambda module, args, output: seen.append(output))
    model(images)
    return seen


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


@pytest.mark.parametrize(("name", "options"), DEITS.values(), ids=DEITS)
@torch.no_grad()
def test_deit_equals_timm_both_ways(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    theirs, images = timm_model(name, **options), random_images(2, 3, *[options["img_size"]] * 2)
    plain = name.startswith("deit_tiny_patch16")
    ours = loaded(DEIT, opened(DEIT, saved(deit_names(theirs), tmp_path), recognized=not plain))
    logits = theirs(images)
    assert relative_error(ours(images), logits) < 1e-5
    assert_same_attention(ours, images, timm_attention(theirs, images))
    assert ours.config.readout.distillation_token == ("distilled" in name)
    assert ours.config.embedding.position_prefix == ("deit3" not in name)

    file = written(DEIT, ours, tmp_path / "written")
    assert torch.load(file, weights_only=True)["model"].keys() == deit_names(theirs)["model"].keys()
    again = read_by_timm(timm_model(name, **options), file, adapt_layer_scale=True)
    assert relative_error(again(images), logits) < 1e-5
    assert_same_tensors(loaded(DEIT, opened(DEIT, file, recognized=not plain)), ours)


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


@pytest.mark.parametrize(("name", "options"), DINOV2S.values(), ids=DINOV2S)
@torch.no_grad()
def test_dinov2_equals_timm_both_ways(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    state = hub_names(timm_model(name, **options))
    images = random_images(2, 3, *[options["img_size"]] * 2)
    theirs = read_by_timm(timm_model(name, **options), saved(state, tmp_path))
    ours = loaded(DINOV2, opened(DINOV2, saved(state, tmp_path)))
    assert_same_tensors(loaded(DINOV2, opened(DINOV2, saved(chunked(state), tmp_path))), ours)
    features = theirs.forward_features(images)
    assert relative_error(ours.forward_features(images), features) < 1e-5
    assert relative_error(ours(images), features[:, 0]) < 1e-5
    assert_same_attention(ours, images, timm_attention(theirs, images))

    file = written(DINOV2, ours, tmp_path / "written")
    assert torch.load(file, weights_only=True).keys() == state.keys()
    assert torch.load(file, weights_only=True)["mask_token"].shape == (1, 128)
    again = read_by_timm(timm_model(name, **options), file)
    assert relative_error(again.forward_features(images), features) < 1e-5
    assert_same_tensors(loaded(DINOV2, opened(DINOV2, file)), ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_half_precision_with_registers_is_loaded_without_rounding(dtype: torch.dtype, tmp_path: Path) -> None:
    name, options = DINOV2S["registers"]
    state = {key: value.to(dtype) for key, value in hub_names(timm_model(name, **options)).items()}
    ours = loaded(DINOV2, opened(DINOV2, saved(state, tmp_path)))
    # Their model in float32 has the same numbers, and adds the class token's position itself.
    whole = {key: value.float() for key, value in state.items()}
    theirs = read_by_timm(timm_model(name, **options), saved(whole, tmp_path))
    images = random_images(2, 3, *[options["img_size"]] * 2)
    assert relative_error(ours.float()(images), theirs.forward_features(images)[:, 0]) < 1e-5


# --- transformers: its models of the same papers, under names that its conversion scripts document


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


@pytest.mark.parametrize("options", DINOV3S.values(), ids=DINOV3S)
@torch.no_grad()
def test_dinov3_equals_transformers_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    config = dinov3_config(**options)
    theirs = randomize(transformers.DINOv3ViTModel(config)).eval()
    ours = loaded(DINOV3, opened(DINOV3, saved(dinov3_names(theirs), tmp_path)))
    file = written(DINOV3, ours, tmp_path / "written")
    again = read_by_transformers(file, config)
    for size in ((64, 64), (48, 96)):
        images = random_images(2, 3, *size)
        expected = theirs(images, output_attentions=True)
        assert relative_error(ours.forward_features(images), expected.last_hidden_state) < 1e-5
        assert relative_error(ours(images), expected.pooler_output) < 1e-5
        assert_same_attention(ours, images, expected.attentions)
        assert relative_error(again(images).last_hidden_state, expected.last_hidden_state) < 1e-5

    state = torch.load(file, weights_only=True)
    assert state.keys() == dinov3_names(theirs).keys()
    for name, tensor in state.items():
        assert tensor.shape == dinov3_names(theirs)[name].shape, name
        if name.endswith("bias_mask"):
            assert torch.equal(tensor, dinov3_names(theirs)[name])
            assert not state[name.removesuffix("_mask")].chunk(3)[1].any()
    assert_same_tensors(loaded(DINOV3, opened(DINOV3, file)), ours)


# --- shapes of the published models


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


# --- preprocessing


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


# --- rejected files


@functools.cache
def states() -> dict[Family, State]:
    """A small checkpoint of each family."""
    return {
        DEIT: deit_names(timm_model("deit3_small_patch16_224", **WIDE))["model"],
        DINOV2: hub_names(timm_model("vit_small_patch14_reg4_dinov2", **PATCH14)),
        DINOV3: dinov3_names(randomize(transformers.DINOv3ViTModel(dinov3_config()))),
    }


def altered(family: Family, **changed: Tensor | None) -> Source:
    state = {**states()[family], **{name.replace("__", "."): tensor for name, tensor in changed.items()}}
    tensors = {name: tensor for name, tensor in state.items() if tensor is not None}
    return family.before_reading(Source(name="altered.pth", tensors=tensors))


@pytest.mark.parametrize("family", [DEIT, DINOV2, DINOV3], ids=lambda family: family.name)
@pytest.mark.parametrize("shape", [(), (3,), (128, 0), (1, 1, 5)], ids=str)
def test_any_misshapen_tensor_is_rejected_in_one_line(family: Family, shape: tuple[int, ...]) -> None:
    for name in states()[family]:
        if name != "mask_token" and not name.startswith("blocks.1."):  # like those of the first block
            with pytest.raises(CheckpointError, match=r"^altered\.pth: "):
                loaded(family, altered(family, **{name: torch.zeros(shape)}))


def test_non_square_grid_is_rejected_in_writing_and_needs_a_config_in_reading(tmp_path: Path) -> None:
    config = small_config(embed_dim=64, num_heads=1, image_size=(32, 48))
    with pytest.raises(CheckpointError, match="4x6"):
        written(DEIT, VisionTransformer(config), tmp_path)
    theirs = timm_model("deit_tiny_patch16_224", **WIDE | {"img_size": (64, 96)})
    source = opened(DEIT, saved(deit_names(theirs), tmp_path), recognized=False)
    with pytest.raises(CheckpointError, match=r"25 positions.*config=ViTConfig"):
        DEIT.read_config(source)
    square = DEIT.read_config(altered(DEIT)).replace(layer_scale=None, position_prefix=True)
    images = random_images(2, 3, 64, 96)
    ours = loaded(DEIT, source, square.replace(image_size=(64, 96)))
    assert relative_error(ours(images), theirs(images)) < 1e-5


def test_width_that_does_not_determine_the_heads_needs_a_config() -> None:
    narrow = timm_model("deit_tiny_patch16_224", embed_dim=48, num_heads=3, img_size=32)
    with pytest.raises(CheckpointError, match=r"width of 48.*config=ViTConfig"):
        DEIT.read_config(Source(name="narrow.pth", tensors=narrow.state_dict()))


def test_duplicate_block_in_two_chunks_is_rejected() -> None:
    tensors = {"blocks.0.0.norm1.weight": torch.ones(3), "blocks.1.0.norm1.weight": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"blocks\.0\.norm1\.weight twice"):
        DINOV2.before_reading(Source(name="chunks.pth", tensors=tensors))


@pytest.mark.parametrize("rounded", [False, True])
def test_rotary_periods_of_the_file_are_the_models(rounded: bool) -> None:
    stored = periods(16).bfloat16() if rounded else periods(16)
    config = DINOV3.read_config(altered(DINOV3, rope_embed__periods=stored))
    assert config.rotary.rotary_rounded == rounded
    places = (torch.arange(0.5, 3) / 3 * 2 - 1)[:, None, None].expand(3, 2, 1)  # of the rows of a 3x2 grid
    rows = (2 * torch.pi * places / stored.float()).flatten(0, 1)  # (6, 16): facebook's formula
    cos, _ = RotaryPositions(config).layout((3, 2), torch.device("cpu")).rotation
    torch.testing.assert_close(cos[:, 0, :16], rows.cos(), rtol=0, atol=1e-6)
    assert torch.equal(
        DINOV3.before_writing({"cls_token": torch.zeros(1, 1, 64)}, config)["rope_embed.periods"],
        stored.float(),
    )


def test_periods_of_another_base_are_rejected_and_rounded_ones_accepted() -> None:
    altered(DINOV3, rope_embed__periods=periods(16).bfloat16())
    with pytest.raises(CheckpointError, match=r"periods\[1\] is 1\.778, but 1\.334 .* base of 100"):
        altered(DINOV3, rope_embed__periods=10000 ** (torch.arange(16) / 16))
    with pytest.raises(CheckpointError, match=r"periods\[0\] is nan"):
        altered(DINOV3, rope_embed__periods=torch.full((16,), torch.nan))
    with pytest.raises(CheckpointError, match=r"7 rope_embed\.periods are for heads of width 28"):
        DINOV3.read_config(altered(DINOV3, rope_embed__periods=periods(7)))
    with pytest.raises(CheckpointError, match=r"missing rope_embed\.periods"):
        DINOV3.read_config(altered(DINOV3, rope_embed__periods=None))


def test_bias_mask_of_other_parts_than_the_keys_is_rejected() -> None:
    ones, zeros = torch.ones(128), torch.zeros(128)
    altered(DINOV3, blocks__1__attn__qkv__bias_mask=torch.cat([ones, torch.nan * ones, ones]))
    for parts in ((ones, ones, ones), (zeros, zeros, ones), (ones, zeros, torch.nan * ones), (ones[1:],)):
        with pytest.raises(CheckpointError, match=r"blocks\.1\.attn\.qkv\.bias_mask does not bar"):
            altered(DINOV3, blocks__1__attn__qkv__bias_mask=torch.cat(parts))


def test_norm_of_local_crops_is_ignored_in_reading_and_written_for_the_largest_model() -> None:
    source = altered(DINOV3, local_cls_norm__weight=torch.ones(128), local_cls_norm__bias=torch.ones(128))
    assert_same_tensors(loaded(DINOV3, source), loaded(DINOV3, altered(DINOV3)))
    state = {"cls_token": torch.zeros(1, 1, 4096), "norm.weight": torch.ones(9), "norm.bias": torch.ones(9)}
    left = DINOV3.before_writing(state, named_config("dinov3_7b16"))
    assert {"local_cls_norm.weight", "local_cls_norm.bias"} <= left.keys()


def test_positions_without_a_prefix_are_written_with_a_zero_prefix_for_dinov2(
    tmp_path: Path,
) -> None:
    options = {"embed_dim": 64, "num_heads": 1, "head": "none", "position_prefix": False}
    ours, images = small_model(**options, resample="dinov2"), random_images(2, 3, 32, 32)
    again = loaded(DINOV2, opened(DINOV2, written(DINOV2, ours, tmp_path)))
    assert relative_error(again(images), ours(images)) < 1e-6


def test_written_file_stores_only_its_tensors(tmp_path: Path) -> None:
    model = loaded(DINOV3, altered(DINOV3)).to(torch.bfloat16)
    whole = torch.randn(1000, 1000)
    model.norm.weight = nn.Parameter(whole[0, :128])
    file = written(DINOV3, model, tmp_path)
    state = torch.load(file, weights_only=True)
    assert state["blocks.0.attn.qkv.bias_mask"].dtype == torch.bfloat16
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert file.stat().st_size < 1.2 * sum(tensor.nbytes for tensor in state.values())
    assert not list(tmp_path.glob(".*"))
