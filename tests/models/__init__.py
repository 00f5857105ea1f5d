"""Small models of every option with random weights, and random configurations."""

import functools
from typing import Any, TypeVar, cast

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from tests.uninitialized import uninitialized
from vitascope.models.config import ViTConfig
from vitascope.models.positions import Layout
from vitascope.models.preprocess import Preprocess
from vitascope.models.resnet import ResNet
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.sizes import ModelConfig, named_config
from vitascope.models.trust import PredictionSets, Trust, nearest_class
from vitascope.models.vision_model import VisionModel, build
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.training.evaluation.calibration import class_gaussians, familiarity_of

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AnyModel = TypeVar("AnyModel", VisionTransformer, ResNet)

law = settings(deadline=None, max_examples=25)  # a deadline would time the machine
law_of_models = settings(law, max_examples=8)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Equation 1
    "overlapping patches": {"stem": "overlap"},
    "overlapping patches, stride 8x4": {"stem": "overlap", "stride": (8, 4)},
    "resnet": {"stem": "resnet", "resnet_layers": (1, 2), "resnet_width": 4},
    "resnet as timm has it": {
        "stem": "resnet",
        "resnet_layers": (1,),
        "resnet_width": 2,
        "resnet_dialect": "timm",
        "patch_bias": False,
    },
    "tokenizer": {"stem": "tokenizer", "tokenizer_widths": (4, 6), "patch_bias": False},
    "tokenizer that pools in two of three layers": {
        "stem": "tokenizer",
        "tokenizer_widths": (6, 4),
        "patch_size": (4, 4),
    },
    "tokenizer that pools in its last layers": {
        "stem": "tokenizer",
        "tokenizer_widths": (6, 4),
        "tokenizer_pooling": (1, 2),
        "patch_size": (4, 4),
    },
    "tokenizer with GELU": {"stem": "tokenizer", "tokenizer_widths": (4, 6), "tokenizer_activation": "gelu"},
    "no patch bias": {"patch_bias": False},
    "no positions": {"positions": "none"},
    "positions of patches only": {"position_prefix": False, "num_registers": 2},
    "rows and columns": {"positions": "learned_2d", "resample": "torchvision"},
    "sincos 1d": {"positions": "sincos_1d"},
    "sincos 2d": {"positions": "sincos_2d"},
    "sincos 2d of big_vision, map": {"positions": "sincos_2d_big_vision", "pool": "map"},
    "relative": {"positions": "relative"},
    "relative without prefix": {"positions": "relative", "pool": "mean", "resample": "jax"},
    "rotary": {"positions": "rotary", "rotary_base": 50.0},
    "rotary with registers": {
        "positions": "rotary",
        "num_registers": 4,
        "rotary_rounded": True,
        "resample": "huggingface",
    },
    "relative by block": {"positions": "relative_by_block", "absolute": "all"},
    "relative by block without prefix, window": {
        "positions": "relative_by_block",
        "pool": "mean",
        "attention": "window",
        "window": 2,
    },
    "rotary by row and column": {"positions": "rotary_axial", "rotary_base": 50.0, "absolute": "all"},
    "rotary, stretched": {"positions": "rotary_axial", "rotary_grid": (3, 5), "rotary_offset": 1.0},
    "rotary with learned frequencies": {
        "positions": "rotary_mixed",
        "absolute": "patches",
        "num_registers": 1,
    },
    "embedding norm": {"embedding_norm": True},
    "norm of patches": {"patch_norm": True},
    "norm of overlapping patches, RMS": {"stem": "overlap", "patch_norm": True, "norm_type": "rms"},
    # Equations 2 and 3
    "post-norm": {"norm": "post"},
    "post-norm, mean": {"norm": "post", "pool": "mean", "norm_eps": 1e-3},
    "norm of branches": {"norm": "branch", "layer_scale": 0.5},
    "norm inside the MLP": {"inner_norm": "mlp", "mlp": "swiglu"},
    "RMS norms": {"norm_type": "rms", "inner_norm": "all", "embedding_norm": True},
    "norm of queries and keys": {"qk_norm": True},
    "norm of queries and keys, RMS, rotary": {"qk_norm": True, "norm_type": "rms", "positions": "rotary"},
    "no other biases": {"linear_bias": False, "mlp": "swiglu", "qkv_bias": "none"},
    "no other biases, map": {"linear_bias": False, "pool": "map", "inner_norm": "mlp"},
    "norms inside": {"inner_norm": "all", "pool": "map"},
    "axial": {"attention": "axial"},
    "axial, relative, mean": {"attention": "axial", "positions": "relative", "pool": "mean"},
    "window": {"attention": "window", "window": 2},
    "window, rotary, registers": {
        "attention": "window",
        "window": (1, 2),
        "positions": "rotary",
        "num_registers": 3,
    },
    "window, relative": {"attention": "window", "window": (2, 1), "positions": "relative"},
    "no qkv bias": {"qkv_bias": "none"},
    "no key bias": {"qkv_bias": "no_key"},
    "tanh gelu": {"mlp": "gelu_tanh"},
    "quick gelu": {"mlp": "quick_gelu"},
    "swiglu": {"mlp": "swiglu", "mlp_ratio": 8 / 3},
    "layer scale": {"layer_scale": 1e-2},
    "fewer heads of the same width": {"num_heads": 3, "head_dim": 4},
    "fewer heads, map, no key bias": {"num_heads": 1, "head_dim": 8, "pool": "map", "qkv_bias": "no_key"},
    "token merging": {"token_merging": 3},
    "token merging, mean, registers": {"token_merging": 5, "pool": "mean", "num_registers": 2},
    # Equation 4
    "mean beside a class token": {"pool": "mean", "class_token": True},
    "mean": {"pool": "mean", "class_token": False},
    "mean, then norm": {"pool": "mean", "pool_norm": "after"},
    "class token, then norm": {"pool_norm": "after"},
    "no last norm": {"pool_norm": "none", "pool": "mean"},
    "class token and mean": {"pool": "cls_mean"},
    "map": {"pool": "map", "resample": "dinov2"},
    "map, swiglu, registers, mlp head": {"pool": "map", "mlp": "swiglu", "num_registers": 2, "head": "mlp"},
    "map of every token": {
        "pool": "map",
        "pool_prefix": True,
        "class_token": True,
        "pool_heads": 4,
        "pool_mlp_ratio": 1.5,
    },
    "sequence": {"pool": "sequence"},
    "sequence beside a class token, then norm": {
        "pool": "sequence",
        "class_token": True,
        "pool_norm": "after",
        "num_registers": 1,
    },
    "distillation": {"distillation_token": True},
    "distillation without head": {"distillation_token": True, "head": "none", "num_registers": 1},
    "distillation from zero": {"distillation_token": True, "head_init": "zero"},
    "registers": {"num_registers": 3},
    "zero head": {"head_init": "zero"},
    "mlp head": {"head": "mlp"},
    "pre_logits": {"head": "pre_logits"},
    "cosine head": {"head": "cosine"},
    "cosine head of a projection": {"head": "cosine", "projection": 7},
    "no head": {"head": "none"},
    "independent classes": {"outputs": "independent"},
    "embedding": {"outputs": "embedding"},
    # Training
    "timm's initialization": {"init": "timm"},
    "mimetic initialization": {"init": "mimetic"},
    "dropout": {"dropout": 0.2, "attention_dropout": 0.2, "drop_path": 0.2},
    "patch dropout": {"patch_dropout": 0.25},
    "patch dropout, rotary": {"patch_dropout": 0.5, "positions": "rotary"},
    "patch dropout, learned frequencies": {"patch_dropout": 0.5, "positions": "rotary_mixed"},
}
"""Options of a small model, by name; `test_every_value_of_every_option_is_in_a_variant` keeps it complete."""


