"""`create_model`, and starting a model from the weights of another."""

import logging
import os
from typing import Any

from vitascope.arguments import checked
from vitascope.errors import UserError, suggestion
from vitascope.models.config import ViTConfig
from vitascope.models.configuration import traits
from vitascope.models.options import Role
from vitascope.models.sizes import NAMED_SIZES, ModelConfig, left_open, named_config
from vitascope.models.vision_model import VisionModel, build, kind_of
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.families.own import Vitascope
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.mapping import Source, from_family, reject
from vitascope.models.weights.preprocess import default_preprocess, preprocess_of

log = logging.getLogger(__name__)


@checked
def create_model(
    name: str, *, weights: str | os.PathLike[str] | None = None, **overrides: Any
) -> VisionModel:
    """Create a named model, with any option changed: `create_model("vit_b16", num_classes=10)`.

    Args:
        name: one of `list_models()`, or timm's name of such a model (`vit_base_patch16_224`), with timm's
            image size and rule for positions; the log then names ours.
        weights: a MODEL argument to start from; None initializes at random. Options that the name does not
            fix follow the weights (such as the epsilon of norms). Positions are interpolated to another
            `image_size`. The head is loaded if its classes are the same, or unnamed and of the same number.
            The log lists the tensors that were loaded, left out and initialized. The model has the
            preprocessing of the weights, at its own size.
        **overrides: options of `ViTConfig`, or for a ResNet of `ResNetConfig`.

    Raises:
        UserError: an unknown name or option, with the nearest; weights that do not fit.
    """
    name, overrides = _our_name(name, overrides)
    config = named_config(name, **overrides)  # an unknown name is rejected before anything is fetched
    if weights is None:
        model = build(config)
        model.preprocess = default_preprocess(model.config)
        return model
    source = from_pretrained(weights)
    model = build(adapted(source.config, name, str(weights), overrides))
    log.info("%s: %s", weights, "; ".join(transfer(source, model, str(weights))))
    preprocess = preprocess_of(source)
    model.preprocess = preprocess.at_size(model.config.image_hw) if "image_size" in overrides else preprocess
    return model


def _our_name(name: str, overrides: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Our name of a model, and the options that a name of timm's adds."""
    if name in NAMED_SIZES:
        return name, overrides
    from vitascope.models.weights.families.timm_settings import PLAIN, TIMM_NAMES, from_timm_name

    found = from_timm_name(name)
    if found is not None:
        ours, options = found[0], found[1] | overrides
        arguments = ", ".join(f"{option}={value!r}" for option, value in options.items())
        log.info("%s is %s here: create_model(%r, %s)", name, ours, ours, arguments)
        return ours, options
    if PLAIN.fullmatch(name.partition(".")[0]):
        raise UserError(
            f"unknown model {name!r}{suggestion(name, [*TIMM_NAMES, *NAMED_SIZES])}; its pretrained weights "
            f"load with from_pretrained('timm/{name}')"
        )
    return name, overrides


def check_single(model: str, config: ModelConfig) -> None:
    """Reject an ensemble where one model is needed."""
    if config.members > 1:
        raise UserError(f"{model} is {kind_of(config)}: name one of them instead, such as RUN/folds/1")


def adapted(source: ModelConfig, name: str | None, weights: str, overrides: dict[str, Any]) -> ModelConfig:
    """The configuration of trained weights with options changed for a new task.

    Rejects weights of another shape than the options require, or the size `name`, if it is given. For another
    number of classes a linear head replaces the whole pre-training head (paper, section 3.2).
    """
    check_single(weights, source)
    expected = source.replace(**overrides) if name is None else named_config(name, **overrides)
    check_same_kind(weights, source, str(name), expected)
    roles = {Role.SHAPE} if name is None else {Role.SHAPE, Role.NAME}
    fixed = {option for option, role in traits(type(source), Role).items() if role in roles}
    if name is not None:
        fixed |= NAMED_SIZES[name].options.keys() - left_open(name)
    differing = [
        f"{option} is {_in_words(option, source)}, not {_in_words(option, expected)}"
        for option in sorted(fixed)
        if source.option(option) != expected.option(option)
    ]
    reject(differing, f"{weights} has another body" if name is None else f"{weights} does not fit {name}")
    options = dict(overrides)
    if options.get("num_classes", source.num_classes) != source.num_classes:
        options.setdefault("class_names", ())
        options.setdefault("thresholds", ())
    if isinstance(source, ViTConfig) and "image_size" in options and "remainder" not in options:
        source = source.at_size(options["image_size"])
    other_head = isinstance(source, ViTConfig) and source.readout.head != "linear"
    if "num_classes" in options and other_head:
        options.setdefault("head", "linear")
    if "num_classes" in options and source.outputs == "embedding":
        options.setdefault("outputs", "exclusive")
    return source.replace(**options)


def _in_words(option: str, config: ModelConfig) -> str:
    """An option's value; a square patch by its side."""
    value = config.option(option)
    square = option == "patch_size" and isinstance(value, tuple) and value[0] == value[1]
    return repr(value[0] if square else value)


def check_same_kind(weights: str, source: ModelConfig, name: str, target: ModelConfig) -> None:
    """Reject starting a ViT from a ResNet, or the other way round."""
    if type(source) is not type(target):
        raise CheckpointError(f"{weights} is {kind_of(source)}, and {name} is {kind_of(target)}")


def transfer(source: VisionModel, target: VisionModel, name: str) -> list[str]:
    """Load the weights of a trained model into another of the same body; returns notes, also on the head."""
    check_same_kind(name, source.config, "the model", target.config)
    notes = []
    if isinstance(source, VisionTransformer) and source.config.grid != target.config.grid:
        (h, w), (new_h, new_w) = source.config.grid, target.config.grid
        if any(True for _ in source.positions.parameters()):
            notes.append(f"positions interpolated from {h}x{w} to {new_h}x{new_w}")
        source.resize(target.config.image_hw)
    state, wanted = source.state_dict(), target.state_dict()
    heads = [{k: v for k, v in values.items() if k.startswith("head.")} for values in (state, wanted)]
    same_shapes = {k: v.shape for k, v in heads[0].items()} == {k: v.shape for k, v in heads[1].items()}
    names = (source.config.class_names, target.config.class_names)
    body = {key: value for key, value in state.items() if not key.startswith("head.")}
    same_meaning = source.config.outputs == target.config.outputs
    if same_shapes and same_meaning and not (all(names) and names[0] != names[1]):
        chosen, notes = state, [f"all {len(state)} tensors loaded", *notes]
    else:
        old = f"left out the head for {source.config.num_classes} classes" if heads[0] else "it has no head"
        new = f"initialized one for {target.config.num_classes}" if heads[1] else "added none"
        chosen, notes = body | heads[1], [f"{len(body)} tensors of the body loaded", *notes, old, new]
    # Loaded completely, or rejected with every missing, extra and misshapen tensor.
    given = Source(name=f"{name} does not fit the model", tensors=chosen)
    target.load_state_dict(from_family(Vitascope(), given, target.config))
    return notes
