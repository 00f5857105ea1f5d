"""The options of a run, a group for each of its parts. No torch here: the help answers at once."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, Literal

import tyro

from vitascope.errors import UserError, nearest
from vitascope.model.checks import check_fields
from vitascope.model.config import OPTIONS

# What may be None is chosen for the user, and its help text says how: "default: None" would say nothing.
MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
MaybeText = Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")]
MaybePool = Annotated[
    Literal["cls", "mean", "cls_mean", "map"] | None,
    tyro.conf.arg(metavar="{cls,mean,cls_mean,map}", help_behavior_hint=""),
]
ModelOptions = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...", help_behavior_hint="")]
Flag = tyro.conf.FlagCreatePairsOff[bool]

LARGEST_RATE = 100.0
"""Of all published recipes for vision the largest rates, LARS's for huge batches, are some tens."""

DECIDED_HERE = ("num_classes", "class_names", "in_channels", "gradient_checkpointing")
"""Options of the model that follow from the data or from an option of training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """The model."""

    model: MaybeText = None
    """Named size; `vitascope models` lists them. Default: vit_ti16, or that of --weights."""
    image_size: MaybeInt = None
    """Side of the square input, pixels. Default: 224, or the images' own size where that is small."""
    patch_size: MaybeInt = None
    """Side of a patch, pixels. Default: the model's, or an eighth of a small image."""
    embed_dim: MaybeInt = None
    """Width of a token. Default: the model's."""
    depth: MaybeInt = None
    """Number of blocks. Default: the model's."""
    num_heads: MaybeInt = None
    """Attention heads a block. Default: the model's."""
    pool: MaybePool = None
    """What the head reads: class token, mean of the patches, both, or what a learned query attends to.
    Default: the model's."""
    dropout: float = 0.0
    """Dropout in the embedding, the projections and the MLPs."""
    drop_path: float = 0.0
    """Stochastic depth of the last block."""
    options: ModelOptions = ()
    """Any other option of the model: `--options positions=rotary attention=axial`. See docs/options.md."""

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        check_fields(self)
        object.__setattr__(self, "options", tuple(self.options))
        _check_positive(self, "image_size", "patch_size", "embed_dim", "depth", "num_heads")
        _check_share(self, "dropout", "drop_path")
        self.model_options()

    def chosen(self) -> dict[str, Any]:
        """The sizes and the pooling that were asked for, by the names that a `ViTConfig` has for them."""
        names = ("image_size", "patch_size", "embed_dim", "depth", "num_heads", "pool")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def model_options(self) -> dict[str, Any]:
        """`options` as values by name.

        Raises:
            UserError: one that is not NAME=VALUE, is unknown, or has a field of its own here.
        """
        values = {}
        own = {field.name for field in dataclasses.fields(self)} | set(DECIDED_HERE)
        for text in self.options:
            name, equals, value = text.partition("=")
            if not equals:
                raise UserError(f"an option of the model is NAME=VALUE, not {text!r}")
            if name in own:
                raise UserError(f"options: {name} is decided by training itself; leave it out of the options")
            if name in values:
                raise UserError(f"options: {name} is given twice")
            if name not in OPTIONS:
                raise UserError(f"unknown model option {name!r}{nearest(name, set(OPTIONS) - own)}")
            try:
                values[name] = json.loads(value)
            except ValueError:
                values[name] = value  # a name
        if values.get("head") in ("none", "pre_logits"):
            raise UserError(f"options: a classifier needs a head that gives classes, not {values['head']!r}")
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization:
    """The optimizer and its schedule."""

    epochs: int = 100
    """Passes over the training images."""
    batch_size: MaybeInt = None
    """Images a step, over all processes. Default: 128, or less where that leaves an epoch under 4 steps."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with momentum 0.9."""
    lr: float = 1e-3
    """Peak learning rate."""
    lr_batch: MaybeInt = None
    """The batch size that --lr is meant for: the rate grows in proportion to the batch.
    Default: the rate is taken as it is."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls to 0 after the warm-up."""
    warmup_epochs: MaybeFloat = None
    """Epochs of linear warm-up. Default: a twentieth of --epochs."""
    warmup_steps: MaybeInt = None
    """Steps of linear warm-up. Default: those of --warmup-epochs."""
    weight_decay: float = 0.05
    """Decay of weight matrices; biases, norms, tokens and positions have none."""
    layer_decay: float = 1.0
    """The rate of each block over that of the next: below 1, layers near the image move less."""
    freeze: Flag = False
    """Train the head alone, on features that stay as they are."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    label_smoothing: float = 0.1
    """Probability that the target spreads over all classes."""
    ema: MaybeFloat = None
    """Decay of the running average of the weights, which is what is evaluated and saved; 0 keeps none.
    Step n of the run uses (1 + n) / (10 + n) where that is smaller.
    Default: an average over about a fiftieth of the run."""
    keep: Literal["best", "last"] = "best"
    """Which weights become the model: those of the lowest validation loss, or the last."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        check_fields(self)
        _check_positive(self, "epochs", "batch_size", "lr_batch")
        _check_not_negative(self, "warmup_epochs", "warmup_steps", "weight_decay", "clip_grad")
        if not 0 < self.lr <= LARGEST_RATE:
            raise UserError(
                f"lr lies in (0, {LARGEST_RATE:g}], not at {self.lr:g}: at 0 nothing is learned, and beyond "
                f"{LARGEST_RATE:g} no optimizer here converges; AdamW wants about 1e-3, SGD about 0.03"
            )
        if self.lr * self.weight_decay >= 1:
            raise UserError(
                f"lr times weight_decay must be below 1, not {self.lr:g} * {self.weight_decay:g}: a step "
                "would remove the weights, or reverse their sign; lower one of them"
            )
        _check_share(self, "label_smoothing", "ema")
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"layer_decay lies in (0, 1], not at {self.layer_decay}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentationOptions:
    """What is varied at random."""

    flip: float = 0.5
    """Probability of a mirror image."""
    crop_scale: float = 0.5
    """Smallest share of the area that a random crop keeps."""
    shift: float = 0.0
    """Largest random shift, share of the side."""
    rotate: float = 0.0
    """Largest random rotation, degrees."""
    color_jitter: float = 0.2
    """Largest random change of brightness, contrast and saturation, as a share."""
    randaugment: int = 0
    """RandAugment: operations an image (Cubuk et al. 2020)."""
    magnitude: float = 9.0
    """RandAugment: how strong, 0 to 10."""
    operation_probability: float = 1.0
    """RandAugment: probability that a drawn operation is carried out; the paper's is 1, DeiT's 0.5."""
    erase: float = 0.0
    """Probability that a random rectangle is erased (Zhong et al. 2020)."""
    mixup: float = 0.0
    """Mixup: alpha of the Beta distribution that weighs two images (Zhang et al. 2018); 0 is off."""
    cutmix: float = 0.0
    """CutMix: the same for a rectangle of one in the other (Yun et al. 2019); 0 is off."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        check_fields(self)
        _check_not_negative(self, "color_jitter", "randaugment", "mixup", "cutmix", "rotate")
        _check_share(self, "shift")
        if not 0 < self.crop_scale <= 1:
            raise UserError(f"crop_scale lies in (0, 1], not at {self.crop_scale}")
        for name in ("flip", "operation_probability", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is a probability, not {getattr(self, name)}")
        if not 0 <= self.magnitude <= 10:
            raise UserError(f"magnitude lies in [0, 10], not at {self.magnitude}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """What a teacher adds (Touvron et al. 2021, DeiT)."""

    teacher: MaybeText = None
    """A MODEL that knows the classes, timm:NAME or transformers:NAME.
    Its answers teach a distillation token beside the class token."""
    distill: Literal["hard", "soft"] = "hard"
    """What is learned from the teacher: its decision, or its probabilities."""
    distill_weight: float = 0.5
    """The teacher's share of the loss."""
    temperature: float = 3.0
    """With soft targets: what both logits are divided by."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        check_fields(self)
        if not 0 <= self.distill_weight <= 1:
            raise UserError(f"distill_weight lies in [0, 1], not at {self.distill_weight}")
        if self.temperature <= 0:
            raise UserError(f"temperature must be positive, not {self.temperature}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking:
    """Masked patch prediction (paper, appendix B.1.2)."""

    target: Literal["mean_color", "downsampled", "pixels"] = "mean_color"
    """What is predicted of a hidden patch: its mean colour, those of its 4x4 picture, or its pixels."""
    corrupt: float = 0.5
    """Share of the patches that are corrupted and predicted."""

    def __post_init__(self) -> None:
        """Refuse a share that leaves nothing to predict, or nothing to predict it from."""
        check_fields(self)
        if not 0 < self.corrupt < 1:
            raise UserError(f"corrupt lies in (0, 1), not at {self.corrupt}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """How it is computed; changes speed and memory, not what is learned."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """`auto` takes bf16 where this machine is faster with it."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, `mps`."""
    workers: MaybeInt = None
    """Processes that read images which do not fit in memory. Default: one a core."""
    compile: Flag = False
    """Compile the model with torch.compile: slow to start, faster on GPUs."""
    accumulate: int = 1
    """Parts that a batch is computed in, one after the other, to save memory."""
    gradient_checkpointing: Flag = False
    """Compute each block again for its gradient, to save memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: every process holds the whole model, or a shard of it."""
    checkpoint_seconds: float = 300.0
    """Save a checkpoint to resume from when the last is this old; 0 saves after every step."""
    keep_checkpoints: int = 2
    """Checkpoints to keep: the newest is resumed from, an older one if that is broken."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        check_fields(self)
        _check_positive(self, "accumulate", "keep_checkpoints")
        _check_not_negative(self, "checkpoint_seconds", "workers")


def _check_positive(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")


def _check_not_negative(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 0:
            raise UserError(f"{name} must not be negative, not {value}")


def _check_share(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value < 1:
            raise UserError(f"{name} lies in [0, 1), not at {value}")
