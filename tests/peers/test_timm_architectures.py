"""Every architecture of timm is read correctly or rejected, never misread. Without weights."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.uninitialized import uninitialized
from vitascope.models.config import OPTIONS, ViTConfig
from vitascope.models.sizes import named_config
from vitascope.models.weights.all_families import TIMM as LIBRARY
from vitascope.models.weights.families.timm import Timm
from vitascope.models.weights.families.timm_settings import TIMM_NAMES
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.mapping import Source, State, from_family

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")

TIMM = Timm()
PLAIN_VITS = ("vision_transformer", "vision_transformer_hybrid", "deit")
LIKE_VITS = ("eva", "vision_transformer_relpos", "beit", "naflexvit")
"""timm's modules: of ViTs, and of models whose tensors have a ViT's names, or most of them."""


def architectures(*modules: str) -> list[str]:
    return [name for module in modules for name in timm.list_models(module=module)]


def build(name: str, **options: Any) -> nn.Module:
    """timm's model without values, built within milliseconds."""
    with torch.device("meta"), uninitialized():
        return timm.create_model(name, **options)


def tensors_of(peer: nn.Module) -> State:
    """The tensors of a model without values, but for the head's bias: zeros would be a projection's."""
    state = dict(peer.state_dict())
    return state | {name: torch.ones(state[name].shape) for name in ("head.bias",) if name in state}


def source_of(name: str, peer: nn.Module, **config: Any) -> Source:
    """A source as on the hub: without `model_args`, since nothing differs from the name."""
    told = {
        "architecture": name,
        "num_classes": peer.num_classes,
        "global_pool": peer.global_pool,
        "pretrained_cfg": peer.pretrained_cfg,
    }
    told |= config
    told = {key: value for key, value in told.items() if value is not None}
    return Source(name=name, tensors=tensors_of(peer), config=told)


def read(source: Source) -> ViTConfig | None:
    """The architecture, if it and all tensors are accepted."""
    try:
        source = TIMM.before_reading(source)
        config = TIMM.read_config(source)
        from_family(TIMM, source, config)
    except CheckpointError:
        return None
    return config


# The layers of plain ViTs; a model with any other layer is not supported.
LAYERS = re.compile(
    "VisionTransformer|VisionTransformerDistilled|PatchEmbed|HybridEmbed|Block|ResPostBlock|Attention|Mlp|GluMlp|SwiGLU|LayerNorm|RmsNorm|"
    "LayerScale|AttentionPoolLatent|Conv2d|Linear|Identity|Dropout|Sequential|ModuleList|"
    "GELU|GELUTanh|QuickGELU|SiLU|"
    "ResNetV2|ResNetStage|Bottleneck|DownsampleConv|StdConv2dSame|GroupNormAct|ReLU|MaxPool2dSame|"
    "ClassifierHead|SelectAdaptivePool2d"
)


def is_plain(peer: nn.Module) -> bool:
    """Whether vitascope supports timm's model, judged by its layers."""
    if not all(LAYERS.fullmatch(type(module).__name__) for module in peer.modules()):
        return False
    return nn.Identity in (type(peer.norm), type(peer.fc_norm)) and (
        peer.global_pool == "map" or not peer.pool_include_prefix
    )


def pixels_a_patch(peer: nn.Module) -> tuple[int, int]:
    ph, pw = peer.patch_embed.proj.kernel_size
    rh, rw = getattr(peer.patch_embed, "feature_ratio", (1, 1))
    return ph * rh, pw * rw


ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "swiglu"}
POOLS = {"token": "cls", "avg": "mean", "map": "map"}


