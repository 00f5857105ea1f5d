"""`TrainConfig` and the named recipes. Imports no torch, so that the help is printed at once."""

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import tyro

from vitascope.arguments import NamesFile, Range, check_value, checked
from vitascope.data.table_options import DataOptions, TableOptions
from vitascope.errors import UserError, check_choice
from vitascope.models.config import ViTConfig
from vitascope.models.configuration import Configuration, options_of, traits
from vitascope.models.options import MAX_MEMBERS, AppliesWith
from vitascope.serialization import read_yaml, yaml_text
from vitascope.training.options.groups import (
    Architecture,
    AugmentationOptions,
    Balance,
    Classifies,
    Distillation,
    ExecutionOptions,
    Masking,
    MaybeLevels,
    Needs,
    Optimization,
    Recorded,
    SetsLength,
)

SEED = Range(ge=0, lt=2**63)
"""The seeds of torch's generators."""
BUILT_IN, NO_WEIGHTS, AUTO = "cifar10", "none", "auto"
FEW_TO_START, FEW_TO_TUNE = 1_000, 100
"""Images up to which a run starts from the built-in model by default, and up to which it changes that in the
small steps of `finetune`: those of `train`, or all where no split is given.
benchmarks/results/2026-11-25-few_images.md measures where each is better than random weights."""

