"""timm's `vit_*`, `deit_*` and `flexivit_*`: folders that `timm.models.save_for_hf` writes, and the hub's.

Facts: timm 1.0.31, `models/vision_transformer.py`, `vision_transformer_hybrid.py`, `deit.py`, `_hub.py`,
`data/config.py`. A folder is written so that

    timm.create_model("local-dir:FOLDER", pretrained=True)

loads it. Options that neither tensors nor `model_args` show (heads, activation, epsilon) follow in timm from
the architecture's name. They are read from the name here too, and a name with an unknown word is rejected.
"""

import abc
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.options import CLASSES
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights import mapping
from vitascope.models.weights.families import timm_settings
from vitascope.models.weights.families.pth import IMAGENET_MEAN, IMAGENET_STD
from vitascope.models.weights.families.timm_body import (
    BODY,
    GIVE_CONFIG,
    body_options,
    check_published,
    heads,
    join_gates,
    place_options,
    split_gates,
)
from vitascope.models.weights.families.timm_settings import (
    ARCHITECTURES,
    CROP_MODES,
    NORMS,
    PLAIN,
    POOLS,
    is_aimv2,
    only_one_of,
)
from vitascope.models.weights.files import CheckpointError, write_safetensors
from vitascope.models.weights.hub import CONFIG
from vitascope.models.weights.imagenet import imagenet_classes, is_imagenet
from vitascope.models.weights.mapping import (
    PLAIN_VIT,
    Family,
    Source,
    State,
    Table,
    checked_config,
    supporting,
)
from vitascope.storage import write_json

ATTENTION_POOL: Table = {"pool.query": "attn_pool.latent", "pool.*": "attn_pool.*"}
_UNIT = "patch_embed.backbone.stages.{s}.blocks.{u}."
HYBRID: Table = {
    "patch_embedding.projection.*": "patch_embed.proj.*",
    "patch_embedding.resnet.root.*": "patch_embed.backbone.stem.*",
    "patch_embedding.resnet.stages.{s}.{u}.shortcut.*": _UNIT + "downsample.*",
    "patch_embedding.resnet.stages.{s}.{u}.*": _UNIT + "*",
}
ROOT_ONLY: Table = {**HYBRID, "patch_embedding.resnet.root.*": "patch_embed.backbone.*"}

# Arguments that are read here, or that tensors show, or that change no output.
_ARGUMENTS = re.compile(
    "img_size|patch_size|in_chans|num_classes|global_pool|embed_dim|depth|num_heads|mlp_ratio|qkv_bias|"
    "qk_norm|pool_include_prefix|norm_layer|embed_norm_layer|scale_attn_norm|scale_mlp_norm|proj_bias|init_values|class_token|pos_embed|no_embed_class|"
    "reg_tokens|pre_norm|final_norm|fc_norm|act_layer|dynamic_img_size|strict_img_size|"
    "weight_init|fix_init|.*_rate"
)
_ACTIVATIONS = {
    "gelu": {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"},
    "swiglu": {"silu": "swiglu", "swish": "swiglu"},
}
# SigLIP's later models were trained with JAX's default GELU, the tanh approximation.
_GELU_TANH = re.compile(r".*(patch32_siglip|(so400m|giantopt)_patch16_siglip|large_patch16_siglip\D*512)")
# Published SigLIPs whose GELU or heads differ from the usual ones, by width, depth, patch size and number of
# patches: with average pooling, no tensor shows that it is SigLIP.
_BY_SHAPE = {
    (768, 12, 32, 64): "vit_base_patch32_siglip_gap_256",
    (1024, 24, 16, 1024): "vit_large_patch16_siglip_gap_512",
    (1152, 27, 16, 256): "vit_so400m_patch16_siglip_gap_256",
    (1152, 27, 16, 576): "vit_so400m_patch16_siglip_gap_384",
    (1152, 27, 16, 1024): "vit_so400m_patch16_siglip_gap_512",
    (1536, 40, 16, 256): "vit_giantopt_patch16_siglip_gap_256",
    (1536, 40, 16, 576): "vit_giantopt_patch16_siglip_gap_384",
}
_PROJECTIONS = (384, 512, 640, 768, 1024, 1152, 1280)  # widths of CLIP's space of images and texts
# timm's defaults for a `pretrained_cfg`, and those of its ViTs, for a file without any.
_TIMM_DEFAULTS: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "crop_pct": 0.875}
_TIMM_DEFAULTS |= {"interpolation": "bicubic", "crop_mode": "center"}
_VIT: dict[str, Any] = _TIMM_DEFAULTS | {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "crop_pct": 0.9}