def facts(peer: nn.Module) -> dict[str, Any]:
    """Our options, read from timm's layers."""
    block, backbone = peer.blocks[-1], getattr(peer.patch_embed, "backbone", None)
    return {
        "image_size": tuple(peer.patch_embed.img_size),
        "patch_size": pixels_a_patch(peer),
        "in_channels": peer.in_chans,
        "num_classes": peer.num_classes or ViTConfig().num_classes,
        "embed_dim": peer.embed_dim,
        "depth": len(peer.blocks),
        "num_heads": block.attn.num_heads,
        "stem": "conv" if backbone is None else "resnet",
        "resnet_layers": tuple(len(stage.blocks) for stage in getattr(backbone, "stages", ())),
        "patch_bias": peer.patch_embed.proj.bias is not None,
        "positions": "none" if peer.pos_embed is None else "learned",
        "position_prefix": not peer.no_embed_class,
        "embedding_norm": isinstance(peer.norm_pre, nn.LayerNorm),
        "norm": "branch" if type(block).__name__ == "ResPostBlock" else "pre",
        "inner_norm": inner_norm(block),
        "norm_type": "layer" if isinstance(block.norm1, nn.LayerNorm) else "rms",
        "norm_eps": block.norm1.eps,
        "patch_norm": not isinstance(getattr(peer.patch_embed, "norm", nn.Identity()), nn.Identity),
        "qk_norm": not isinstance(block.attn.q_norm, nn.Identity),
        "linear_bias": block.attn.proj.bias is not None,
        "pool_prefix": peer.pool_include_prefix,
        "qkv_bias": "none" if block.attn.qkv.bias is None else "all",
        "mlp": ACTIVATIONS[type(block.mlp.act).__name__],
        "mlp_dim": block.mlp.fc2.in_features,
        "layer_scale": hasattr(getattr(block, "ls1", None), "gamma"),
        "class_token": peer.cls_token is not None,
        "distillation_token": hasattr(peer, "dist_token"),
        "num_registers": peer.num_reg_tokens,
        "pool": POOLS[peer.global_pool],
        "pool_norm": last_norm(peer),
        "head": "linear" if isinstance(peer.head, nn.Linear) else "none",
    }


def inner_norm(block: nn.Module) -> str:
    if isinstance(block.attn.norm, nn.LayerNorm):
        return "all"
    return "mlp" if isinstance(block.mlp.norm, nn.LayerNorm) else "none"


def last_norm(peer: nn.Module) -> str:
    if not isinstance(peer.norm, nn.Identity):
        return "before"
    return "none" if isinstance(peer.fc_norm, nn.Identity) else "after"


def differences(config: ViTConfig, peer: nn.Module) -> dict[str, Any]:
    """The differing options, with our value and timm's."""
    ours = {name: config.option(name) for name in OPTIONS} | {
        "mlp_dim": config.mlp_dim,
        "class_token": config.readout.has_class_token,
        "layer_scale": config.block.layer_scale is not None,
        "resnet_layers": config.embedding.resnet_layers if config.embedding.stem == "resnet" else (),
    }
    return {name: (ours[name], value) for name, value in facts(peer).items() if ours[name] != value}


def test_every_vit_of_timm_is_read_correctly_or_rejected() -> None:
    wrong: dict[str, Any] = {}
    num_read = 0
    for name in architectures(*PLAIN_VITS):
        peer = build(name, depth=2, weight_init="skip")
        config = read(source_of(name, peer))
        if (config is not None) != is_plain(peer):
            wrong[name] = "read" if config else "rejected"
        elif config is not None:
            num_read += 1
            if found := differences(config, peer):
                wrong[name] = found
            unsaid = TIMM.before_reading(source_of(name, peer, global_pool=None))
            if TIMM.read_config(unsaid) != config:  # as in some old files
                wrong[name] = "its pooling if none is given"
    assert wrong == {}
    assert num_read >= 163  # of 193 in timm 1.0.31