def small_config(**overrides: Any) -> ViTConfig:
    values: dict[str, Any] = {
        "image_size": 32,
        "patch_size": 8,
        "num_classes": 5,
        "embed_dim": 16,
        "depth": 3,
        "num_heads": 2,
    }
    return ViTConfig.from_dict(values | overrides)


def small_model(seed: int = 0, **overrides: Any) -> VisionTransformer:
    with uninitialized():
        model = VisionTransformer(small_config(**overrides))
    return with_preprocess(randomize(model, seed).eval(), default_preprocess(model.config))


def labelling_model(
    *probabilities: float, thresholds: tuple[float, ...] = (), **overrides: Any
) -> VisionTransformer:
    """A model of several classes per image that gives any image these probabilities; with a `spread` their
    logits depend on the image."""
    spread = overrides.pop("spread", 0.0)
    options = {"num_classes": len(probabilities), "outputs": "independent", "thresholds": thresholds}
    model = small_model(**options | overrides)
    head = cast("nn.Linear", model.head)
    with torch.no_grad():
        head.weight.mul_(spread)
        head.bias.copy_(torch.tensor(probabilities).logit())
    return model


def with_preprocess(model: AnyModel, preprocess: Preprocess) -> AnyModel:
    """The same model, as if it had been trained with this preprocessing."""
    model.preprocess = preprocess
    return model


