"""From a request to a plan: `inspect` the data and the weights, then `resolve`, once.

A plan has a value for every option, and the model's configuration, by the rules of this module, each a
function of all options by name and of the facts. What follows from the machine is decided after it
(`placement.py`): device, precision, the parts of a batch, and the length of a run with a budget of time. The
plan is recorded; a run that is resumed, or gets more epochs, is the recorded plan with changes (`resume.py`).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from vitascope.data.augment import NEW_EPOCHS, SHIFTS
from vitascope.data.datasets import greatest_value, sampled_sizes
from vitascope.data.splits import Splits
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError
from vitascope.formatting import counted, listed
from vitascope.models.config import OPTIONS, ViTConfig
from vitascope.models.configuration import options_of, traits
from vitascope.models.options import AppliesWith, pair
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.sizes import ModelConfig, architecture_record, config_of, named_config
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.models.weights.transfer import adapted
from vitascope.training.options import recipes
from vitascope.training.options.groups import UNSMOOTHED, Architecture, Classifies, Masking
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.run import Run
from vitascope.training.schedule import SIDES, resized
from vitascope.training.tasks.losses import LOSSES, Losses
from vitascope.training.tasks.masked import body_config, check_encoder
from vitascope.training.whitening import SIDE

DEFAULT_MODEL = "vit_ti16"
SMALL_IMAGE = 96
"""Images whose median shorter side is at most this, in pixels, keep their size."""
LARGE_IMAGE = 224
"""Input size for larger images, pixels."""
FROM_SCRATCH = 64
"""Input size of a model with a tokenizer for larger images, pixels."""
IMAGES_SHOWN = 1_000_000
"""Images, with repetitions, that a run without a length is trained on, within these numbers of epochs."""
FEWEST_EPOCHS, MOST_EPOCHS = 20, 200
LEAST_PATCHES = 8
"""Patches per side of small images."""
FEW_IMAGES = 20_000
"""With fewer training images, each is shown so often that a weak augmentation lets the model learn it."""
Options = Mapping[str, Any]
"""Every option of a run by name, from which rules decide."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a run is asked for: options by name, over a recipe."""

    recipe: str | None
    """None leaves it to the options and the data."""
    options: Options
    """The named ones."""
    config: TrainConfig
    """The named options over the recipe, as far as it is known before the data are open."""

    @classmethod
    def of(cls, config: TrainConfig | None, recipe: str | None, options: Mapping[str, Any]) -> Self:
        """A request for named options over a recipe, or over a configuration, which names all of them.

        Raises:
            UserError: options that contradict each other, or do nothing with the others.
        """
        if config is None:
            named = recipes.flattened(options)
            config = TrainConfig(**recipes.over_recipe(recipe, named))
            size = config.architecture.model or "a Vision Transformer"
            if recipe == "cnn" and config.weights is None and not size.startswith("resnet"):
                raise UserError(
                    f"the recipe cnn is for a CNN, not for {size}: choose model=resnet29_w32_cifar or "
                    "another one, or leave out the recipe"
                )
            values = {name: config.option(name) for name in named}
            if named.get("weights") == recipes.NO_WEIGHTS:  # not the built-in ones either
                values["weights"] = recipes.NO_WEIGHTS
            if "model_options" in named:
                values["model_options"] = Architecture(model_options=named["model_options"]).model_options
        else:
            if not isinstance(config, TrainConfig):
                raise UserError(
                    f"config must be a TrainConfig, not a {type(config).__name__}; name options: data=..."
                )
            if recipe is not None:
                raise UserError("a configuration contains every option already; leave out recipe")
            config, recipe = config.replace(**options), "base"
            if any(since for since, _ in config.optimization.lengths[:1]):  # of a run that got more epochs
                config = config.replace(lengths=())  # all in one go
            values = {name: config.option(name) for name in recipes.GROUP_OF}
        recipes.check_named(config, recipes.flattened(options))
        return cls(recipe=recipe, options=values, config=config)

    def on(self, data: str) -> Self:
        """The same request for other data."""
        config = self.config.replace(data=data)
        return dataclasses.replace(self, options={**self.options, "data": data}, config=config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The recipe of a run, and what it starts from."""

    recipe: str | None
    """None leaves it to the named options."""
    weights: str | None
    """None is random weights."""
    reasons: tuple[str, ...] = ()
    """A reason for each choice of `weights=auto`."""
    fits_head: bool = False
    """Whether only a head is fitted, which needs no step."""

    @classmethod
    def usual(cls, request: Request, images: int, channels: int) -> Self:
        """The start without a comparison: few colour images start from the built-in model, unless a recipe, a
        teacher, other weights or options of a new model are named. `images` are all that are given."""
        named, recipe = request.options, request.recipe or recipes.default_recipe(request.options)
        of_model = {name: named[name] for name in named if recipes.GROUP_OF[name] == "architecture"}
        random = Architecture(**of_model).names_model or named.get("weights") == recipes.NO_WEIGHTS
        few = channels == 3 and images <= recipes.FEW_TO_START
        if request.recipe is None and recipe == "small-data" and few and not random:
            return cls(recipe=tuned(images), weights=recipes.BUILT_IN)
        return cls(recipe=recipe, weights=request.config.weights)

    def over(self, request: Request) -> dict[str, Any]:
        """Every option by name: the recipe's, under those that are named, under this choice."""
        named = {**request.options, "weights": self.weights}
        if self.reasons:
            named["bodies"] = ()
        if self.fits_head:
            named |= {"freeze": True, "steps": 0, "epochs": None, "minutes": None}
        return recipes.over_recipe(self.recipe or request.recipe, named)


def tuned(images: int) -> str:
    """The recipe that tunes the built-in model on so many images."""
    return "finetune" if images <= recipes.FEW_TO_TUNE else "small-finetune"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a plan depends on, of the data and of the weights to start from."""

    images: int
    """The number of training images."""
    height: int
    """Median of the training images, pixels; sizes in words are height x width, as `image_size` is."""
    width: int
    one_size: bool
    """Whether all of those that were looked at have this height and width."""
    sides: tuple[int, int]
    """The shortest and the longest side of those."""
    channels: int
    class_names: tuple[str, ...]
    greatest: int | None
    """The greatest value in training images of more than 8 bits; None without any, or if not asked for."""
    kind: Losses = LOSSES[ClassIndices]
    """The losses of the labels; any, where there are none."""
    weights: ModelConfig | None
    """The configuration of the weights; None for random ones."""
    weights_levels: tuple[float, float] | None = None
    """The levels of the weights."""
    shards: int = 0
    """The number of shards of the training images; 0 for files of their own."""

    @property
    def few(self) -> bool:
        """Whether each image is shown so often that a weak augmentation lets the model learn it."""
        return self.images < FEW_IMAGES

    @property
    def photographs(self) -> bool:
        """Whether the images are too large to keep their size."""
        return min(self.height, self.width) > SMALL_IMAGE

    def __str__(self) -> str:
        spread = "" if self.one_size else ", with sides from {:,} to {:,}".format(*self.sides)
        return f"{counted(self.images, 'image')} of about {self.height}x{self.width} pixels{spread}"


def inspect(data: Splits, weights: VisionModel | None = None, *, levels: bool = True) -> Facts:
    """The facts of opened data and of the model to start from; reads the headers of up to 100 images, and all
    training images of more than 8 bits if `levels` depend on them.

    Raises:
        UserError: none of these images can be read.
    """
    sizes = sampled_sizes(data.train)
    height, width = map(int, np.median(sizes, axis=0))
    weights_levels = None if weights is None else preprocess_of(weights).levels
    return Facts(
        images=len(data.train),
        height=height,
        width=width,
        one_size=bool((sizes == sizes[0]).all()),
        sides=(int(sizes.min()), int(sizes.max())),
        channels=data.channels,
        class_names=data.train.class_names,
        greatest=greatest_value(data.train) if levels and weights_levels is None else None,
        kind=LOSSES[ClassIndices if data.train.targets is None else type(data.train.targets)],
        weights=None if weights is None else weights.config,
        weights_levels=weights_levels,
        shards=data.train.shard_files,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does."""

    config: TrainConfig
    """With a value for each of `DECIDED`."""
    model: ModelConfig
    chosen: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The options that the data have decided, with their values in words."""
    reason: str = ""
    """The facts that decided them, in words."""
    note: str = ""
    """A cheaper way to do the same; empty if there is none."""
    start: tuple[str, ...] = ()
    """The choices of `weights=auto`, each with its reason."""

    def explained(self) -> list[str]:
        """The start, the decisions of the data with their reason, the note; without those that are empty."""
        chosen = f"{', '.join(self.chosen.values())}: for {self.reason}" if self.chosen else ""
        return [line for line in (*self.start, chosen, self.note) if line]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the options, which a run records in a file of their own."""
        return {
            "model": architecture_record(self.model),
            "chosen": dict(self.chosen),
            "reason": self.reason,
            "note": self.note,
            "start": list(self.start),
        }

    @classmethod
    def of_run(cls, run: Run, config: TrainConfig) -> Self:
        """The recorded plan of a run, with its configuration; UserError for invalid options."""
        with options_of(run.config_file):
            for name in DECIDED:
                if config.option(name) is None:
                    raise UserError(f"{name} has no value, and a run records one")
        with options_of(run.plan_file):
            model = config_of(run.plan["model"])
        texts = {name: run.plan[name] for name in ("chosen", "reason", "note")}
        return cls(config=config, model=model, start=tuple(run.plan["start"]), **texts)


def resolve(request: Request, facts: Facts, start: Start | None = None) -> Plan:
    """Decide everything that a request leaves open.

    Args:
        request: the named options, over a recipe.
        facts: of the data and of the weights of the start.
        start: the recipe and the weights; None for those of the request.

    Raises:
        UserError: options that contradict each other, the task, the data or the weights.
    """
    start = Start(recipe=request.recipe, weights=request.config.weights) if start is None else start
    options = start.over(request)
    if options["lengths"]:  # a run with minutes is repeated, whatever time that takes
        options["minutes"] = None
    if options["levels"] is None:
        options["levels"] = facts.weights_levels
    _check_task(options, facts)
    model, name = _model(options, facts)
    _check_streams(options, facts, model)
    decided = {name: rule.decide(options, facts, model) for name, rule in RULES.items()}
    named = (name for name, rule in RULES.items() if rule.yields and options[name] is not None)
    decided |= {name: options[name] for name in named}
    by_weights = set() if options["weights"] is None else {"image_size", "patch_size"}
    chosen = {
        name: rule.words.format(decided[name])
        for name, rule in RULES.items()
        if rule.words and options[name] is None and name not in by_weights
        if decided[name] != rule.no_change
    }
    if (batch_size := options["batch_size"]) not in (None, decided["batch_size"]):
        chosen["batch_size"] = (
            f"batches of {decided['batch_size']} instead of {batch_size:,}, which is more than the "
            "training images"
        )
    return Plan(
        config=TrainConfig(**options | decided | {"model": name}),
        model=model,
        chosen=chosen,
        reason=str(facts),
        note=_enlargement(options, model, facts),
        start=start.reasons,
    )


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the data, the weights and the model decide an option."""

    decide: Callable[[Options, Facts, ModelConfig], Any]
    """Its value by every option, the facts and the model."""
    words: str = ""
    """The value in words, which a run announces where the option is not named; empty for none."""
    no_change: Any = None
    """The value that changes nothing, which needs no mention."""
    yields: bool = False
    """Whether a named value stays as it is."""


def _cropped(options: Options, facts: Facts) -> bool:
    """Photographs show their object at any size and place, small images usually in the middle. Who asks for
    the whole picture gets it in the training too."""
    return facts.photographs and options["fit"] in (None, "crop")


def _epochs(options: Options, facts: Facts, model: ModelConfig) -> int | None:
    """The epochs of a run whose length is not named otherwise; by default, more for fewer images."""
    if options["steps"] is not None or options["minutes"] is not None:
        return None
    if options["lengths"]:
        return options["epochs"]
    epochs = max(FEWEST_EPOCHS, min(MOST_EPOCHS, round(IMAGES_SHOWN / facts.images)))
    return options["epochs"] or epochs


def _batch_size(options: Options, facts: Facts, model: ModelConfig) -> int:
    """The batch size; the default one if there is none, or if it is more than the images.

    Recorded lengths are steps of the recorded batch size.
    """
    # Muon learns more in many steps.
    most = 64 if options["optimizer"] == "muon" and isinstance(model, ViTConfig) else 128
    default, size = default_batch_size(facts.images, most), options["batch_size"]
    fits = size is not None and (options["lengths"] or size <= max(facts.images, default))
    return size if size is not None and fits else default


def default_batch_size(images: int, most: int = 128) -> int:
    """`most`, or the largest smaller power of two, at least 8, with 4 steps per epoch."""
    return max(8, min(most, 2 ** int(math.log2(max(1, images / 4)))))


def _rate(options: Options, facts: Facts, model: ModelConfig) -> float:
    """A rate belongs to a width: wider models take smaller steps."""
    return options["lr"] * min(1.0, (options["lr_width"] or model.embed_dim) / model.embed_dim)


def _corrupt(options: Options, facts: Facts, model: ModelConfig) -> float | None:
    """The share of hidden patches that the target of pre-training calls for."""
    if options["task"] != "masked":
        return options["corrupt"]
    return Masking(target=options["target"], corrupt=options["corrupt"]).share


def _loss(options: Options, facts: Facts, model: ModelConfig) -> str | None:
    """The loss of labels; pre-training has none."""
    if options["task"] == "masked" or options["loss"] is not None:
        return options["loss"]
    return facts.kind.criteria[0]


def _whiten(options: Options, facts: Facts, model: ModelConfig) -> Any:
    """Whether the first convolution whitens; `UserError` if that is asked for and cannot be."""
    option = options["whiten"]
    need = ""
    if options["weights"] is not None:
        need = "random weights: set weights=none"
    elif not isinstance(model, ViTConfig) or model.embedding.stem != "tokenizer":
        need = "a tokenizer: add model_options stem=tokenizer"
    elif not model.embedding.patch_bias:
        need = "convolutions with biases: leave out patch_bias"
    elif model.tokenizer_pools[0]:
        need = "a first layer that does not pool: add model_options tokenizer_pooling=[1, 2]"
    elif model.tokenizer_channels[1] < (fewest := 2 * model.in_channels * SIDE**2):
        need = f"at least {fewest} channels in the first layer: add model_options tokenizer_widths"
    if option == "on" and need:
        raise UserError(f"whiten=on needs {need}; or leave it out")
    return "off" if need else {"auto": "on"}.get(option, option)


RULES: dict[str, Rule] = {
    "levels": Rule(
        lambda options, facts, model: (0, facts.greatest) if facts.greatest else None,
        "levels {0[0]:,} to {0[1]:,}",
        yields=True,
    ),
    "image_size": Rule(lambda options, facts, model: model.image_hw, "{0[0]}x{0[1]} pixels"),
    "patch_size": Rule(
        lambda options, facts, model: model.patch_hw if isinstance(model, ViTConfig) else None,
        "patches of {0[0]}x{0[1]}",
    ),
    "epochs": Rule(_epochs, "{} epochs"),
    "batch_size": Rule(_batch_size, "batches of {}"),
    "crop_scale": Rule(
        lambda options, facts, model: 0.35 if _cropped(options, facts) else 1.0,
        "crops of {:.0%} or more",
        no_change=1.0,
        yields=True,
    ),
    "shift": Rule(
        lambda options, facts, model: 0.0 if _cropped(options, facts) else None,
        f"shifts of {SHIFTS[0]:.1%}, of {SHIFTS[1]:.1%} after {NEW_EPOCHS} epochs",
        no_change=0.0,
        yields=True,
    ),
    "randaugment": Rule(
        lambda options, facts, model: 2 if facts.few else 0, "RandAugment of {}", no_change=0, yields=True
    ),
    "erase": Rule(
        lambda options, facts, model: 0.25 if facts.few else 0.0, "erasing {:.0%}", no_change=0.0, yields=True
    ),
    "lr": Rule(_rate),
    "lr_width": Rule(lambda options, facts, model: None),  # the width of the model from now on
    "corrupt": Rule(_corrupt),
    "loss": Rule(_loss),
    "label_smoothing": Rule(
        lambda options, facts, model: 0.0 if options["loss"] in UNSMOOTHED else options["label_smoothing"]
    ),
    "whiten": Rule(_whiten),
}
"""The rule of each option that a plan decides, in the order of their announcement."""
DECIDED = ("batch_size", "crop_scale", "randaugment", "erase")
"""Options that a run has no value without; recorded by every run."""


def _check_task(options: Options, facts: Facts) -> None:
    """Reject options of another task or kind of labels, weights of a fitted head, a frozen random body."""
    if options["steps"] == 0 and (options["class_weights"] or options["sampling"] == "balanced"):
        raise UserError(
            "steps=0 fits a head that counts all images alike: leave out class_weights and sampling, or set "
            "more steps"
        )
    if options["task"] == "masked":
        for name, trait in traits(TrainConfig, Classifies).items():
            if options[name] != trait.off:
                raise UserError(f"{name} {trait.reason}; leave it out")
    elif options["loss"] not in (None, *facts.kind.criteria):
        raise UserError(
            f"loss={options['loss']} is not for images of {facts.kind.images}, whose losses are "
            f"{listed(facts.kind.criteria)}: leave it out"
        )
    elif options["weights"] is None and (options["freeze"] or options["lora"] is not None):
        name = "freeze" if options["freeze"] else "lora"
        raise UserError(f"{name} needs a body that is trained already: set weights")


def _check_streams(options: Options, facts: Facts, model: ModelConfig) -> None:
    """Reject streams of images that are in too few shards."""
    streams = options["streams"]
    if streams is None:
        return
    size = _batch_size(options, facts, model)
    most = min(facts.shards, size // 2)  # each part has pairs, which mixup mixes
    if streams > most:
        where = f"{facts.shards:,} shards, in batches of {size:,}" if facts.shards else "files of their own"
        advice = f"set it to {most:,} or less" if most > 1 else "leave it out"
        raise UserError(f"streams={streams} divides shards, and the training images are in {where}: {advice}")


def _architecture(options: Options) -> Architecture:
    return Architecture(**{field.name: options[field.name] for field in dataclasses.fields(Architecture)})


def _model(options: Options, facts: Facts) -> tuple[ModelConfig, str | None]:
    """The configuration of the model, and its named size."""
    base, wanted = facts.weights, _architecture(options)
    name = wanted.model or (DEFAULT_MODEL if base is None else None)
    of_model = {**wanted.chosen(), **wanted.model_options}
    if base is None and name is not None:
        of_model = _default_sizes(options, name, facts) | of_model
        of_model["in_channels"] = facts.channels
    is_vit = isinstance(base if name is None else named_config(name), ViTConfig)
    of_model |= _derived_options(options, facts, is_vit)
    if base is not None:
        try:
            model = adapted(base, name, str(options["weights"]), of_model)
        except CheckpointError as error:
            advice = "leave out the model to use that of the weights"
            if name is None:
                advice = "leave that out to train the body as it is, or pre-train another one"
            raise UserError(f"{error}; {advice}") from error
    else:
        model = named_config(name or DEFAULT_MODEL, **of_model)
    if isinstance(model, ViTConfig):
        if options["task"] == "masked":
            model = body_config(model)
        _check_vit(options, model)
    return model, name


def _derived_options(options: Options, facts: Facts, is_vit: bool) -> dict[str, Any]:
    """The model options that follow from the task, the data and other training options."""
    wanted, teacher = _architecture(options), options["teacher"]
    vit_options = {"dropout": wanted.dropout, "drop_path": wanted.drop_path}
    if not is_vit:
        foreign = vit_options | {
            "gradient_checkpointing": options["gradient_checkpointing"],
            "lora": options["lora"] is not None,
            "distillation token for the teacher": teacher is not None,
            "patches to hide in pre-training": options["task"] == "masked",
        }
        wrong = [name for name, value in foreign.items() if value]
        wrong += [name for name in wanted.chosen() if name != "image_size"] + list(wanted.model_options)
        if wrong:
            raise UserError(
                f"{wanted.model or options['weights']} is a CNN, which has no {', '.join(wrong)}; leave it "
                "out, use the recipe cnn, or choose a Vision Transformer"
            )
    if options["task"] == "masked":
        return vit_options | {"head": "none"}
    classes = {"class_names": facts.class_names, "num_classes": len(facts.class_names)}
    classes |= {"outputs": facts.kind.targets.outputs, "thresholds": ()}
    if not is_vit:
        return classes
    if teacher is not None:
        vit_options["distillation_token"] = True
    return vit_options | classes


def _default_sizes(options: Options, model: str, facts: Facts) -> dict[str, Any]:
    """Image and patch size: small images keep their size, with 8 patches per side, as far as possible. They
    are square, unless all images have one shape, of which a square would cut something off.

    A masked autoencoder normalizes each patch by its own variance, so a patch has more than one pixel.
    """
    wanted = _architecture(options)
    size = pair(wanted.image_size) if wanted.image_size else (facts.height, facts.width)
    side = min(size)
    if not (wanted.image_size or (facts.one_size and max(size) <= SMALL_IMAGE)):
        size = side, side
    small, config = side <= SMALL_IMAGE, named_config(model)
    if not isinstance(config, ViTConfig):
        return {"image_size": size if small else LARGE_IMAGE}
    embedding = dataclasses.replace(config.embedding, **_of_group("embedding", wanted))
    if embedding.stem == "tokenizer":
        tokenizer = dataclasses.replace(config.tokenizer, **_of_group("tokenizer", wanted))
        if not (small or wanted.image_size):
            size, side = (FROM_SCRATCH, FROM_SCRATCH), FROM_SCRATCH
        halvings = min(len(tokenizer.pooling), max(1, side // LEAST_PATCHES).bit_length() - 1)
        return _tiled(size, wanted.patch_size or 2 ** max(1, halvings))
    if small:
        smallest = 2 if options["task"] == "masked" and options["target"] == "mae" else 1
        if embedding.stem == "resnet":
            smallest = ResNetConfig(layers=embedding.resnet_layers).stride
        return _tiled(size, wanted.patch_size or max(smallest, side // LEAST_PATCHES // smallest * smallest))
    return {"image_size": LARGE_IMAGE}


def _tiled(size: tuple[int, int], patch: int | tuple[int, int]) -> dict[str, Any]:
    """Patches, and the nearest size of the images that they tile."""
    sides = zip(size, pair(patch), strict=True)
    return {
        "patch_size": patch,
        "image_size": [max(1, round(side / length)) * length for side, length in sides],
    }


def _of_group(group: str, wanted: Architecture) -> dict[str, Any]:
    """The named model options of a group."""
    return {name: value for name, value in wanted.model_options.items() if OPTIONS[name] == group}


def _check_vit(options: Options, model: ViTConfig) -> None:
    """Reject options that have no effect on a model, or that it does not support."""
    for option in options["model_options"]:
        needs = traits(ViTConfig, AppliesWith).get(option)
        if needs is not None and not needs.holds(model.option(needs.option)):
            raise UserError(
                f"model_options: {option} has no effect with {needs.option}="
                f"{model.option(needs.option)}; add {needs.option}={needs.value}, or leave it out"
            )
    if options["gradient_checkpointing"] and model.block.token_merging:
        raise UserError("token_merging does not go with gradient_checkpointing: leave one of them out")
    if options["task"] == "masked" and options["target"] == "mae":
        check_encoder(model)
    if options["progressive"]:
        try:
            for side in SIDES:
                model.grid_of(resized(model, side))
        except UserError as error:
            raise UserError(
                f"progressive resizing begins with smaller images: {error}; set progressive=0"
            ) from error


def _enlargement(options: Options, config: ModelConfig, facts: Facts) -> str:
    """The cost of images that weights enlarge much, and a smaller size; empty if there is nothing to say."""
    if options["weights"] is None or options["image_size"] is not None or not isinstance(config, ViTConfig):
        return ""
    patch_h, patch_w = config.patch_hw
    count = max(LEAST_PATCHES, math.ceil(facts.height / patch_h), math.ceil(facts.width / patch_w))
    smaller = (count * patch_h, count * patch_w)
    if 2 * max(smaller) > min(config.image_hw) or patch_h != patch_w:
        return ""
    try:  # not all positions allow other sizes
        cost = config.flops / dataclasses.replace(config, image_size=smaller).flops
    except UserError:
        return ""
    H, W = config.image_hw
    return (
        f"the images of about {facts.height}x{facts.width} pixels are enlarged to {H}x{W}, the size of the "
        f"weights; image_size={smaller[0]} needs {1 / cost:.1%} of the computation"
    )
