"""The preprocessing of a model: the one that it carries, and that of a new model."""

from dataclasses import fields

from vitascope.errors import UserError
from vitascope.models.preprocess import Preprocess
from vitascope.models.sizes import ModelConfig
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.files import CheckpointError

MAX_ENLARGED = 4  # times the model's side: the largest pictures that it gets, 16 times as many tokens
SMALL_PICTURE = 512  # the side up to which pictures fit a model of any size


def preprocess_of(model: VisionModel) -> Preprocess:
    """The preprocessing that a model carries.

    Raises:
        UserError: a model without one. It would take any other for its own, without an error.
    """
    if not isinstance(model.preprocess, Preprocess):
        raise UserError(
            "this model has no preprocessing, which reading and saving need: set "
            "model.preprocess = vitascope.Preprocess(...), as it was trained with"
        )
    return model.preprocess


def default_preprocess(config: ModelConfig) -> Preprocess:
    """Centre crop at the model's size and pixels in [-1, 1], as the original ViT code scales them."""
    half = (0.5,) * config.in_channels
    return Preprocess(image_size=config.image_hw, channels=config.in_channels, mean=half, std=half)


def changed_settings(ours: Preprocess, theirs: Preprocess) -> str:
    """The settings in which another library's preprocessing is not ours, in words; empty if it is equal."""
    words, names = [], [field.name for field in fields(ours)]
    if ours.resize_to is None and theirs.resize_to is not None:
        rows, columns = theirs.resize_to
        words.append(
            f"it resizes to {rows}x{columns} whole pixels and crops these, where ours crops a share of "
            f"{ours.crop_pct:g} in fractions of a pixel"
        )
        names = [
            name for name in names if name not in ("crop_pct", "resize_to", "crop_rounding", "side_rounding")
        ]
    pairs = [(name, getattr(theirs, name), getattr(ours, name)) for name in names]
    return ", ".join([*words, *(f"{name} {other}, not {own}" for name, other, own in pairs if other != own)])


def check_preprocess(preprocess: Preprocess, name: str, image_size: tuple[int, int]) -> None:
    """Reject pictures that are far larger than the model's image size: they would cost gigabytes."""
    limit = max(MAX_ENLARGED * max(image_size), SMALL_PICTURE)
    for rows, columns in (preprocess.image_size, preprocess.resize_to or (0, 0)):
        if not max(rows, columns) <= limit:  # so that NaN fails too
            raise CheckpointError(
                f"{name}: its preprocessing makes pictures of {rows}x{columns} pixels for a model of "
                f"{image_size[0]}x{image_size[1]}, which gets {limit} a side at most; correct the size in "
                "its preprocessing settings"
            )