@torch.no_grad()
def with_trust(model: AnyModel, images: int = 120) -> AnyModel:
    """The same model, calibrated on random images whose classes are those that it predicts."""
    config, random = model.config, torch.Generator().manual_seed(0)
    shape = (2 * images, config.in_channels, *config.image_hw)
    features = model.eval().embed(torch.randn(shape, generator=random))
    logits = model.head(features)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=random)[:, 0]
    gaussians = class_gaussians(features[:images], labels[:images].numpy())
    model.trust = Trust(
        temperature=1.5,
        sets=PredictionSets.fitted(logits[images:].softmax(dim=1), labels[images:]),
        familiarity=familiarity_of(gaussians, nearest_class(features[images:], **gaussians)),
    )
    return model


@torch.no_grad()
def randomize(module: AnyModule, seed: int = 0) -> AnyModule:
    """Fill every parameter with random numbers: zero or one would hide that it is unused or used twice."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.ndim == 1:  # biases around zero, weights of norms around one
            parameter.copy_(0.3 * noise + name.endswith("weight"))
        elif parameter.ndim == 3:  # tokens, positions
            parameter.copy_(0.5 * noise)
        else:
            inputs = parameter[0].numel() if parameter.ndim else 1
            parameter.copy_(noise / inputs**0.5)
    return module


def random_images(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sequence(T: int) -> Layout:
    """A layout of T tokens without positions."""
    return Layout((T, 1), 0)


def small_resnet(seed: int = 0, **overrides: Any) -> ResNet:
    values: dict[str, Any] = {"image_size": 32, "num_classes": 5, "layers": (1, 2), "width": 4}
    with uninitialized():
        model = ResNet(ResNetConfig.from_dict(values | overrides))
    return with_preprocess(randomize(model, seed).eval(), default_preprocess(model.config))


def on_meta(config: ModelConfig) -> VisionModel:
    with torch.device("meta"):
        return build(config)


@functools.cache
def named_on_meta(name: str) -> VisionModel:
    return on_meta(named_config(name))


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@st.composite
def valid_configs(draw: st.DrawFn) -> ViTConfig:
    """Small configurations over every option, drawn so that they fit together."""

    def small(most: int) -> int:
        return draw(st.integers(1, most))

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    heads, grid, window = small(3), (small(4), small(4)), (small(2), small(2))
    attention = one_of("global", "axial", "window")
    if attention == "window":
        grid = (grid[0] * window[0], grid[1] * window[1])
    stem = one_of("conv", "overlap", "resnet", "tokenizer")
    patch, stride, layers, widths = (small(6), small(6)), None, one_of((), (1,), (2, 1)), one_of((), (3,))
    if stem == "overlap":
        stride = (small(patch[0]), small(patch[1]))
    if stem == "resnet":
        whole = 4 * 2 ** max(0, len(layers) - 1)
        patch = (whole * small(2), whole * small(2))
    if stem == "tokenizer":
        patch = (2 ** (len(widths) + 1),) * 2
    step = stride or patch
    positions = one_of(
        "none",
        "learned",
        "learned_2d",
        "sincos_1d",
        "sincos_2d",
        "sincos_2d_big_vision",
        "relative",
        "relative_by_block",
        "rotary",
        "rotary_axial",
        "rotary_mixed",
    )
    related = positions.startswith(("relative", "rotary"))
    init = one_of("paper", "mimetic", "timm")
    waves = positions.startswith("rotary") or positions.startswith("sincos") or init == "mimetic"
    head_dim = 4 * small(2) if waves else small(6)
    mergeable = attention == "global" and not related
    merging = draw(st.integers(0, 5)) if mergeable else 0
    distilled = draw(st.booleans())
    pool = "cls" if distilled else one_of("cls", "mean", "cls_mean", "map", "sequence")
    after = pool in ("cls", "mean", "sequence") and not distilled and draw(st.booleans())
    num_classes = small(7)
    names = st.lists(st.text(max_size=3), min_size=num_classes, max_size=num_classes)
    return ViTConfig.from_dict(
        {
            "image_size": tuple(
                whole + (count - 1) * move for whole, count, move in zip(patch, grid, step, strict=True)
            ),
            "patch_size": patch,
            "in_channels": small(5),
            "num_classes": num_classes,
            "class_names": tuple(draw(st.one_of(st.just([]), names))),
            "embed_dim": heads * head_dim,
            "depth": small(3),
            "num_heads": small(heads),
            "head_dim": head_dim,
            "stem": stem,
            "stride": stride,
            "patch_bias": draw(st.booleans()),
            "resnet_layers": layers,
            "resnet_width": one_of(1, 2, 4),
            "resnet_dialect": one_of("jax", "timm"),
            "tokenizer_widths": widths,
            "tokenizer_activation": one_of("relu", "gelu"),
            "positions": positions,
            "position_prefix": draw(st.booleans()),
            "absolute": one_of("none", "patches", "all") if related else "none",
            "resample": one_of("timm", "huggingface", "torchvision", "jax", "dinov2"),
            "rotary_base": one_of(10.0, 100.0),
            "rotary_rounded": draw(st.booleans()),
            "rotary_grid": one_of(None, (3, 2)),
            "rotary_offset": one_of(0.0, 1.0),
            "embedding_norm": draw(st.booleans()),
            "patch_norm": stem in ("conv", "overlap") and draw(st.booleans()),
            "norm": "pre" if merging else one_of("pre", "post", "branch"),
            "norm_type": one_of("layer", "rms"),
            "inner_norm": one_of("none", "mlp", "all"),
            "qk_norm": draw(st.booleans()),
            "linear_bias": draw(st.booleans()),
            "norm_eps": one_of(1e-12, 1e-6, 1e-5),
            "attention": attention,
            "window": window,
            "token_merging": merging,
            "qkv_bias": one_of("all", "none", "no_key"),
            "mlp": one_of("gelu", "gelu_tanh", "quick_gelu", "swiglu"),
            "mlp_ratio": one_of(1.0, 1.5, 8 / 3, 4.0),
            "layer_scale": one_of(None, 1e-5, 0.1),
            "class_token": one_of(None, True, pool in ("cls", "cls_mean")),
            "distillation_token": distilled,
            "num_registers": draw(st.integers(0, 3)),
            "pool": pool,
            "pool_heads": one_of(None, 1, heads) if pool == "map" else None,
            "pool_mlp_ratio": one_of(None, 2.0) if pool == "map" else None,
            "pool_prefix": pool == "map" and draw(st.booleans()),
            "pool_norm": "after" if after else one_of("before", "none"),
            "head": one_of("linear", "none")
            if distilled
            else one_of("linear", "mlp", "pre_logits", "cosine", "none"),
            "init": init,
            "head_init": one_of("init", "zero"),
            "dropout": one_of(0.0, 0.1),
            "attention_dropout": one_of(0.0, 0.1),
            "drop_path": one_of(0.0, 0.1),
            "patch_dropout": one_of(0.0, 0.3)
            if attention == "global" and "relative" not in positions
            else 0.0,
        }
    )