class Timm(Family):
    """timm's VisionTransformer, its hybrids and its distilled DeiT."""

    name = "timm"
    module: ClassVar[str] = "vision_transformer.py"
    """Of timm."""
    supports = PLAIN_VIT | supporting(
        "patch_bias patch_norm position_prefix embedding_norm qk_norm linear_bias layer_scale class_token "
        "distillation_token num_registers",
        stem=("conv", "resnet"),
        resnet_layers=tuple(ARCHITECTURES),
        resnet_width=(64,),
        resnet_dialect=("timm",),
        positions=("learned", "none"),
        norm=("pre", "branch"),
        norm_type=("layer", "rms"),
        inner_norm=("none", "mlp", "all"),
        norm_eps=(1e-6, 1e-5),
        qkv_bias=("all", "none"),
        mlp=("gelu", "gelu_tanh", "quick_gelu", "swiglu"),
        pool=("cls", "mean", "map"),
        pool_prefix=(False, True),
        pool_norm=("before", "after", "none"),
        head=("linear", "none"),
        outputs=(*CLASSES, "embedding"),
        remainder=("rejected", "cut"),
    )
    ignored: ClassVar[tuple[str, ...]] = ("mask_token",)

    @property
    def label(self) -> str:
        return self.module

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        """Norms have an epsilon of 1e-6, or CLIP's and AIMv2's 1e-5; a ResNet has its own."""
        fixed: dict[str, Any] = {}
        coarse = not only_one_of(config) and config.norms.norm_type == "layer"
        if config.norms.norm_eps != 1e-6 and not (
            config.norms.norm_eps == 1e-5 and (coarse or is_aimv2(config))
        ):
            fixed["norm_eps"] = 1e-6
        if config.embedding.stem == "resnet":
            fixed["resnet_dialect"] = "timm"
        if config.embedding.positions == "learned":
            fixed["resample"] = "timm"
        return config.replace(**fixed)

    def conflicts(self, config: ViTConfig) -> list[str]:
        embedding, readout, special = config.embedding, config.readout, only_one_of(config)
        one_bias = embedding.patch_bias != embedding.embedding_norm
        reasons = {
            "patch_bias and embedding_norm both on or both off": not one_bias,
            " and ".join(special): len(special) > 1,
            'norm "branch" and layer_scale': config.block.norm == "branch"
            and config.block.layer_scale is not None,
            'pool "map" and linear_bias False': readout.pool == "map" and not config.block.linear_bias,
            'pool "map" and mlp "swiglu"': readout.pool == "map" and config.block.mlp == "swiglu",
        }
        if readout.distillation_token:
            reasons |= {
                'positions "none" and distillation_token': embedding.positions == "none",
                "position_prefix False and distillation_token": not embedding.position_prefix,
                "num_registers and distillation_token": readout.num_registers > 0,
                # timm then returns the mean of both tokens
                'head "none" and distillation_token': readout.head == "none",
            }
        return [what for what, found in reasons.items() if found]

    def recognizes(self, source: Source) -> bool:
        return "architecture" in source.config

    def before_reading(self, source: Source) -> Source:
        """Without the prefix of transformers' `TimmWrapper`; rejects other models with the same tensors."""
        for name in names(source):
            if timm_settings.is_whole(name) and (reason := timm_settings.unreadable(name)):
                raise CheckpointError(f"{source.name}: {reason}")
        source = source.renamed(lambda name: name.removeprefix("timm_model."))
        tensors = dict(source.tensors)
        join_gates(tensors)
        return dataclasses.replace(source, tensors=tensors)

    def before_writing(self, state: State, config: ViTConfig) -> State:
        """In AIMv2's function, two matrices for gate and values."""
        state = dict(state)
        if is_aimv2(config):
            split_gates(state)
        return state

    def table(self, config: ViTConfig) -> Table:
        if config.embedding.stem != "resnet":
            return {**ATTENTION_POOL, **BODY}
        return {**(HYBRID if config.embedding.resnet_layers else ROOT_ONLY), **ATTENTION_POOL, **BODY}

    def read_config(self, source: Source) -> ViTConfig:
        name, args = architecture_name(source), given_arguments(source, _ARGUMENTS)
        for key in ("norm_layer", "embed_norm_layer"):
            if args.get(key) is not None:
                mapping.check_setting(source, key, args[key], NORMS.values())
        options = body_options(source)
        if options["head"] == "linear":
            options |= mapping.outputs_options(source)
        pooled = not options["class_token"] and source.has("norm.weight") and source.has("pos_embed")
        if not name and pooled and options["mlp"] == "gelu":
            patches = source.shape("pos_embed")[-2]
            shapes = (options["embed_dim"], options["depth"], options["patch_size"][0], patches)
            name = _BY_SHAPE.get(shapes, "")
        options |= {
            "num_heads": args.get("num_heads") or heads(source, options["embed_dim"], name),
            "mlp": _activation(source, name, options["mlp"], args.get("act_layer")),
            "norm": "branch" if "_rpn_" in name else "pre",
            "inner_norm": inner_norm(source),
            "norm_eps": 1e-5
            if "_clip_" in name
            or "beit3" in name
            or "aimv2" in name
            or (not name and options["embedding_norm"])
            else 1e-6,
            "pool": read_pool(source, args.get("global_pool", source.config.get("global_pool"))),
            "pool_prefix": bool(args.get("pool_include_prefix", name == "test_vit3")),
            "pool_norm": last_norm(source),
            "class_names": label_names(source, options.get("num_classes", 0)),
        }
        check_published(source, name, options, args)
        if options["pool_prefix"] and options["pool"] != "map":
            raise CheckpointError(
                f"{source.name}: vitascope has no model with timm's pool_include_prefix True "
                f"and global_pool {args.get('global_pool')!r}"
            )
        if "outputs" not in options and is_projection(source, name, options):
            options["outputs"] = "embedding"
        given_size = args.get("img_size") or source.training.get("img_size") or input_hw(source)
        options |= place_options(source, options, given_size)
        if not args.get("dynamic_img_size"):  # else timm rejects such images
            options["remainder"] = mapping.remainder(options)
        return checked_config(source, options)

    def guessed(self, source: Source, config: ViTConfig) -> str:
        if source.config or _named(source):
            return ""
        hidden = ["num_heads"] + (["mlp"] if config.block.mlp != "swiglu" else [])
        return " and ".join(f"{it} {config.option(it)}" for it in hidden if it not in source.options)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        listed = {key: value for key, value in _pretrained(source).items() if value}
        given = (_TIMM_DEFAULTS if source.config else _VIT) | listed
        mapping.check_setting(source, "crop_mode", given["crop_mode"], CROP_MODES)
        if not (isinstance(given["crop_pct"], int | float) and 0.01 <= given["crop_pct"] <= 100):
            raise CheckpointError(f"{source.name}: crop_pct {given['crop_pct']!r} is not a valid share")
        is_resizable = _section(source, "model_args").get("dynamic_img_size")
        image_size = (input_hw(source) if is_resizable else None) or config.image_hw
        return Preprocess(
            image_size=image_size,
            channels=config.in_channels,
            **timm_settings.read_rule(image_size, given["crop_pct"], given["crop_mode"]),
            interpolation=given["interpolation"],
            mean=_per_channel(given["mean"], config.in_channels),
            std=_per_channel(given["std"], config.in_channels),
        )

    def settings(self, config: ViTConfig, preprocess: Preprocess) -> dict[str, Any]:
        """The content of `config.json`."""
        return timm_settings.settings(config, preprocess)

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        weights = write_safetensors(folder / "model.safetensors", state)
        return [weights, write_json(folder / CONFIG, self.settings(config, preprocess))]


