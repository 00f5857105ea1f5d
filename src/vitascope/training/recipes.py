"""`TrainConfig` and the named recipes. No torch here: the command line's help answers at once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml

from vitascope.errors import UserError, check_choice, nearest
from vitascope.model.checks import field_types, is_a, wanted
from vitascope.model.config import OPTIONS

# What may be None is chosen for the user, and its help text says how: "default: None" would say nothing.
MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
MaybeText = Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")]
MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
MaybePool = Annotated[
    Literal["cls", "mean", "cls_mean", "map"] | None,
    tyro.conf.arg(metavar="{cls,mean,cls_mean,map}", help_behavior_hint=""),
]


ModelOptions = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a run. What is None is chosen from the data, and written down.

    The defaults are the recipe `small-data`; `TrainConfig.from_recipe` starts from another.

    Raises:
        UserError: numbers that make no sense.
    """

    data: str = "digits"
    """What to train on: `digits`, or a folder: train/<class>/ with val/ or test/, or just <class>/."""
    run: MaybeText = None
    """Folder of the run; a new one. Default: runs/<name of the data>."""
    weights: MaybeText = None
    """A trained model to start from: a run folder, a model folder or file, or a hub id."""

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

    epochs: int = 100
    """Passes over the training images."""
    batch_size: MaybeInt = None
    """Images a step. Default: 128, or less where that leaves an epoch under 4 steps."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    warmup_epochs: float = 5.0
    """Epochs of linear warm-up; after it the rate falls to 0 along a cosine."""
    weight_decay: float = 0.05
    """Decay of weight matrices; biases, norms, tokens and positions have none."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    label_smoothing: float = 0.1
    """Probability that the target spreads over all classes."""
    ema: float = 0.99
    """Decay of the running average of the weights, which is what is evaluated and saved; 0 keeps none."""

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

    keep: Literal["best", "last"] = "best"
    """Which weights become the model: those of the lowest validation loss, or the last."""
    seed: int = 0
    """Of the validation split, the initialization, the order and all that is random."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto` takes bf16 where this machine is faster with it."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, `mps`."""
    workers: MaybeInt = None
    """Processes that read images which do not fit in memory. Default: one a core."""
    checkpoint_seconds: float = 300.0
    """Save a checkpoint to resume from when the last is this old; 0 saves after every step."""

    def __post_init__(self) -> None:
        """Refuse values of the wrong type, which a file may hold, and numbers that make no sense."""
        for name, kind in field_types(TrainConfig).items():
            chosen = name in ("pool", "keep", "precision")  # refused below, or by the model, with the choices
            if not chosen and not is_a(getattr(self, name), kind):
                raise UserError(f"{name} must be {wanted(kind)}, not {getattr(self, name)!r}")
        object.__setattr__(self, "options", tuple(self.options))
        self.model_options()
        for name in ("epochs", "batch_size", "image_size", "patch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        for name in (
            "lr",
            "warmup_epochs",
            "weight_decay",
            "clip_grad",
            "checkpoint_seconds",
            "color_jitter",
            "workers",
            "seed",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"{name} must not be negative, not {value}")
        if self.seed >= 2**63:  # torch's generators take no more
            raise UserError(f"seed must be less than 2**63, not {self.seed}")
        for name in ("label_smoothing", "ema", "dropout", "drop_path", "shift"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} lies in [0, 1), not at {getattr(self, name)}")
        if not 0 < self.crop_scale <= 1:
            raise UserError(f"crop_scale lies in (0, 1], not at {self.crop_scale}")
        if not 0 <= self.flip <= 1:
            raise UserError(f"flip is a probability, not {self.flip}")
        check_choice("keep", self.keep, ("best", "last"))
        check_choice("precision", self.precision, ("auto", "fp32", "bf16"))

    def model_options(self) -> dict[str, Any]:
        """`options` as values by name.

        Raises:
            UserError: one that is not NAME=VALUE, is unknown, or has a field of its own here.
        """
        values = {}
        own = {field.name for field in dataclasses.fields(self)} | {"num_classes", "class_names"}
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

    @classmethod
    def from_recipe(cls, recipe: str | None = None, **options: Any) -> TrainConfig:
        """A named recipe with options changed: `TrainConfig.from_recipe("digits", epochs=3)`.

        Args:
            recipe: one of `RECIPES`; None takes `digits` for digits, `finetune` with weights, else
                `small-data`.
            **options: fields of this class.

        Raises:
            UserError: an unknown recipe or option, naming the nearest.
        """
        if recipe is None:
            recipe = default_recipe(options.get("data", "digits"), options.get("weights"))
        check_choice("recipe", recipe, RECIPES)
        return cls.from_dict({**RECIPES[recipe], **options})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """From plain values; an unknown name raises UserError and names the nearest."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise UserError(f"unknown training option {name!r}{nearest(name, known)}")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: Path) -> TrainConfig:
        """From a run's `config.yaml`.

        Raises:
            UserError: no such file, not YAML, an unknown name.
        """
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file") from error
        except (OSError, ValueError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())  # YAML's own takes several lines
            raise UserError(f"{path}: not readable as YAML: {reason}") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}: not a table of options")
        return cls.from_dict(values)

    def to_yaml(self) -> str:
        """All options with their values, in the order of this class."""
        values = dataclasses.asdict(self) | {"options": list(self.options)}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


RECIPES: dict[str, dict[str, Any]] = {}
"""What each named recipe changes in `TrainConfig`; filled below, each under its command."""

# vitascope train
# Expect about 99% on the 360 test digits, after about half a minute on a laptop's CPU (scikit-learn's SVC():
# 98.3%). The 8x8 pictures are enlarged to 32x32, so that small turns and shifts do not blur them.
RECIPES["digits"] = {
    "image_size": 32,
    "patch_size": 8,
    "embed_dim": 96,
    "depth": 3,
    "num_heads": 6,
    "epochs": 40,
    "batch_size": 64,
    "lr": 3e-3,
    "flip": 0.0,
    "crop_scale": 1.0,
    "color_jitter": 0.0,
    "shift": 0.06,
    "rotate": 8.0,
    "keep": "last",
}

# vitascope train --data FOLDER
# From scratch: what TrainConfig says, made for thousands of images and an evening.
RECIPES["small-data"] = {}

# vitascope train --data FOLDER --weights MODEL
# A trained body under a new head: a short, gentle run.
RECIPES["finetune"] = {
    "epochs": 20,
    "lr": 1e-4,
    "warmup_epochs": 2.0,
    "crop_scale": 0.7,
}


def default_recipe(data: str, weights: str | None) -> str:
    """The recipe of a run that names none."""
    if weights is not None:
        return "finetune"
    return "digits" if data == "digits" else "small-data"
