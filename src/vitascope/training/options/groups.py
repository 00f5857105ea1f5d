"""The options of a run, in groups, each with its traits. No torch, so that the help is printed at once.

An option's range, the task that has it, and what it stands for, are traits in its `Annotated` type, which
`model.configuration.traits` finds.
"""

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from vitascope.arguments import CheckedFields, Increasing, NamesFile, Range, has_type
from vitascope.errors import UserError, suggestion
from vitascope.formatting import canonical
from vitascope.models.config import OPTIONS
from vitascope.models.options import OPTION_SETS, PROBABILITY, pair
from vitascope.serialization import parse_json


@dataclasses.dataclass(frozen=True)
class Classifies:
    """An option of `train` alone."""

    off: Any
    """The value without an effect, which pre-training has."""
    reason: str = "needs labels, and pre-training has none"
    """Why pre-training rejects other values."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """Another option on whose value it depends whether an option does anything."""

    option: str
    acts: Callable[[Any], bool]
    """Whether it does, by the value of the other."""
    off: Any = None
    """Its own value that asks for nothing."""


@dataclasses.dataclass(frozen=True)
class SetsLength:
    """One of the options that set the length of a run."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """An option that a run sets itself, and records."""


MaybeSize = Annotated[int | tuple[int, int] | None, tyro.conf.arg(metavar="INT | HEIGHT WIDTH")]
MaybeLevels = Annotated[tuple[float, float] | None, tyro.conf.arg(metavar="LOW HIGH"), Increasing()]


ModelOptions = Annotated[
    Mapping[str, Any],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE ...",
        instance_from_str=list,  # `Architecture` parses it, so that tyro adds nothing to the errors
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda values: [f"{name}={json.dumps(value)}" for name, value in values.items()],
    ),
]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]

_MOST = 2_000_000_000
COUNT, AMOUNT = Range(ge=1, lt=_MOST), Range(ge=0, lt=_MOST)
"""Ranges that fit the counters of libraries."""
SHARE, PART = Range(ge=0, le=1), Range(gt=0, le=1)
MIXES = "mixes labels too, and pre-training has none"

UNSMOOTHED = ("focal", "asymmetric")
"""The losses whose targets are not smoothed."""


def _smooths(loss: str | None) -> bool:
    return loss not in UNSMOOTHED


def _is_named(value: object) -> bool:
    return value is not None


def _is_not_zero(value: object) -> bool:
    return value != 0


DECODER_HEAD = 32
"""Width of an attention head in the decoder of a masked autoencoder, as in the paper's."""
LARGEST_RATE = 100.0
"""The largest published learning rates in vision, of LARS for huge batches, are a few tens."""