class TimmModule(Timm):
    """Models of another module of timm's, which are known by the names of its functions."""

    @abc.abstractmethod
    def function(self, source: Source) -> str:
        """The name of the function that builds a checkpoint's model; empty if the module has none."""

    def recognizes(self, source: Source) -> bool:
        return super().recognizes(source) and self.reads(source)

    def reads(self, source: Source) -> bool:
        return self.function(source) != ""

    def before_reading(self, source: Source) -> Source:
        """Without the prefix of transformers' `TimmWrapper`; rejects weights without their settings."""
        if not source.config:
            raise CheckpointError(
                f"{source.name}: a model of timm's {self.module} without its config.json, which has the "
                "preprocessing; timm.models.save_for_hf(model, FOLDER) writes both"
            )
        return source.renamed(lambda name: name.removeprefix("timm_model."))

    def options(self, source: Source) -> dict[str, Any]:
        """The options that the tensors show, the class names, and what the outputs are."""
        options = body_options(source)
        if options["head"] == "linear":
            options |= mapping.outputs_options(source)
        if source.has("blocks.0.attn.q_bias"):
            options["qkv_bias"] = "no_key"
        return options | {
            "inner_norm": inner_norm(source),
            "layer_scale": 1e-5 if source.has("blocks.0.gamma_1") else None,
            "pool_norm": last_norm(source),
            "class_names": label_names(source, options.get("num_classes", 0)),
        }

    def guessed(self, source: Source, config: ViTConfig) -> str:
        return ""