def test_other_models_with_the_tensors_of_vits_are_rejected() -> None:
    """Rotary and relative positions, and more: some have a ViT's tensors exactly."""
    shallow = {
        name: {} if re.search("naflex|sapiens2", name) else {"depth": 2} for name in architectures(*LIKE_VITS)
    }
    for name, options in shallow.items():
        source = source_of(name, build(name, **options))
        if LIBRARY.of(source) is not LIBRARY.parts[0]:
            continue  # read by another class, and compared in test_timm.py
        with pytest.raises(CheckpointError, match=f"{name} (has|is not a plain ViT)") as caught:
            TIMM.read_config(TIMM.before_reading(source))
        assert "config=" not in str(caught.value)


def test_other_architecture_with_a_vits_tensors_is_rejected_even_with_a_config(tmp_path: Path) -> None:
    name, reason = "vit_relpos_base_patch16_224", "relative positions"
    peer = timm.create_model(name, depth=1, num_classes=2)
    timm.models.save_for_hf(peer, tmp_path / "hub", safe_serialization=True)
    config = named_config("vit_b16", depth=1, num_classes=2)
    with pytest.raises(CheckpointError, match=f"{name} has .*{reason}.*nearest: vit_base_patch16_224"):
        from_pretrained(tmp_path / "hub", config=config)
    torch.save({"arch": name, "state_dict": peer.state_dict()}, tmp_path / "model_best.pth.tar")
    with pytest.raises(CheckpointError, match=f"{name} has .*{reason}"):
        from_pretrained(f"timm:{tmp_path / 'model_best.pth.tar'}", config=config)


def test_every_other_architecture_of_timm_is_rejected_by_name() -> None:
    others = set(timm.list_models()) - set(architectures(*PLAIN_VITS))
    assert len(others) > 1000
    for name in others:
        with pytest.raises(CheckpointError, match=rf"x: {name} is not a plain ViT") as caught:
            TIMM.read_config(Source(name="x", tensors={}, config={"architecture": name}))
        assert "config=" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("vit_base_patch16_224_in21k", "vit_base_patch16_224"),
        ("vit_base_patch16_224_miil_in21k", "vit_base_patch16_224_miil"),
        ("vit_base_patch32_224_sam", "vit_base_patch32_224"),
        ("vit_small_patch8_224_dino", "vit_small_patch8_224"),
        ("vit_large_patch14_224_clip_laion2b", "vit_large_patch14_clip_224"),
        ("vit_small_r26_s32_224_in21k", "vit_small_r26_s32_224"),
        ("deit3_huge_patch14_224_in21ft1k", "deit3_huge_patch14_224"),
        ("vit_base_patch16_clip_quickgelu_224.openai", "vit_base_patch16_clip_quickgelu_224"),
    ],
)
def test_old_names_and_tags_mean_the_same_architecture(old: str, new: str) -> None:
    peer = build(new, depth=2)
    config = read(source_of(old, peer))
    assert config is not None
    assert differences(config, peer) == {}


@pytest.mark.parametrize(("theirs", "ours"), [it for it in TIMM_NAMES.items() if "dinov3" not in it[1]])
def test_named_sizes_equal_timm(theirs: str, ours: str) -> None:
    config, theirs = named_config(ours), theirs if "dinov2" in theirs else f"{theirs}_224"
    num_classes = 0 if config.readout.head == "none" else config.num_classes
    peer = build(theirs, num_classes=num_classes, weight_init="skip")
    assert differences(config, peer) == {}
    told = read(source_of(theirs, peer))
    assert told is not None
    assert differences(told, peer) == {}