DERIVED_OPTIONS = ("num_classes", "class_names", "in_channels", "outputs", "thresholds", "members")
"""Model options that follow from the data and the folds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture(CheckedFields):
    """The model."""

    model: str | None = None
    """Named size; `vitascope models` lists them. Default: vit_ti16, or the architecture of --weights."""
    image_size: Annotated[MaybeSize, COUNT] = None
    """Side of the square input, or its height and width, in pixels.
    Default: 224, or the size of the images if they are small."""
    patch_size: Annotated[MaybeSize, COUNT] = None
    """Side of a patch, or its height and width, in pixels.
    Default: that of the model, or an eighth of a small image."""
    embed_dim: Annotated[int | None, COUNT] = None
    """Width of a token. Default: that of the model."""
    depth: Annotated[int | None, COUNT] = None
    """Number of blocks. Default: that of the model."""
    num_heads: Annotated[int | None, COUNT] = None
    """Attention heads per block. Default: that of the model."""
    pool: Literal["cls", "mean", "cls_mean", "map", "sequence"] | None = None
    """Input of the head: class token, mean of the patches, or both.
    Or attention pooling by a learned query (map), or sequence pooling by a learned score.
    Default: that of the model."""
    dropout: Annotated[float, PROBABILITY, Needs("freeze", operator.not_, off=0.0)] = 0.0
    """Dropout in the embedding, the projections and the MLPs."""
    drop_path: Annotated[float, PROBABILITY, Needs("freeze", operator.not_, off=0.0)] = 0.0
    """Stochastic depth of the last block; it grows linearly from the first."""
    model_options: ModelOptions = dataclasses.field(default_factory=dict)
    """Other model options, such as `--model-options positions=rotary attention=axial`; see docs/options.md.
    `modern` stands for rotary positions, registers and layer scale."""

    def __post_init__(self) -> None:
        """Check the options, and the named options of the model; texts become values by name."""
        given: Any = [self.model_options] if isinstance(self.model_options, str) else self.model_options
        if has_type(given, tuple[str, ...]):
            object.__setattr__(self, "model_options", parsed_options(given))
        super().__post_init__()
        plain = {name: list(it) if isinstance(it, tuple) else it for name, it in self.model_options.items()}
        object.__setattr__(self, "model_options", plain)  # a copy, with the lists of a file
        self._check_model_options()
        for name in ("image_size", "patch_size"):  # a file has lists
            sides = getattr(self, name)
            if sides is not None:
                height, width = pair(sides)
                object.__setattr__(self, name, height if height == width else (height, width))

    def chosen(self) -> dict[str, Any]:
        """The sizes and the pooling that are set, by their names in `ViTConfig`."""
        names = ("image_size", "patch_size", "embed_dim", "depth", "num_heads", "pool")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def names_model(self) -> bool:
        """Whether options name a model other than that of the weights, at whatever size of its images."""
        return bool(self.model or self.model_options or self.chosen().keys() - {"image_size"})

    def _check_model_options(self) -> None:
        own = {field.name for field in dataclasses.fields(self)} | set(DERIVED_OPTIONS)
        for name in self.model_options:
            if name in own:
                raise UserError(f"model_options: {name} is set by training itself; leave it out")
            if name not in OPTIONS:
                raise UserError(f"unknown model option {name!r}{suggestion(str(name), set(OPTIONS) - own)}")
        head = self.model_options.get("head")
        if head in ("none", "pre_logits"):
            raise UserError(f"model_options: a classifier needs a head with classes, not {head!r}")


def parsed_options(texts: Sequence[str]) -> dict[str, Any]:
    """Model options by name, from NAME=VALUE or the name of a set each; an option overrides that of a set.

    Raises:
        UserError: another form, or an option that is given twice.
    """
    own: dict[str, Any] = {}
    of_sets: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if text in OPTION_SETS:
            of_sets |= OPTION_SETS[text]
        elif not equals:
            sets = ", ".join(OPTION_SETS)
            raise UserError(f"a model option has the form NAME=VALUE, or is one of {sets}; not {text!r}")
        elif name in own:
            raise UserError(f"model_options: {name} is given twice")
        else:
            try:
                own[name] = parse_json(value)
            except ValueError:
                own[name] = value  # a name
    return of_sets | own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization(CheckedFields):
    """The optimizer and its schedule."""

    epochs: Annotated[int | None, COUNT, SetsLength()] = 100
    """Passes over the training images. Default: that of the recipe, or by the number of images."""
    steps: Annotated[int | None, AMOUNT, SetsLength()] = None
    """Optimizer steps, instead of --epochs. With --freeze, 0 fits the head as `vitascope probe` does."""
    minutes: Annotated[float | None, Range(gt=0, lt=_MOST), SetsLength()] = None
    """Train for so many minutes, in place of --epochs. The measured speed sets the steps.
    The schedule ends when the time is over. The figures and the report come on top."""
    progressive: Annotated[
        float, PROBABILITY, Classifies(0.0, "changes the patches, which pre-training predicts")
    ] = 0.0
    """Share of the run, at its beginning, on images of 5/8, 3/4 and 7/8 of the side: faster steps.
    This is progressive resizing (Tan and Le 2021)."""
    batch_size: Annotated[int | None, COUNT] = None
    """Images per step, over all processes. Default: 128, or less if an epoch would have under 4 steps."""
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    """AdamW; Muon for hidden matrices and AdamW for the rest; or SGD with momentum 0.9."""
    lr: Annotated[float, Range(gt=0, le=LARGEST_RATE)] = 1e-3
    """Peak learning rate."""
    lr_batch: Annotated[int | None, COUNT] = None
    """Batch size that --lr belongs to: the learning rate scales linearly with the batch size.
    Default: no scaling."""
    lr_width: Annotated[int | None, COUNT] = None
    """Width (embed_dim) that --lr belongs to. Narrower models have this rate, too.
    Wider models have a rate that is smaller in proportion (Yang et al. 2022). Default: no scaling."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate schedule after the warm-up; cosine and linear end at 0."""
    warmup_epochs: Annotated[float | None, AMOUNT, Needs("warmup_steps", lambda steps: steps is None)] = None
    """Epochs of linear warm-up, at most a quarter of the run. Default: a twentieth of the run."""
    warmup_steps: Annotated[int | None, AMOUNT] = None
    """Steps of linear warm-up, instead of --warmup-epochs."""
    lengths: tyro.conf.Suppress[Annotated[tuple[tuple[int, int], ...], Recorded()]] = ()
    """The steps that --minutes has led to, recorded so that the run can be repeated.
    Pairs of a step and the length in steps from there on: those of step 0, and of each correction.
    After `--resume` with more epochs, the first is the step where these began."""
    validations: tyro.conf.Suppress[Annotated[int, AMOUNT, Recorded()]] = 0
    """Number of validations that --minutes has led to, at equal shares of the schedule; recorded as well.
    0 validates after whole epochs."""
    weight_decay: Annotated[float, AMOUNT] = 0.05
    """Weight decay of matrices; biases, norms, tokens and positions have none."""
    layer_decay: Annotated[float, PART, Needs("freeze", operator.not_, off=1.0)] = 1.0
    """Learning rate of each block divided by that of the next one; below 1, early layers change less."""
    freeze: Annotated[Flag, Classifies(False, "trains a head only, and pre-training has no head")] = False
    """Train the head alone, on a frozen body. `vitascope probe` fits a better head in less time."""
    lora: Annotated[
        int | None, COUNT, Classifies(None, "adapts trained weights to classes, and pre-training has none")
    ] = None
    """Rank of LoRA (Hu et al. 2021). Trains the head, and low-rank changes of the attention and the MLPs.
    The weights of --weights are frozen; the finished model contains the changes.
    Default: off; the recipe lora: 8."""
    whiten: Annotated[
        Literal["auto", "on", "off"], Classifies("off", "is for images that nothing is hidden in")
    ] = "off"
    """Whiten the training images in the first convolution of a tokenizer, which is then not trained.
    Its other layers have BatchNorm during training, which the saved model needs no more.
    `auto` does so for models that allow it."""
    clip_grad: Annotated[float, AMOUNT] = 1.0
    """Largest gradient norm; 0 disables clipping."""
    loss: Annotated[Literal["cross_entropy", "bce", "focal", "asymmetric"] | None, Classifies(None)] = None
    """Cross-entropy, or binary cross-entropy of each class (Touvron et al. 2022, DeiT III).
    `focal` weakens easy images (Lin et al. 2017).
    `asymmetric`, for several labels, weakens easy absent classes more (Ridnik et al. 2021).
    Default: cross_entropy; bce for images with several labels."""
    label_smoothing: Annotated[float, PROBABILITY, Classifies(0.0), Needs("loss", _smooths, off=0.0)] = 0.1
    """Share of the target probability that is spread over all classes."""
    ema: Annotated[float | None, PROBABILITY] = None
    """Decay of the moving average of the weights, which is evaluated and saved; 0 keeps no average.
    Step n uses (1 + n) / (10 + n) if that is smaller.
    Default: an average over about a fiftieth of the run."""
    keep: Annotated[
        Literal["best", "last", "auto"],
        Classifies("last", "compares weights by validation, and pre-training keeps its last ones"),
    ] = "best"
    """Weights of the finished model: those with the lowest validation loss, or the last ones.
    With several classes per image, `best` are those with the highest validation mAP.
    `auto` keeps the last ones, unless the validation images show that they are worse."""
    patience: Annotated[int, AMOUNT] = 0
    """Early stopping: epochs without a better validation result after which the run ends; 0 disables it.
    Better is a lower loss or, with several classes per image, a higher mAP."""

    def __post_init__(self) -> None:
        """Check the numbers, also against each other."""
        super().__post_init__()
        object.__setattr__(self, "lengths", tuple((since, total) for since, total in self.lengths))
        if self.steps == 0 and not self.freeze:
            raise UserError("steps=0 trains nothing: set freeze, which then fits the head, or more steps")
        if self.freeze and self.lora is not None:
            raise UserError(
                f"freeze trains the head alone, and lora={self.lora} the body too: leave out one of them"
            )
        if self.lr * self.weight_decay >= 1:
            raise UserError(
                f"lr times weight_decay must be below 1, not {self.lr:g} * {self.weight_decay:g}: a step "
                "would remove the weights or reverse their sign; lower one of them"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentationOptions(CheckedFields):
    """Random changes of the training images."""

    flip: Annotated[float, SHARE] = 0.5
    """Probability of a horizontal flip."""
    repeats: Annotated[int, COUNT] = 1
    """Copies of each image in a batch, augmented differently: repeated augmentation (Hoffer et al. 2020)."""
    crop_scale: Annotated[float | None, PART] = 0.5
    """Smallest share of the area that a random crop keeps.
    Default: that of the recipe, or by the images."""
    shift: Annotated[float | None, PROBABILITY] = 0.0
    """Largest random shift, as a share of the side; the border is reflected.
    Default: that of the recipe, or by the images: 1/16 for small ones, 1/8 after 5 epochs."""
    rotate: Annotated[float, AMOUNT] = 0.0
    """Largest random rotation, degrees."""
    color_jitter: Annotated[float, AMOUNT] = 0.2
    """Largest random change of brightness, contrast and saturation, as a share."""
    three_augment: bool = False
    """3-Augment: greyscale, solarization or Gaussian blur for each image (Touvron et al. 2022)."""
    randaugment: Annotated[int | None, AMOUNT] = 0
    """RandAugment: operations per image (Cubuk et al. 2020).
    Default: that of the recipe, or by the images."""
    magnitude: Annotated[float, Range(ge=0, le=10), Needs("randaugment", _is_not_zero)] = 9.0
    """RandAugment: strength, 0 to 10."""
    operation_probability: Annotated[float, SHARE, Needs("randaugment", _is_not_zero)] = 1.0
    """RandAugment: probability that a drawn operation is applied; 1 in the paper, 0.5 in DeiT."""
    erase: Annotated[float | None, SHARE] = 0.0
    """Probability that a random rectangle is erased (Zhong et al. 2020).
    Default: that of the recipe, or by the images."""
    mixup: Annotated[float, AMOUNT, Classifies(0.0, MIXES)] = 0.0
    """Mixup: alpha of the Beta distribution of the mixing weight (Zhang et al. 2018); 0 disables it."""
    cutmix: Annotated[float, AMOUNT, Classifies(0.0, MIXES)] = 0.0
    """CutMix: alpha of the Beta distribution of the area (Yun et al. 2019); 0 disables it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balance(CheckedFields):
    """Classes with few and with many images."""

    class_weights: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="balanced | CLASS=WEIGHT ..."), Classifies(())
    ] = ()
    """Weight of each training image's loss, by its class, and in the validation loss that selects the model.
    What is reported is not weighted.
    Several labels: the weight of a class where it applies.
    `cat=1 dog=3.5` gives some, and 1 to the others.
    `balanced` is inversely proportional to the training images of the class, with the mean 1.
    Default: all 1."""
    sampling: Annotated[Literal["uniform", "balanced"], Classifies("uniform")] = "uniform"
    """Images of an epoch: `uniform` has each training image once.
    `balanced` has as many images, with every class equally often.
    The validation loss that selects the model then counts all classes alike."""

    def __post_init__(self) -> None:
        """Check the options, also against each other; a mapping of weights becomes CLASS=WEIGHT each."""
        weights: Any = self.class_weights
        if isinstance(weights, Mapping):
            weights = [f"{name}={weight}" for name, weight in weights.items()]
        if isinstance(weights, str):
            weights = [] if weights == "none" else [weights]
        object.__setattr__(self, "class_weights", tuple(weights) if isinstance(weights, list) else weights)
        super().__post_init__()
        if self.balances_loss and self.sampling == "balanced":
            raise UserError(
                "class_weights=balanced and sampling=balanced would balance the classes twice; use one"
            )
        self.weights_by_class()

    @property
    def balances(self) -> bool:
        """Whether images or classes count differently."""
        return bool(self.class_weights) or self.sampling == "balanced"

    @property
    def balances_loss(self) -> bool:
        """Whether the weights follow from the number of images."""
        return self.class_weights == ("balanced",)

    def weights_by_class(self) -> dict[str, float]:
        """The weights that are named, by class; a UserError for what is no positive number."""
        weights: dict[str, float] = {}
        for text in () if self.balances_loss else self.class_weights:
            name, equals, number = text.rpartition("=")
            try:
                weight = float(number)
            except ValueError:
                weight = math.nan
            if not equals or not 0 < weight < math.inf:
                raise UserError(
                    "class_weights: expected balanced, or CLASS=WEIGHT with a positive number, such as "
                    f"dog=3.5, not {text!r}"
                )
            if canonical(name) in weights:
                raise UserError(f"class_weights: {name!r} is given twice")
            weights[canonical(name)] = weight
        return weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation(CheckedFields):
    """Distillation from a teacher (Touvron et al. 2021, DeiT)."""

    teacher: Annotated[str | None, NamesFile(), Classifies(None)] = None
    """Teacher: a MODEL with the classes of the data, timm:NAME or transformers:NAME.
    It trains a distillation token beside the class token."""
    distill: Annotated[Literal["hard", "soft"], Needs("teacher", _is_named)] = "hard"
    """Learn the teacher's decision, or its probabilities."""
    distill_weight: Annotated[float, SHARE, Needs("teacher", _is_named)] = 0.5
    """Weight of the teacher's loss."""
    temperature: Annotated[float, Range(gt=0), Needs("distill", "soft".__eq__)] = 3.0
    """Divisor of both models' logits with --distill soft."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking(CheckedFields):
    """Masked patch prediction (paper, appendix B.1.2), or a masked autoencoder (He et al. 2022)."""

    target: Annotated[
        Literal["mean_color", "downsampled", "pixels", "mae"], Needs("task", "masked".__eq__)
    ] = "mean_color"
    """Prediction for a hidden patch: its mean colour, the colours of its 4x4 picture, or its pixels.
    Or `mae`, a masked autoencoder: the encoder gets the visible patches only.
    Its decoder predicts the pixels of the others, normalized in each patch."""
    corrupt: Annotated[float | None, Range(gt=0, lt=1), Needs("task", "masked".__eq__)] = None
    """Share of the patches that are hidden and predicted. Default: 0.75 for mae, else 0.5."""
    decoder_dim: Annotated[int, Range(gt=0, multiple_of=DECODER_HEAD), Needs("target", "mae".__eq__)] = 128
    """Width of the decoder of mae, a multiple of 32."""
    decoder_depth: Annotated[int, COUNT, Needs("target", "mae".__eq__)] = 2
    """Number of blocks of the decoder of mae."""

    @property
    def share(self) -> float:
        """The share of the patches that are hidden: `corrupt`, or the default of the target."""
        if self.corrupt is not None:
            return self.corrupt
        return 0.75 if self.target == "mae" else 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionOptions(CheckedFields):
    """Execution: affects speed and memory, not the trained function."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """`auto` uses bf16 if it is faster on this machine."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, `mps`."""
    workers: Annotated[int | None, AMOUNT] = None
    """Processes that read images if they do not fit in memory. Default: one per core."""
    compile: Literal["on", "off"] = "off"
    """Compile the model with torch.compile, which takes about a minute."""
    accumulate: Annotated[int | None, COUNT] = None
    """Parts in which a batch is computed, one after the other. Default: as many as the memory needs."""
    gradient_checkpointing: Flag = False
    """Recompute each block in the backward pass, to save memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: every process holds the whole model (ddp), or a shard of it (fsdp)."""
    checkpoint_seconds: Annotated[float, AMOUNT] = 300.0
    """Seconds between checkpoints; 0 saves one after every step."""
    keep_checkpoints: Annotated[int, COUNT] = 2
    """Number of checkpoints to keep; an older one is used if the newest is broken."""
    keep_state: Flag = False
    """Keep the last checkpoint of the finished run, for `--resume RUN --epochs MORE`.
    It has about three to four times the size of the model."""
    tracker: Literal["mlflow", "trackio", "wandb"] | None = None
    """Experiment tracker that gets the metrics too. Default: none, but TensorBoard where it is installed."""