def architecture_name(source: Source) -> str:
    """The architecture's name without its tag; empty if there are no settings at all."""
    if source.config:
        name = str(source.config.get("architecture")).partition(".")[0]
        if not PLAIN.fullmatch(name):
            mine = f"; if it is a plain ViT under a name of your own, {GIVE_CONFIG}" if _fits(source) else ""
            raise CheckpointError(f"{source.name}: {timm_settings.unknown(name)}{mine}")
        return name
    if name := _named(source):
        return name
    ambiguous = source.has("norm_pre.weight") or source.has("attn_pool.latent")
    if ambiguous and "mlp" not in source.options:
        raise CheckpointError(
            f"{source.name}: the activation of CLIP and SigLIP is unknown without config.json; name it with "
            f"the file (timm:mlp=gelu:FILE, or gelu_tanh or quick_gelu), or {GIVE_CONFIG}"
        )
    return ""


def _named(source: Source) -> str:
    """The architecture named by a training checkpoint, the file or its folder."""
    return next(
        (name for name in names(source) if PLAIN.fullmatch(name) and timm_settings.is_whole(name)), ""
    )


def names(source: Source) -> list[str]:
    """Candidates for an architecture's name, without their tags."""
    given = [source.config.get("architecture"), source.training.get("arch"), source.file]
    return [re.split(r"[.-]", str(name).rpartition("/")[2])[0] for name in (*given, Path(source.name).name)]


def _fits(source: Source) -> bool:
    """Whether the tensors are those of some plain ViT."""
    probe = dataclasses.replace(source, config={}, options={"num_heads": 1, "mlp": "gelu"})
    try:
        mapping.from_family(Timm(), probe, Timm().read_config(probe))
    except UserError:
        return False
    return True


def given_arguments(source: Source, known: re.Pattern[str]) -> Mapping[str, Any]:
    """`model_args`: arguments of timm's constructor beside the architecture's; rejects unknown ones."""
    if source.config:
        args = dict(_section(source, "model_args"))
    else:  # the arguments that timm's training script saved
        saved, pool = source.training.get("model_kwargs"), source.training.get("gp")
        args = (dict(saved) if isinstance(saved, Mapping) else {}) | ({"global_pool": pool} if pool else {})
    for name, value in args.items():
        if value not in (None, False) and not known.fullmatch(name):
            raise CheckpointError(f"{source.name}: vitascope has no model with timm's {name} {value!r}")
    if "embed_dim" in args and "num_heads" not in args:  # then they are as many as at the name's own width
        raise CheckpointError(f"{source.name}: model_args has an embed_dim without num_heads; {GIVE_CONFIG}")
    return args


