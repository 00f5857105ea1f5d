"""Figures of a model's explanations, from the model and pictures: what `vitascope explain` draws."""

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitascope.analysis.explain import learned, plots
from vitascope.analysis.explain.attention import attending, head_maps, patch_attention
from vitascope.analysis.explain.inputs import normalized, pooled_and_logits, seen_hw
from vitascope.analysis.explain.methods import (
    DEFAULT_METHOD,
    METHODS,
    Method,
    check_settings,
    heatmap,
    methods_for,
)
from vitascope.analysis.explain.pictures import FloatArray, Picture, beside_itself, to_picture
from vitascope.analysis.explain.targets import ClassDifference, FeatureCosine, TargetLike
from vitascope.arguments import checked
from vitascope.data.reading import Faults, readable
from vitascope.data.stored import as_pictures
from vitascope.errors import UserError, printable
from vitascope.models.decoding import ImageSource
from vitascope.models.heads import predicted, scores
from vitascope.models.preprocess import Pixels
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.preprocess import preprocess_of

log = logging.getLogger(__name__)

SEPARATOR, NONE = "; ", "none"
"""Between the classes of a picture, and for a picture of no class."""
TITLED = 4
"""Classes of a picture that a title names."""
ONE_OF_SEVERAL = 320
"""Longer side of a picture in a figure of several, in pixels."""


_TAKES = {"nothing": "the model alone", "one": "one picture", "some": "one picture or more"}


@dataclasses.dataclass(frozen=True)
class _Picture:
    """A picture as the model gets it, and as people see it."""

    name: str
    image: Tensor
    """Normalized floats (1, C, H, W)."""
    shown: Picture
    truth: str | None


@checked
def draw(
    model: VisionModel,
    pictures: Any = None,
    method: str = DEFAULT_METHOD,
    target: TargetLike = None,
    *,
    truths: Sequence[str | Sequence[str]] | None = None,
    kind: str = "picture",
    evidence: bool = False,
    **settings: Any,
) -> Figure:
    """Draw an explanation of pictures, or of the model.

    A heatmap or the features of several pictures become a grid; pictures that cannot be read are left out of
    it, with a warning. Save the figure with `Figure.savefig`; its title is `Figure.get_label()`.

    Args:
        pictures: one or many: paths, encoded bytes, Pillow images, or uint8 arrays.
        method: one of `METHODS`, or one of `VIEWS`: of one picture `all` heatmaps, the attention of all
            `heads` or of one `patch`; of one or many its `features`; of many the attention `distance`; of the
            model alone `positions` and `filters`.
        target: what heatmaps explain, see `TargetLike`; None is the most probable class.
        truths: the true class of each picture or, with several classes per picture, their names; shown where
            the prediction differs.
        kind: what several pictures are called in the title, in the singular.
        evidence: draw the deletion curve of one picture's heatmap beside it, see `explain.evidence`.
        settings: the method's own, such as `layer`, `head`, `fusion`, `discard` or `patch`.

    Raises:
        UserError: an unknown method or setting; another number of pictures than the method takes; a picture
            that cannot be read; as the method, and as `evidence`.
    """
    check_method(method, [*settings, *(["target"] if target is not None else [])])
    view = VIEWS.get(method)
    if evidence and view is not None:
        raise UserError(f"evidence is about a heatmap, and {method} is none: choose {', '.join(METHODS)}")
    takes = view.takes if view is not None else "one" if evidence else "some"
    if takes == "nothing" and pictures is None:
        assert view is not None
        return view.draw(model)
    read = []
    if takes != "nothing" and pictures is not None:
        read = _read(model, pictures, truths, are_shown=view is None or view.shows_pictures)
    if not read or (takes == "one" and len(read) > 1):
        count = f"not {len(read)} that can be read" if takes != "nothing" else "leave out the pictures"
        raise UserError(f"{method}{' with evidence' * evidence} is of {_TAKES[takes]}: {count}")
    single = len(read) == 1 and (truths is None or evidence)
    subject = read[0].name if single else f"{len(read)} {kind}{'s' * (len(read) > 1)}"
    if view is not None:
        return view.draw(model, read, subject, **settings | ({} if target is None else {"target": target}))
    maps = [heatmap(model, picture.image, method, target, **settings)[0].cpu().numpy() for picture in read]
    pairs = list(zip(read, maps, strict=True))
    notes = [_note(model, picture, METHODS[method], target, heat) for picture, heat in pairs]
    options = "".join(f", {name} {value}" for name, value in settings.items())
    default = _about_default(model, read) if target is None and METHODS[method].has_target else ""
    title = METHODS[method].title + options + _about(model, target) + default
    if single:
        title = _with_prediction(model, read[0], subject, title)
        if not evidence:
            return plots.draw_explanation(read[0].shown, maps[0], title, notes[0])
        from vitascope.analysis.explain.faithfulness.evidence import evidence as measure  # imports SciPy

        measured = measure(model, read[0].image, maps[0], target)
        return plots.draw_explanation(read[0].shown, maps[0], f"{title}, {measured}", notes[0], measured)
    captions = [_caption(model, picture, note) for picture, note in zip(read, notes, strict=True)]
    tiles = [beside_itself(picture.shown, heat) for picture, heat in pairs]
    return plots.draw_grid(tiles, captions, f"{title} over {subject}")