def with_arguments(name: str, **args: Any) -> Source:
    """The files of a timm model that was created with arguments."""
    peer = build(name, depth=2, **args)
    return source_of(name, peer, global_pool=None, model_args=args)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("vit_base_patch16_224", {"num_heads": 6}),
        ("vit_base_patch16_224", {"embed_dim": 96, "num_heads": 2}),
        ("vit_base_patch16_224", {"act_layer": "gelu_tanh"}),
        ("vit_base_patch16_224", {"act_layer": "quick_gelu", "drop_path_rate": 0.1}),
        ("vit_base_patch16_224", {"pre_norm": True, "qk_norm": False, "pool_include_prefix": False}),
        ("vit_base_patch16_clip_quickgelu_224", {"act_layer": "gelu"}),
        ("vit_base_patch16_clip_224", {"pre_norm": False}),
        ("vit_base_patch16_siglip_224", {"global_pool": "avg"}),
        ("vit_base_patch16_224", {"global_pool": "avg", "fc_norm": False}),
        ("vit_base_patch16_224", {"img_size": (32, 64), "patch_size": (16, 8), "no_embed_class": True}),
        ("vit_base_patch16_224", {"img_size": 64, "in_chans": 1}),
        ("vit_giant_patch14_dinov2", {"act_layer": "swish"}),
        ("vit_base_patch16_224", {"init_values": 0.1, "dynamic_img_size": True}),
        ("vit_base_patch16_224", {"final_norm": False}),
        ("vit_base_patch16_224", {"scale_mlp_norm": True}),
        ("vit_base_patch16_224", {"scale_attn_norm": True, "scale_mlp_norm": True}),
    ],
)
def test_arguments_override_the_name(name: str, args: dict[str, Any]) -> None:
    config = read(with_arguments(name, **args))
    assert config is not None
    assert differences(config, build(name, depth=2, **args)) == {}


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("vit_base_patch16_224", {"act_layer": "relu"}, "gelu MLP with timm's act_layer 'relu'"),
        ("vit_base_patch16_224", {"act_layer": "silu"}, "gelu MLP with timm's act_layer 'silu'"),
        ("vit_giant_patch14_dinov2", {"act_layer": "gelu"}, "swiglu MLP with timm's act_layer 'gelu'"),
        ("vit_base_patch16_224", {"global_pool": ""}, "global_pool '' is none of token, avg, map"),
        ("vit_base_patch16_224", {"global_pool": "avgmax"}, "global_pool 'avgmax' is none of token, avg"),
        ("vit_base_patch16_224", {"global_pool": "prr"}, "global_pool 'prr' is none of token, avg, map"),
        ("vit_base_patch16_224", {"embed_dim": 384}, "embed_dim without num_heads.*config=ViTConfig"),
        ("vit_base_patch16_224", {"global_pool": "avg", "pool_include_prefix": True}, "no model with timm's"),
        ("vit_base_patch16_224", {"norm_layer": "layernorm2d"}, "norm_layer 'layernorm2d' is none of"),
        ("vit_base_patch16_siglip_224", {"fc_norm": True}, 'pool_norm "after" goes with one pooled token'),
    ],
)
def test_unsupported_arguments_are_rejected(name: str, args: dict[str, Any], reason: str) -> None:
    source = with_arguments(name, **args)
    with pytest.raises(CheckpointError, match=reason):
        from_family(TIMM, source, TIMM.read_config(source))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("vit_base_patch16_clip_224", {}, "activation of CLIP and SigLIP is unknown"),
        ("vit_base_patch16_siglip_224", {}, "activation of CLIP and SigLIP is unknown"),
        ("vit_base_patch16_224", {"embed_dim": 96, "num_heads": 3}, "the number of heads does not follow"),
        ("vit_base_patch16_224", {"img_size": (32, 96)}, "13 positions do not form a square grid"),
        ("vit_base_patch16_224", {"patch_size": (8, 16), "img_size": (32, 64)}, "do not form a square grid"),
    ],
)
def test_ambiguous_file_without_settings_needs_a_config(
    name: str, options: dict[str, Any], reason: str
) -> None:
    source = bare(build(name, depth=2, **options))
    with pytest.raises(CheckpointError, match=f"{reason}.*config=ViTConfig"):
        TIMM.read_config(source)


