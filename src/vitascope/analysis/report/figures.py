"""The figures of a finished run, as PNGs in its folder."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vitascope.analysis.explain import plots
from vitascope.analysis.explain.figures import draw_filters, draw_positions
from vitascope.analysis.explain.pictures import dimmed, to_picture
from vitascope.analysis.report.charts import draw_confusion, draw_curves, draw_precision_recall, kept_place
from vitascope.analysis.report.thumbnails import attention_over, framed, picture_of
from vitascope.data.label_measures import LabelScore, mistake_confidences
from vitascope.data.measures import surest
from vitascope.data.splits import ImageSet
from vitascope.models.patches import ConvPatches
from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer
from vitascope.storage import replacing
from vitascope.training.evaluation.measure import Evaluation
from vitascope.training.run.predictions import Predictions
from vitascope.training.run.run import Run
from vitascope.training.tasks.task import PatchEvaluation, PatchPictures

HIDDEN = "#d4d4d4"
"""Colour of [mask]."""
TILE = 320
"""Longer side of a picture in a grid, in pixels; it is drawn with about half of them."""


def draw_tested(
    run: Run, model: VisionModel, images: ImageSet, tested: Evaluation | PatchEvaluation
) -> dict[str, Path]:
    """Draw the figures of a model that was tested on images; returns the paths by name."""
    if isinstance(tested, PatchEvaluation):
        return draw_masked_patches(run, tested.pictures)
    return draw_figures(run, model, images.subset(tested.split, tested.indices), tested)


def draw_figures(run: Run, model: VisionModel, images: ImageSet, predictions: Predictions) -> dict[str, Path]:
    """Draw the figures of a finished classifier; returns the paths by name.

    `images` are those of the predictions, in their order. One that cannot be read is an `ImageError`.
    """
    epochs, score = run.records("epoch"), predictions.score
    figures = {}
    if epochs:
        figures["curves"] = draw_curves(epochs, run.records("step"), kept_place(run, epochs))
    if isinstance(score, LabelScore):
        new = partial(plots.new_figure, title=f"{images.name}: {score.result()}")
        answers = predictions.labels, predictions.answers, predictions.scored
        confidences: npt.NDArray[np.floating] = mistake_confidences(*answers)
        meaning = ": right (green), wrong (red), missed (orange)"
        figures["precision_recall"] = draw_precision_recall(predictions, score, new=new)
    else:
        title = (
            f"{images.name}: {score.right / score.total:.2%} of {len(images)} correct "
            f"(most frequent class: {score.guessed:.2%})"
        )
        new = partial(plots.new_figure, title=title)
        confidences, meaning = predictions.confidences, ""
        figures["confusion"] = draw_confusion(predictions.confusion, images.class_names, new=new)

    chosen = choose_shown(predictions.correct, confidences).tolist()
    pictured = {index: framed(model, images.sources[index], TILE) for index in chosen}
    captions = _captions(predictions, chosen)
    pictures = [dimmed(picture) for picture in map(picture_of, pictured.values())]
    figures["predictions"] = plots.draw_grid(pictures, captions, f"{images.name} predictions{meaning}")
    if isinstance(model, VisionTransformer):
        seen = list(attention_over(model, pictured).values())
        figures["attention"] = plots.draw_grid(seen, captions, "the same under attention rollout")
        figures |= draw_embedding(model)
    return _save(run, figures)


def _captions(
    predictions: Predictions, places: Sequence[int]
) -> list[plots.Caption] | list[plots.LabelsCaption]:
    """The predictions at some places beside the truth."""
    names, probabilities = predictions.class_names, predictions.probabilities
    if not predictions.several:
        guesses, truths = predictions.classes, predictions.labels
        return [
            plots.Caption(names[guesses[place]], float(probabilities[place].max()), names[truths[place]])
            for place in places
        ]
    kinds = (
        predictions.labels & predictions.answers,
        ~predictions.labels & predictions.answers,
        predictions.labels & ~predictions.answers,
    )

    def named(place: int, kind: npt.NDArray[np.bool_]) -> tuple[tuple[str, float], ...]:
        order = np.argsort(-probabilities[place], kind="stable")
        return tuple((names[k], float(probabilities[place, k])) for k in order if kind[place, k])

    return [plots.LabelsCaption(*(named(place, kind) for kind in kinds)) for place in places]


def draw_embedding(model: VisionTransformer) -> dict[str, Figure]:
    """Learned parts of equation 1: `positions` and `filters`, as far as the model has them."""
    figures: dict[str, Figure] = {}
    if model.positions.table(model.config.grid) is not None:
        figures["positions"] = draw_positions(model)
    if model.config.in_channels in (1, 3) and isinstance(model.patch_embedding, ConvPatches):
        figures["filters"] = draw_filters(model)
    return figures


def choose_shown(
    correct: npt.NDArray[np.bool_], confidences: npt.NDArray[np.floating], count: int = plots.MAX_GRID
) -> npt.NDArray[np.int64]:
    """Indices of images to show: spread evenly over the set, but up to a quarter are mistakes, surest first.

    An even choice alone would hide the mistakes of a good model; the title gives the true share. `correct`
    and `confidences` are of the predictions, (N,).
    """
    wrong = surest(confidences, ~correct, count // 4)
    rest = np.setdiff1d(np.arange(len(correct)), wrong)
    rest = rest[np.unique(np.linspace(0, len(rest) - 1, min(count - len(wrong), len(rest))).astype(int))]
    return np.concatenate([rest, wrong]).astype(np.int64)


def draw_masked_patches(run: Run, pictures: PatchPictures) -> dict[str, Path]:
    """Draw the figure `masked`; returns its path by its name. Corrupted patches are marked in "given"."""
    rows, hidden, replaced, kept = pictures
    n = len(hidden)
    title = "Masked patch prediction: what was there?"
    figure = plots.new_figure(1.3 * n + 0.4, 1.3 * len(rows) + 0.9, title)
    for line, (name, pixels) in zip(figure.subplots(len(rows), n, squeeze=False), rows.items(), strict=True):
        line[0].set_ylabel(name, fontsize=11, color=plots.INK)
        for index, axes in enumerate(line):
            axes.imshow(to_picture(pixels[index]), cmap="gray", vmin=0, vmax=255)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if name == "given":
                cover = np.where(hidden[index][..., None], to_rgba(HIDDEN), 0.0)  # (gh, gw, 4)
                axes.imshow(cover, extent=axes.images[0].get_extent())
                plots.frame_patches(axes, replaced[index], plots.SERIES[1])
                plots.frame_patches(axes, kept[index], plots.RIGHT)
    handles = [Patch(facecolor=HIDDEN, label="[mask]")]
    frames = (
        ("another patch of the image", plots.SERIES[1], replaced),
        ("unchanged, but predicted", plots.RIGHT, kept),
    )
    handles += [Patch(fc="none", ec=colour, label=text) for text, colour, where in frames if where.any()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return _save(run, {"masked": figure})


def _save(run: Run, figures: Mapping[str, Figure]) -> dict[str, Path]:
    run.figures.mkdir(parents=True, exist_ok=True)
    paths = {name: run.figures / f"{name}.png" for name in figures}
    for name, figure in figures.items():
        with replacing(paths[name]) as aside:
            plots.save_figure(figure, aside)
    return paths