def check_method(method: str, given: Sequence[str]) -> None:
    """Reject an unknown method for `draw`, and settings that do not apply to it."""
    check_settings(method, given, {name: view.settings for name, view in VIEWS.items()})


def _read(
    model: VisionModel, pictures: Any, truths: Sequence[str | Sequence[str]] | None, *, are_shown: bool
) -> list[_Picture]:
    """Read the pictures; unreadable ones of several are left out. Only the model's pixels are kept if none
    is shown, because thousands of photographs may not fit into memory."""
    preprocess = preprocess_of(model)
    seen = seen_hw(model, preprocess.image_size)
    sources = as_pictures(pictures)
    limit = () if len(sources) == 1 else (ONE_OF_SEVERAL,)
    faults, read = Faults(len(sources)), []

    def picture_of(source: ImageSource) -> tuple[Pixels, Picture]:
        if are_shown:
            pixels, picture, box = preprocess.framed(source, *limit).top_left(*seen)
            return pixels, Picture.of_channels(picture, box)
        pixels = preprocess.pixels(source)
        return pixels, Picture.whole(to_picture(pixels))

    for index, (pixels, shown) in readable(picture_of, sources, faults):
        source = sources[index]
        name = Path(source).name if isinstance(source, str | os.PathLike) else "the picture"
        truth = None if truths is None else _in_one(model, truths[index])
        image = normalized(model, torch.from_numpy(pixels)[None])
        read.append(_Picture(name, image, shown, truth))
    if len(sources) == 1:
        faults.check_some()
    for reason in faults.left_out:
        log.warning("left out: %s", reason)
    return read


def _draw_all(
    model: VisionModel, pictures: Sequence[_Picture], subject: str, target: TargetLike = None
) -> Figure:
    (picture,) = pictures
    methods = methods_for(model, target).values()
    heatmaps = {method.title: method(model, picture.image, target)[0].cpu().numpy() for method in methods}
    notes = {
        method.title: _note(model, picture, method, target, heatmaps[method.title]) for method in methods
    }
    about = _about_default(model, pictures) if target is None else _about(model, target)
    title = _with_prediction(model, picture, subject, f"every method{about}")
    return plots.draw_explanations(picture.shown, heatmaps, title, notes)


def _draw_heads(model: VisionModel, pictures: Sequence[_Picture], subject: str) -> Figure:
    (picture,) = pictures
    maps = head_maps(model, picture.image)[0].cpu().numpy()
    return plots.draw_heads(picture.shown, maps, f"Attention of each head in {subject}")