def _section(source: Source, name: str) -> Mapping[str, Any]:
    """A part of `config.json`, or an empty one."""
    return source.config.get(name) or {}


def _pretrained(source: Source) -> Mapping[str, Any]:
    """`pretrained_cfg`, which older files have at the top."""
    return _section(source, "pretrained_cfg") or source.config


def input_hw(source: Source) -> tuple[int, int] | None:
    """Height and width of the pictures, if `pretrained_cfg` has them."""
    size = _pretrained(source).get("input_size")
    return (size[1], size[2]) if isinstance(size, list | tuple) and len(size) == 3 else None


def _activation(source: Source, name: str, found: str, given: Any) -> str:
    """The activation, by `given` or by the name; `found` is the shapes' kind, "gelu" or "swiglu"."""
    if given is not None:
        if given not in list(_ACTIVATIONS[found]):
            raise CheckpointError(
                f"{source.name}: vitascope has no {found} MLP with timm's act_layer {given!r}"
            )
        return _ACTIVATIONS[found][given]
    if found == "swiglu":
        return found
    if "quickgelu" in name:
        return "quick_gelu"
    return "gelu_tanh" if _GELU_TANH.match(name) else "gelu"


def read_pool(source: Source, given: Any) -> str:
    """The pooling, by the settings (`given`) or by tensors that only one kind has."""
    if given is None:
        reads_class_token = source.has("cls_token") and not source.has("fc_norm.weight")
        given = "map" if source.has("attn_pool.latent") else "token" if reads_class_token else "avg"
    mapping.check_setting(source, "global_pool", given, POOLS)
    return POOLS[given]


def is_projection(source: Source, name: str, options: Mapping[str, Any]) -> bool:
    """Whether the head projects into CLIP's space of images and texts, so that its outputs are no classes.

    CLIP's projection has no bias, and timm's file of it has one of zeros, which no trained classifier has.
    EVA-CLIP's has one, so its tag tells: one of pre-training, such as "laion2b" and not "laion2b_ft_in1k",
    with as many outputs as a published projection.
    """
    is_clip = "_clip_" in name or options["embedding_norm"]
    bias = source.tensors.get("head.bias")
    if not is_clip or bias is None or options["class_names"]:
        return False
    tag = str(_pretrained(source).get("tag") or "")
    pretrained = bool(tag) and re.search("(^|_)ft(_|$)", tag) is None
    return not bias.any() or (pretrained and options["num_classes"] in _PROJECTIONS)


def last_norm(source: Source) -> str:
    """The option `pool_norm`, by the tensors."""
    if source.has("fc_norm.weight"):
        return "after"
    return "before" if source.has("norm.weight") else "none"


def inner_norm(source: Source) -> str:
    """The option `inner_norm`, by the tensors."""
    if source.has("blocks.0.attn.norm.weight"):
        return "all"
    return "mlp" if source.has("blocks.0.mlp.norm.weight") else "none"


def label_names(source: Source, count: int) -> tuple[str, ...]:
    """`label_names`, if each class has one (not LABEL_0 and so on), or ImageNet-1k's by the tag."""
    given = source.config.get("label_names") or _pretrained(source).get("label_names")
    if names := mapping.class_names(given, count):
        return names
    settings = source.config or source.training
    named = str(settings.get("architecture", settings.get("arch", source.file)))
    tag = _pretrained(source).get("tag") or named.rpartition("/")[2].partition(".")[2].partition(".")[0]
    return imagenet_classes() if count == 1000 and is_imagenet(str(tag)) else ()


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Mean or std for the model's channels; for another number of them, timm takes the mean."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