def bare(peer: nn.Module, **told: Any) -> Source:
    """The tensors alone, with the given fields added."""
    return Source(**{"name": "x", "tensors": tensors_of(peer), **told})


ODD = {
    "vit_base_patch16_gap_224": {"num_heads": 16, "mlp": "gelu"},
    "vit_giantopt_patch16_siglip_gap_256": {"num_heads": 16, "mlp": "gelu_tanh"},
    "vit_giantopt_patch16_siglip_gap_384": {"num_heads": 16, "mlp": "gelu_tanh"},
    "vit_so400m_patch16_siglip_gap_384": {"num_heads": 16, "mlp": "gelu_tanh"},
    "vit_large_patch16_siglip_gap_512": {"num_heads": 16, "mlp": "gelu_tanh"},
    "vit_base_patch32_siglip_gap_256": {"num_heads": 12, "mlp": "gelu_tanh"},
    "vit_base_patch16_clip_quickgelu_224": {"num_heads": 12, "mlp": "quick_gelu", "norm_eps": 1e-5},
    "test_vit": {"num_heads": 2, "mlp": "gelu"},
}
"""Architectures whose heads or GELU shapes do not suggest."""


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("where", ["file", "folder", "training"])
def test_file_without_settings_is_read_by_its_named_architecture(name: str, where: str) -> None:
    told: dict[str, Any] = {
        "file": {"file": f"{name}.augreg_in1k.safetensors"},
        "folder": {"name": f"downloads/{name}"},
        "training": {"training": {"arch": f"hf-hub:timm/{name}.augreg_in1k"}, "file": "model_best.pth.tar"},
    }[where]
    peer = build(name, depth=2, weight_init="skip")
    source = bare(peer, **told)
    config = TIMM.read_config(source)
    assert ODD[name].items() <= {option: config.option(option) for option in OPTIONS}.items()
    assert differences(config, peer) == {}
    assert TIMM.guessed(source, config) == ""


def test_constructor_arguments_of_timms_training_are_read() -> None:
    args = {"num_heads": 6, "act_layer": "gelu_tanh", "img_size": 64}
    peer = build("vit_base_patch16_224", depth=2, global_pool="avg", fc_norm=False, **args)
    training = {"arch": "vit_base_patch16_224", "model_kwargs": args, "gp": "avg"}
    assert differences(TIMM.read_config(bare(peer, training=training)), peer) == {}


@pytest.mark.parametrize("name", [name for name in ODD if "siglip" in name])
def test_published_siglip_is_recognized_by_its_shapes(name: str) -> None:
    peer = build(name, weight_init="skip")
    source = bare(peer)
    config = TIMM.read_config(source)
    assert differences(config, peer) == {}
    assert TIMM.guessed(source, config) == f"num_heads {config.num_heads} and mlp gelu_tanh"


@pytest.mark.parametrize(
    ("name", "outputs", "tag", "bias"),
    [
        ("vit_base_patch16_clip_224", 512, "openai", 0.0),
        ("eva02_base_patch16_clip_224", 512, "merged2b", 0.5),
        ("eva02_base_patch16_clip_224", 1000, "merged2b_ft_in1k", 0.5),
        ("vit_base_patch16_clip_224", 512, None, 0.5),
        ("vit_base_patch16_224", 512, "augreg_in21k", 0.5),
    ],
)
def test_a_projection_is_an_embedding_and_never_classes(
    name: str, outputs: int, tag: str | None, bias: float
) -> None:
    peer = build(name, depth=1, num_classes=outputs)
    source = source_of(name, peer, pretrained_cfg={**peer.pretrained_cfg, "tag": tag})
    tensors = {**source.tensors, "head.bias": torch.full((outputs,), bias)}
    source = LIBRARY.before_reading(dataclasses.replace(source, tensors=tensors))
    is_embedding = bias == 0 or tag == "merged2b"
    assert LIBRARY.read_config(source).outputs == ("embedding" if is_embedding else "exclusive")