REMOVED = {"shard_size": None}
"""Options of runs of version 0.2.0 that are gone, with the value that asks for nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False)
class TrainConfig(Configuration):
    """The options of a training run. None stands for a value that is chosen from the data, and recorded.

    The options of the groups are keywords too: `TrainConfig(data="photos/", lr=1e-3)`. `config.yaml` and the
    command line have no groups either.

    Raises:
        UserError: an unknown option, with the nearest known one; a value of the wrong type, or out of range.
    """

    option_kind: ClassVar[str] = "training option"

    task: tyro.conf.Suppress[Literal["classify", "masked"]] = "classify"
    """Classification, or masked patch prediction (`vitascope pretrain`)."""
    data: Annotated[str, NamesFile()] = "digits"
    """Training data: a folder with train/<class>/ and val/ or test/, or with <class>/ only.
    Or a table of images and labels: .csv, .tsv, .jsonl, .parquet.
    Or `digits`, `cifar10`, `cifar100`, `mnist`, `fashion-mnist`, an archive, shards, a hub data set."""
    run: str | None = None
    """Run folder, or its URL in a store; must not exist. Default: runs/<name of the data>."""
    weights: Annotated[str | None, NamesFile()] = None
    """Model to start from: a run folder, a model folder or file, a hub id, or `none` (random weights).
    `auto` compares the models at hand, and chooses one and what of it is trained in --minutes.
    Default: none; for few images without --recipe and model options, the small built-in cifar10."""
    bodies: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL ..."), Classifies(())] = ()
    """Models that `--weights auto` compares beside cifar10, those in the hub's cache and two of the hub."""
    seed: Annotated[int, SEED] = 0
    """Seed of the split, the initialization, the order and the augmentation."""
    folds: Annotated[int | None, Range(ge=2, le=MAX_MEMBERS), Classifies(None)] = None
    """Parts of the images, each tested by a model that is trained on the others.
    So every image is predicted by a model that has not seen it; the result is their ensemble.
    The parts are those of a table's column `fold`, else equal shares of each class.
    --minutes are those of all trainings together. Default: one training."""
    fold: tyro.conf.Suppress[Annotated[int | None, Range(ge=0, lt=MAX_MEMBERS), Recorded()]] = None
    """Of a run among those of `folds`, the part that tests it, from 0."""
    levels: MaybeLevels = None
    """The values of 16-bit grey images that become black and white, such as 0 4095 for 12 bits.
    The model keeps them. Default: those of --weights, else 0 and the greatest value in the images."""
    fit: Literal["crop", "pad", "squash"] | None = None
    """How a picture fits into the square of the model, which keeps the rule.
    `crop` takes its centre, `pad` adds a grey border, `squash` changes the proportions.
    Default: that of --weights, else crop."""
    streams: Annotated[int | None, Range(ge=2, lt=2**16)] = None
    """Parts of every batch, each from shards of its own: with one per machine, it reads its own shards only.
    Default: the whole batch is from the same shards."""
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""
    architecture: Architecture = dataclasses.field(default_factory=Architecture)
    """The model."""
    optimization: Optimization = dataclasses.field(default_factory=Optimization)
    """The optimizer and its schedule."""
    augmentation: AugmentationOptions = dataclasses.field(default_factory=AugmentationOptions)
    """Random changes of the training images."""
    balance: Balance = dataclasses.field(default_factory=Balance)
    """Classes with few and with many images."""
    distillation: Distillation = dataclasses.field(default_factory=Distillation)
    """Distillation from a teacher."""
    masking: Masking = dataclasses.field(default_factory=Masking)
    """Masked patch prediction."""
    execution: ExecutionOptions = dataclasses.field(default_factory=ExecutionOptions)
    """Execution."""

    def __init__(self, **options: Any) -> None:
        """Set options by keyword; a length takes the place of the default one."""
        if {"steps", "minutes"} & {name for name, value in options.items() if value is not None}:
            options = {"epochs": None} | options
        super().__init__(**options)

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.weights == NO_WEIGHTS:
            object.__setattr__(self, "weights", None)
        self._check_auto()
        object.__setattr__(self, "bodies", tuple(self.bodies))  # a file has a list
        if self.levels is not None:
            object.__setattr__(self, "levels", tuple(self.levels))
        lengths = [name for name in traits(TrainConfig, SetsLength) if self.option(name) is not None]
        if len(lengths) > 1:
            raise UserError(f"{' and '.join(lengths)} both set the length of the run: leave out one of them")
        if self.fold is not None and not self.fold < (self.folds or 0):
            raise UserError(f"fold={self.fold} is not one of folds={self.folds}")
        if self.execution.parallel == "fsdp" and self.optimization.optimizer == "muon":
            raise UserError(
                "parallel=fsdp divides matrices, and optimizer=muon orthogonalizes whole ones: choose "
                "parallel=ddp, or optimizer=adamw"
            )
        orders = [f"repeats={self.augmentation.repeats}"] * (self.augmentation.repeats > 1)
        orders += ["sampling=balanced"] * (self.balance.sampling == "balanced")
        orders += [f"streams={self.streams}"] * (self.streams is not None)
        if len(orders) > 1:
            raise UserError(
                f"{' and '.join(orders)} decide which images an epoch has, and in which order: leave out one"
            )

    def _check_auto(self) -> None:
        """Check what goes with weights that are chosen."""
        if self.weights != AUTO:
            if self.bodies:
                raise UserError("bodies are compared by weights=auto: add that, or leave them out")
        elif self.task == "masked":
            raise UserError(
                "weights=auto compares bodies by labels, and pre-training has none: name the weights"
            )
        elif self.architecture.names_model:
            raise UserError(
                "weights=auto chooses the model, and other options name one: leave out model and model "
                "options, with a recipe that has some, or name the weights"
            )

    def replace(self, **options: Any) -> Self:
        """A copy with other options, checked as in the constructor; a new length replaces the old one."""
        lengths = traits(TrainConfig, SetsLength)
        if any(options.get(name) is not None for name in lengths):
            options = dict.fromkeys(lengths) | {"lengths": (), "validations": 0} | options
        return super().replace(**options)

    @classmethod
    def from_recipe(cls, recipe: str | None = None, **options: Any) -> Self:
        """A named recipe with other options: `TrainConfig.from_recipe("digits", epochs=3)`.

        Args:
            recipe: one of `RECIPES`; None selects the one that `default_recipe` has for the options.
            **options: options of this class and of its groups; `model_options` are added to those of the
                recipe.

        Raises:
            UserError: an unknown recipe or option, with the nearest known one.
        """
        return cls(**over_recipe(recipe, flattened(options)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            UserError: an unknown option; the options of a probe, which is no training.
        """
        if values.get("task") == "probe":
            raise UserError("these are the options of a probe: `vitascope probe` makes another one")
        gone = REMOVED.items()
        return super().from_dict({name: it for name, it in values.items() if (name, it) not in gone})

    @classmethod
    @checked
    def from_yaml(cls, path: str | os.PathLike[str]) -> Self:
        """Read the `config.yaml` of a run.

        Raises:
            UserError: no such file, not YAML, an unknown option.
        """
        try:
            values = read_yaml(path)
        except OSError as error:
            raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error
        except ValueError as error:
            raise UserError(f"{path}: not readable as YAML: {error}") from error
        check_value(str(path), values, Mapping)
        with options_of(path):
            return cls.from_dict(values)

    def to_yaml(self) -> str:
        """All options with their values."""
        return yaml_text(self.to_dict())


GROUP_OF = TrainConfig.groups()
"""The group of each option, by name; None for those of `TrainConfig` itself."""

RECIPES: dict[str, TrainConfig] = {}
"""The recipes by name, each derived from another one and preceded by its command."""

# vitascope train --data FOLDER --recipe base
# The defaults of `TrainConfig`: the paper's ViT with weak augmentation, for large data sets. Its models can
# be converted for every library.
BASE = RECIPES["base"] = TrainConfig()

# vitascope train
# Expect 98.9 to 100% on the 360 test digits, depending on seed and processor, in 75 s on a CPU with AVX2
# (scikit-learn's SVC(): 98.3%). The 8x8 images are enlarged to 32x32, so that small rotations and shifts do
# not blur them.
RECIPES["digits"] = BASE.replace(
    image_size=32,
    patch_size=8,
    embed_dim=96,
    depth=3,
    num_heads=6,
    epochs=60,
    batch_size=64,
    lr=3e-3,
    warmup_epochs=5.0,
    ema=0.99,
    flip=0.0,
    crop_scale=1.0,
    color_jitter=0.0,
    shift=0.06,
    rotate=8.0,
    keep="auto",
)

# What small models have in common: Muon, and smaller images in three quarters of the run. The number and the
# size of the images choose the augmentation and, without a length, the epochs (training/plan.py).
SMALL = BASE.replace(
    epochs=None,
    progressive=0.75,
    optimizer="muon",
    lr=3e-3,
    crop_scale=None,
    shift=None,
    color_jitter=0.0,
    randaugment=None,
    operation_probability=0.5,
    erase=None,
    keep="auto",
)

# vitascope train --data FOLDER --minutes 30
# From scratch: a small ViT with a convolutional tokenizer (Hassani et al. 2021), whose first layer whitens
# the images, and mimetic initialization. Of the same operations it learns more than the model of `distill`,
# in batches of 64, with 1,000 to 45,000 images (benchmarks/results/2026-11-27-operations-zen.md), with
# a linear decay than with a cosine, with GELU in the tokenizer than with ReLU (2026-11-28-operations-zen.md),
# and with one block than with two; in short runs, with four sizes than with two (2026-11-30-operations.md).
RECIPES["small-data"] = SMALL.replace(
    model="cct_1_3x6",
    model_options={"init": "mimetic"},
    lr=6e-3,
    lr_width=128,
    schedule="linear",
    whiten="auto",
)

# vitascope train --data FOLDER --teacher runs/cnn
# With a class token for the labels and a distillation token for the teacher (Touvron et al. 2021).
RECIPES["distill"] = SMALL.replace(model="cct_mini", model_options={"init": "mimetic"}, pool="cls")

# vitascope train --data FOLDER --model resnet29_w32_cifar
# A CNN, as a baseline or a teacher.
RECIPES["cnn"] = SMALL

# vitascope train --data FOLDER --weights MODEL
# A trained body with a new head: a short run with small steps, smaller ones in early layers. They are for
# large bodies, and for few images of classes that the body knows. Small bodies learn new classes faster with
# 2e-3 and 5 epochs of warm-up (docs/small-data.md).
RECIPES["finetune"] = BASE.replace(epochs=20, lr=1e-4, layer_decay=0.75, crop_scale=0.7)

# vitascope train --data FOLDER --weights MODEL --lora 8
# Low-rank changes of a trained body (Hu et al. 2021), and a new head. The rate is the best of six, from 5e-4
# to 1.6e-2, on 500 images of five classes of CIFAR-10, from a body of `small-data` trained on the other five;
# half of it was 3 points worse, twice of it 1 point (1,500 test images, one seed).
RECIPES["lora"] = RECIPES["finetune"].replace(lora=8, lr=4e-3, lr_width=128, warmup_epochs=5, layer_decay=1.0)

# vitascope train --data FOLDER --weights cifar10 --recipe small-finetune
# `small-data` from the weights of a small model, with smaller steps: the default for a few hundred images, on
# which the smaller steps of `finetune` learn less (benchmarks/results/2026-11-25-few_images.md). The
# lowest validation loss chooses the epoch, as in `finetune`: a few dozen images hardly show that the last one
# is worse (benchmarks/results/2026-11-28-few-images.md).
RECIPES["small-finetune"] = SMALL.replace(lr=1e-3, keep="best")

# The common options of the published recipes below. None names an image size: photographs are trained at
# 224 pixels, as published, and small images, such as CIFAR's, at their own size. Cosine and linear
# schedules end at a rate of 0, those of the papers' code at 1e-5.
PUBLISHED = BASE.replace(label_smoothing=0.0, ema=0.0, crop_scale=0.08, color_jitter=0.0, keep="last")

# The recipes of the ViT paper (Dosovitskiy et al. 2021) have no other augmentation than Inception's crop,
# of 5% of the area or more (vit_jax/input_pipeline.py), and a flip.
PAPER = PUBLISHED.replace(crop_scale=0.05)

# torchrun --nproc-per-node 8 -m vitascope.cli -- train --data imagenet21k/ --recipe paper-pretrain
# The row "ViT-B/{16,32}, ImageNet-21k" of table 3 (appendix B.1): Adam, linear warm-up and decay, an MLP
# head; one of the authors confirms the decay of 0.03 and the dropout
# (github.com/google-research/vision_transformer, issue 2). Adam in flax has decoupled weight decay, which
# torch calls AdamW. They trained with the sigmoid loss on images with several labels (issue 34); images
# have one label here, and the softmax loss. After `paper-finetune`, expect 83.97% on ImageNet (table 5).
# The rows of L/16 and L/32: --model vit_l16 --epochs 30 (or 90).
RECIPES["paper-pretrain"] = PAPER.replace(
    model="vit_b16",
    model_options={"head": "mlp"},
    dropout=0.1,
    epochs=90,
    batch_size=4096,
    lr=1e-3,
    schedule="linear",
    warmup_steps=10_000,
    weight_decay=0.03,
    clip_grad=0.0,
)

# torchrun --nproc-per-node 8 -m vitascope.cli -- train --data jft300m/ --recipe paper-pretrain-jft
# The row "ViT-B/{16,32}, JFT-300M" of table 3. After `paper-finetune`, expect 84.15% on ImageNet (table 5).
# Other rows: --model vit_l32 --lr 6e-4; --model vit_l16 --lr 4e-4 (--epochs 14: 87.12%); --model vit_h14
# --lr 3e-4 --epochs 14 (88.04%).
RECIPES["paper-pretrain-jft"] = RECIPES["paper-pretrain"].replace(
    dropout=0.0, epochs=7, lr=8e-4, weight_decay=0.1
)

# torchrun --nproc-per-node 8 -m vitascope.cli -- train --data imagenet/ --recipe paper-pretrain-imagenet
# The row "ViT-*, ImageNet" of table 3: more decay, a cosine, and gradients clipped to a norm of 1. After
# `paper-finetune`, expect 77.91% on ImageNet, and 76.53% with --model vit_l16 (table 5).
RECIPES["paper-pretrain-imagenet"] = RECIPES["paper-pretrain"].replace(
    epochs=300, lr=3e-3, schedule="cosine", weight_decay=0.3, clip_grad=1.0
)

# vitascope train --data FOLDER --weights MODEL --image-size 384 --recipe paper-finetune
# The paper's fine-tuning (section 4.1, appendix B.1.1, table 4): SGD with momentum, gradients clipped to a
# norm of 1, a linear head that starts at zero, Polyak averaging of 0.9999 (table 2). The resolution is 384
# pixels for weights of 224; without --image-size it is that of the weights. ImageNet: 20,000 steps, which
# are the 8 epochs; rates of 0.003, 0.01, 0.03 and 0.06. CIFAR: 10,000 steps, 0.001 to 0.03. Expect 83.97%
# on ImageNet and 98.95% on CIFAR-10 from B/16 of ImageNet-21k (table 5, without averaging).
RECIPES["paper-finetune"] = PAPER.replace(
    model_options={"head_init": "zero"},
    epochs=8,
    batch_size=512,
    optimizer="sgd",
    lr=0.03,
    warmup_epochs=0.0,
    weight_decay=0.0,
    ema=0.9999,
)

# torchrun --nproc-per-node 8 -m vitascope.cli -- train --data imagenet/ --recipe deit
# Touvron et al. 2021, table 9: DeiT-S reaches 79.9% on ImageNet-1k; with a teacher, 81.2%. There is no
# colour jitter: the code names one of 0.3, but timm leaves it out beside RandAugment. Their initialization is
# --model-options init=timm; after 24 steps on the digits, a small model is at 11% with it, at 22% with the
# paper's.
RECIPES["deit"] = PUBLISHED.replace(
    model="vit_s16",
    drop_path=0.1,
    epochs=300,
    batch_size=1024,
    lr=5e-4,
    lr_batch=512,
    warmup_epochs=5.0,
    weight_decay=0.05,
    clip_grad=0.0,
    loss="cross_entropy",
    label_smoothing=0.1,
    ema=0.99996,
    repeats=3,
    randaugment=2,
    operation_probability=0.5,
    erase=0.25,
    mixup=0.8,
    cutmix=1.0,
)

# torchrun --nproc-per-node 8 -m vitascope.cli -- train --data imagenet/ --recipe deit3
# Touvron et al. 2022, "DeiT III: Revenge of the ViT": ViT-S/16 reaches 81.4% on ImageNet-1k in 800 epochs,
# by the authors' command (README_revenge.md of github.com/facebookresearch/deit). It differs in the
# optimizer: theirs is LAMB with a rate of 4e-3, which torch does not have. AdamW has DeiT's rate here, 2e-3
# for this batch, and the same decay; that was not run, so expect something else than 81.4%. Their LAMB
# clips to a norm of 1, too. Published for 400 epochs, 80.4%: --epochs 400 --weight-decay 0.03 --drop-path
# 0. With --shift 0.018 --crop-scale 1 the crop is the simple one of their ImageNet-21k recipe.
RECIPES["deit3"] = RECIPES["deit"].replace(
    model_options={"init": "timm", "layer_scale": 1e-4, "position_prefix": False},
    drop_path=0.05,
    epochs=800,
    batch_size=2048,
    clip_grad=1.0,
    loss="bce",
    label_smoothing=0.0,
    ema=0.0,
    color_jitter=0.3,
    three_augment=True,
    randaugment=0,
    operation_probability=1.0,
    erase=0.0,
)

# torchrun --nproc-per-node 8 -m vitascope.cli -- train --data imagenet/ --recipe plain
# Beyer et al. 2022, "Better plain ViT baselines for ImageNet-1k": ViT-S/16 reaches 76.5% in 90 epochs and 80%
# in 300. big_vision multiplies its decay of 1e-4 by the schedule alone, torch by the rate too: hence 0.1.
RECIPES["plain"] = PUBLISHED.replace(
    model="vit_s16",
    pool="mean",
    model_options={"positions": "sincos_2d_big_vision"},
    epochs=90,
    batch_size=1024,
    lr=1e-3,
    warmup_steps=10_000,
    weight_decay=0.1,
    crop_scale=0.05,
    randaugment=2,
    magnitude=10.0,
    mixup=0.2,
)

# vitascope pretrain --data FOLDER
# Masked patch prediction (paper, appendix B.1.2); `vitascope train --weights` of the run fine-tunes it. The
# paper trains B/16 for 1M steps on JFT with --batch-size 4096 --lr 2e-4 --warmup-steps 10000 --ema 0, and
# reaches 79.9% on ImageNet after fine-tuning (section 4.6), 2 points above training from scratch.
RECIPES["masked"] = BASE.replace(task="masked", label_smoothing=0.0, color_jitter=0.0, keep="last")

# vitascope pretrain --data FOLDER --target mae
# A masked autoencoder (He et al. 2022). Its augmentation is that of the paper, flips and random crops.
RECIPES["mae"] = RECIPES["masked"].replace(target="mae")


LENGTHS = tuple(traits(TrainConfig, SetsLength))


def flattened(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, of which some may be given as a group: `optimization=Optimization(lr=1e-3)`."""
    groups: dict[str, Any] = {}
    for name in set(GROUP_OF.values()) & options.keys():
        if dataclasses.is_dataclass(group := options[str(name)]):
            groups |= vars(group)
    return groups | {name: value for name, value in options.items() if not dataclasses.is_dataclass(value)}


def over_recipe(recipe: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option by name: those of a recipe under named ones, which `flattened` returns.

    A named length replaces the recipe's, a named rate is for any width, and named model options are merged;
    a whole group, which names all of its options, replaces the recipe's.

    Raises:
        UserError: an unknown recipe, with the nearest known one.
    """
    recipe = default_recipe(options) if recipe is None else recipe
    check_choice("recipe", recipe, RECIPES)
    base = {name: RECIPES[recipe].option(name) for name in GROUP_OF}
    if any(options.get(name) is not None for name in LENGTHS):
        base |= dict.fromkeys(LENGTHS) | {"lengths": (), "validations": 0}
    if "lr" in options:
        base["lr_width"] = None
    merged = base | dict(options)
    whole = {name for name, group in GROUP_OF.items() if group == "architecture"} <= options.keys()
    if "model_options" in options and not whole:
        named = Architecture(model_options=options["model_options"]).model_options
        merged["model_options"] = merged_options(base["model_options"], named)
    return merged


def merged_options(base: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """A named model option replaces that of the recipe, and the recipe's that depend on it."""
    kept = dict(base)
    for name, needs in traits(ViTConfig, AppliesWith).items():
        if not needs.holds(named.get(needs.option, needs.value)):
            kept.pop(name, None)
    return {**kept, **named}


def default_recipe(options: Mapping[str, Any]) -> str:
    """The recipe for the task, weights, teacher, data and model among named options."""
    if options.get("task") == "masked":
        return "mae" if options.get("target") == "mae" else "masked"
    if options.get("lora") is not None:
        return "lora"
    if options.get("weights") not in (None, NO_WEIGHTS):
        return "finetune"
    if options.get("teacher") is not None:
        return "distill"
    if options.get("data", TrainConfig.data) == "digits":
        return "digits"
    return "cnn" if str(options.get("model")).startswith("resnet") else "small-data"


def check_named(config: TrainConfig, named: Collection[str]) -> None:
    """Reject named options that do nothing with the other options of a configuration."""
    for name, needs in traits(TrainConfig, Needs).items():
        value, other = config.option(name), config.option(needs.option)
        if name in named and value not in (None, needs.off) and not needs.acts(other):
            raise UserError(
                f"{name}={value} has no effect with {needs.option}={other}: leave out {name}, or change "
                f"{needs.option}"
            )