def _draw_patch(
    model: VisionModel,
    pictures: Sequence[_Picture],
    subject: str,
    patch: tuple[int, int] | None = None,
    layer: int = -1,
    head: int | None = None,
) -> Figure:
    """The attention of one patch; by default of the one in the middle, in the last layer."""
    (picture,) = pictures
    gh, gw = attending(model).grid_of(picture.image)
    row, column = patch or (gh // 2, gw // 2)
    heat = patch_attention(model, picture.image, (row, column), layer, head)[0].cpu().numpy()
    heads = "all heads" if head is None else f"head {head}"
    title = f"Attention of the patch in row {row}, column {column}: layer {layer}, {heads}"
    figure = plots.draw_explanation(picture.shown, heat, title)
    marked = np.zeros((gh, gw), dtype=bool)
    marked[row, column] = True
    plots.frame_patches(figure.axes[0], marked, plots.SERIES[1], picture.shown.box)
    return figure


def _draw_features(model: VisionModel, pictures: Sequence[_Picture], subject: str, layer: int = -1) -> Figure:
    colours = learned.feature_colours(model, torch.cat([picture.image for picture in pictures]), layer)
    title = f"Similar features have similar colours: {subject}"
    return plots.draw_feature_colours([picture.shown for picture in pictures], colours.cpu().numpy(), title)


def _draw_distance(model: VisionModel, pictures: Sequence[_Picture], subject: str) -> Figure:
    images = torch.cat([picture.image for picture in pictures])
    distances = learned.attention_distance(model, images).cpu().numpy()
    title = f"Mean attention distance over {subject}"
    return plots.draw_attention_distance(distances, learned.uniform_distance(model, images), title)


def draw_positions(model: VisionModel) -> Figure:
    """The similarity of the position embeddings; raises as `position_similarity`."""
    return plots.draw_position_similarity(learned.position_similarity(model).cpu().numpy())


def draw_filters(model: VisionModel) -> Figure:
    """The filters of the patch embedding; raises as `patch_filters`."""
    filters = learned.patch_filters(model)
    return plots.draw_patch_filters(filters.components.cpu().numpy(), filters.shares.cpu().numpy())


@dataclasses.dataclass(frozen=True)
class View:
    """A figure other than one method's heatmap."""

    draw: Callable[..., Figure]
    takes: Literal["nothing", "one", "some"]
    """The number of pictures."""
    settings: tuple[str, ...] = ()
    shows_pictures: bool = True


VIEWS = {
    "all": View(_draw_all, "one", ("target",)),
    "heads": View(_draw_heads, "one"),
    "patch": View(_draw_patch, "one", ("patch", "layer", "head")),
    "features": View(_draw_features, "some", ("layer",)),
    "distance": View(_draw_distance, "some", shows_pictures=False),
    "positions": View(draw_positions, "nothing"),
    "filters": View(draw_filters, "nothing"),
}
"""The figures that `draw` adds to the heatmaps of `METHODS`."""


def _guesses(model: VisionModel, picture: _Picture) -> list[tuple[str, float]]:
    """The predicted classes with their probabilities, in the order of the model's classes: one, or all that
    reach their thresholds."""
    config = model.config
    probabilities = scores(pooled_and_logits(model, picture.image)[1], config.outputs)  # (1, K)
    if thresholds := config.decision_thresholds:
        applies = probabilities[0].cpu() >= torch.tensor(thresholds)  # (K,)
        indices = applies.nonzero()[:, 0].tolist()
    else:
        indices = predicted(probabilities).tolist()
    return [(_class_name(model, index), float(probabilities[0, index])) for index in indices]


def _most_probable(model: VisionModel, picture: _Picture) -> str:
    return _class_name(model, int(predicted(pooled_and_logits(model, picture.image)[1])))


def _in_one(model: VisionModel, names: str | Sequence[str]) -> str:
    """A class, or several in the order of the model's classes, as one text."""
    if isinstance(names, str):
        return _printed(names)
    order = {_printed(name): place for place, name in enumerate(model.config.class_names)}
    shown = sorted(map(_printed, names), key=lambda name: order.get(name, len(order)))
    return SEPARATOR.join(shown) or NONE


def _caption(model: VisionModel, picture: _Picture, note: str) -> plots.Caption:
    """The prediction, if the model has classes, and whether a note says that there is no evidence for it."""
    if not model.config.gives_classes:
        return plots.Caption(note=note)
    guesses = _guesses(model, picture)
    confidence = None if model.config.decision_thresholds else guesses[0][1]
    shown = _in_one(model, [name for name, _ in guesses])
    return plots.Caption(shown, confidence, picture.truth, note and "no evidence")


def _class_name(model: VisionModel, index: int) -> str:
    """A class's name, or its number without names."""
    names = model.config.class_names
    return _printed(names[index]) if names else str(index)


def _printed(name: str) -> str:
    """A class's name in a figure; the same for the prediction and the truth, which are compared."""
    return printable(name, 80)


def _with_prediction(model: VisionModel, picture: _Picture, subject: str, what: str) -> str:
    """A title that begins with the prediction, if the model has classes."""
    if not model.config.gives_classes:
        return f"{what} over {subject}"
    guesses = [f"{name} ({score:.0%})" for name, score in _guesses(model, picture)]
    shown = guesses[:TITLED] + ["..."] * (len(guesses) > TITLED)
    return f"{', '.join(shown) or 'none of the classes'}: {what}"


def _note(
    model: VisionModel, picture: _Picture, method: Method, target: TargetLike, heatmap: FloatArray
) -> str:
    """The sentence for a heatmap that is zero everywhere; empty for any other."""
    if heatmap.any():
        return ""
    default = _most_probable(model, picture) if method.has_target else ""
    about = _about(model, target).removeprefix(" of ") or default
    where = " at this layer" if "layer" in method.settings else ""
    return f"no evidence{about and f' for {about}'}{where}"


def _about_default(model: VisionModel, pictures: Sequence[_Picture]) -> str:
    """The default target where pictures may have several classes, which do not tell which one it is."""
    if not model.config.decision_thresholds:
        return ""
    return (
        f" of {_most_probable(model, pictures[0])}" if len(pictures) == 1 else " of the most probable class"
    )


def _about(model: VisionModel, target: TargetLike) -> str:
    """The target, unless it is the predicted class."""
    if isinstance(target, ClassDifference):
        ours, theirs = (_class_name(model, int(part[0])) for part in (target.classes, target.versus))
        return f" of {ours}, not {theirs}"
    if isinstance(target, FeatureCosine):
        return " of the likeness"
    if isinstance(target, str):
        return f" of {printable(target, 80)}"
    return f" of {_class_name(model, target)}" if isinstance(target, int) else ""
