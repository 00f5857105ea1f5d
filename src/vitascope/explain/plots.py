"""Pictures, drawn with matplotlib's object interface: no global state, no window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

RIGHT, WRONG, INK, GREY = "#1a7f4b", "#c2352b", "#222222", "#8a8a8a"
SERIES = ("#3457a6", "#d9772b")
HIDDEN = "#d4d4d4"
MAX_GRID = 32
"""Images in a grid."""


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """A figure of a size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=12, color=INK, fontweight="bold")
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white")
    return path


def overlay(
    picture: npt.NDArray[np.uint8], heatmap: npt.NDArray[np.floating[Any]], strength: float = 0.6
) -> npt.NDArray[np.uint8]:
    """A heatmap over a picture: looked-at places keep their light and warm up, the rest goes dark.

    Args:
        picture: uint8 (H, W) or (H, W, 3).
        heatmap: (gh, gw), shown from its own smallest value to its largest; enlarged bilinearly.
        strength: share of the heatmap's colour where it is 1.

    Returns:
        uint8 (H, W, 3).
    """
    rgb = picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=-1)
    size = (rgb.shape[1], rgb.shape[0])
    heat = np.asarray(Image.fromarray(heatmap.astype(np.float32)).resize(size, Image.Resampling.BILINEAR))
    low, high = float(heatmap.min()), float(heatmap.max())
    heat = np.clip((heat - low) / max(high - low, 1e-12), 0, 1)[..., None]  # (H, W, 1)
    colour = colormaps["inferno"](heat[..., 0])[..., :3] * 255
    mixed = rgb * (1 - strength * heat) * (0.35 + 0.65 * heat) + colour * strength * heat
    return np.rint(np.clip(mixed, 0, 255)).astype(np.uint8)


def draw_curves(records: Sequence[dict[str, Any]]) -> Figure:
    """Loss and accuracy by epoch, from the records of `metrics.jsonl`."""
    epochs = [record for record in records if record["kind"] == "epoch"]
    x = [record["epoch"] for record in epochs]
    figure = new_figure(9, 3.4)
    for axes, quantity in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for part, colour in zip(("train", "val"), SERIES, strict=True):
            y = np.array([record[f"{part}_{quantity}"] for record in epochs], dtype=float)
            axes.plot(
                x, y, color=colour, label=f"{part} (last {y[-1]:.3f})", marker="o" if len(x) == 1 else ""
            )
        plain(axes, xlabel="epoch", title=quantity)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.legend(frameon=False)
    return figure


def draw_confusion(confusion: npt.NDArray[np.int64], class_names: Sequence[str], title: str) -> Figure:
    """Counts (K, K), true class down and predicted class across; shades are shares of the true class."""
    K = len(class_names)
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    side = min(12.0, max(4.0, 1.5 + 0.5 * K))
    figure = new_figure(side, side, title)
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if K <= 30:
        for row, column in zip(*np.nonzero(confusion), strict=True):
            colour = "white" if shares[row, column] > 0.5 else WRONG if row != column else INK
            axes.text(
                column, row, str(confusion[row, column]), ha="center", va="center", color=colour, fontsize=9
            )
    if K <= 60:
        axes.set_xticks(
            range(K), class_names, rotation=45 if max(map(len, class_names)) > 2 else 0, ha="center"
        )
        axes.set_yticks(range(K), class_names)
    axes.set(xlabel="predicted", ylabel="true")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def draw_predictions(
    pictures: Sequence[npt.NDArray[np.uint8]],
    truths: Sequence[str],
    guesses: Sequence[str],
    confidences: Sequence[float],
    title: str,
) -> Figure:
    """A grid of pictures under what the model said: right in green, wrong in red with the truth."""
    columns = min(8, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    figure = new_figure(1.45 * columns, 1.8 * rows + 0.4, title)
    for index, axes in enumerate(np.atleast_1d(figure.subplots(rows, columns, squeeze=False).ravel())):
        axes.axis("off")
        if index >= len(pictures):
            continue
        right = truths[index] == guesses[index]
        text = f"{short(guesses[index])} {confidences[index]:.0%}"
        if not right:
            text += f"\nis {short(truths[index])}"
        axes.imshow(pictures[index], cmap="gray", vmin=0, vmax=255)
        axes.set_title(text, color=RIGHT if right else WRONG, fontsize=9)
    return figure


def draw_masked(
    rows: Mapping[str, Sequence[npt.NDArray[np.uint8]]],
    hidden: npt.NDArray[np.bool_],
    replaced: npt.NDArray[np.bool_],
    kept: npt.NDArray[np.bool_],
) -> Figure:
    """Masked patch prediction: a row of pictures for each thing that there is to see, a column an image.

    Args:
        rows: pictures by what they are; those named "given" are marked with what follows.
        hidden: which patches were [mask], (n, gh, gw).
        replaced: which were another patch, (n, gh, gw).
        kept: which were as they are, and asked for all the same, (n, gh, gw).
    """
    n = len(hidden)
    figure = new_figure(1.3 * n + 0.4, 1.3 * len(rows) + 0.9, "Masked patch prediction: what was there?")
    grid = figure.subplots(len(rows), n, squeeze=False)
    for line, (name, pictures) in zip(grid, rows.items(), strict=True):
        line[0].set_ylabel(name, fontsize=11, color=INK)
        for index, (axes, picture) in enumerate(zip(line, pictures, strict=True)):
            axes.imshow(picture, cmap="gray", vmin=0, vmax=255)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if name == "given":
                _cover(axes, hidden[index])
                _frame(axes, replaced[index], SERIES[1])
                _frame(axes, kept[index], RIGHT)
    frames = {"another patch of the image": SERIES[1], "left as it is, but asked for": RIGHT}
    handles = [Patch(facecolor=HIDDEN, label="[mask]")]
    handles += [Patch(facecolor="none", edgecolor=colour, label=text) for text, colour in frames.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return figure


def _cover(axes: Axes, which: npt.NDArray[np.bool_]) -> None:
    """Hide some patches of the picture in the axes; `which` is (gh, gw)."""
    extent = axes.images[0].get_extent()
    axes.imshow(np.where(which[..., None], to_rgba(HIDDEN), 0.0), extent=extent)


def _frame(axes: Axes, which: npt.NDArray[np.bool_], colour: str) -> None:
    """Frame some patches of the picture in the axes; `which` is (gh, gw)."""
    height, width = axes.images[0].get_size()
    ph, pw = height / which.shape[0], width / which.shape[1]
    for row, column in zip(*np.nonzero(which), strict=True):
        corner = (column * pw - 0.5, row * ph - 0.5)
        axes.add_patch(Rectangle(corner, pw, ph, fill=False, edgecolor=colour, linewidth=1.5))


def draw_position_similarity(positions: npt.NDArray[np.floating[Any]], grid: tuple[int, int]) -> Figure:
    """Cosine similarity of each patch's position embedding to all others (paper, figure 7, centre).

    Args:
        positions: (N, D), patches row by row.
        grid: rows and columns; of a large grid, at most 8 x 8 patches are shown.
    """
    unit = positions / np.maximum(np.linalg.norm(positions, axis=1, keepdims=True), 1e-12)
    similarity = (unit @ unit.T).reshape(*grid, *grid)
    shown = [np.unique(np.linspace(0, side - 1, min(side, 8)).round().astype(int)) for side in grid]
    figure = new_figure(
        0.75 * len(shown[1]) + 1.2, 0.75 * len(shown[0]) + 0.9, "Similarity of position embeddings"
    )
    axes = figure.subplots(len(shown[0]), len(shown[1]), squeeze=False)
    for i, row in enumerate(shown[0]):
        for j, column in enumerate(shown[1]):
            drawn = axes[i, j].imshow(similarity[row, column], cmap="viridis", vmin=-1, vmax=1)
            axes[i, j].set(xticks=[], yticks=[])
            if j == 0:
                axes[i, j].set_ylabel(str(row + 1), fontsize=8, color=GREY)
            if i == len(shown[0]) - 1:
                axes[i, j].set_xlabel(str(column + 1), fontsize=8, color=GREY)
    figure.colorbar(drawn, ax=axes, label="cosine similarity", fraction=0.04)
    return figure


def draw_patch_filters(weight: npt.NDArray[np.floating[Any]], count: int = 28) -> Figure:
    """Principal components of the patch embedding's filters (paper, figure 7, left).

    Args:
        weight: (D, C, ph, pw), C = 1 or 3.
        count: components shown, strongest first, where there are as many.
    """
    D, C, ph, pw = weight.shape
    flat = weight.reshape(D, -1)
    _, strengths, components = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    count = min(count, int((strengths > 1e-6 * strengths[0]).sum()), len(components))
    columns = min(7, count)
    figure = new_figure(
        0.95 * columns + 0.4, 0.95 * math.ceil(count / columns) + 0.6, "Patch embedding filters"
    )
    for index, axes in enumerate(figure.subplots(math.ceil(count / columns), columns, squeeze=False).ravel()):
        axes.axis("off")
        if index < count:
            tile = components[index].reshape(C, ph, pw).transpose(1, 2, 0)
            tile = 0.5 + 0.5 * tile / np.abs(tile).max()
            axes.imshow(tile if C == 3 else tile[..., 0], cmap="gray", vmin=0, vmax=1)
    return figure


def draw_explanation(
    picture: npt.NDArray[np.uint8], heatmap: npt.NDArray[np.floating[Any]], title: str
) -> Figure:
    """A picture beside itself under its heatmap."""
    ratio = picture.shape[0] / picture.shape[1]
    figure = new_figure(8, 4 * ratio + 0.6, title)
    left, right = figure.subplots(1, 2)
    left.imshow(picture, cmap="gray", vmin=0, vmax=255)
    right.imshow(overlay(enlarged(picture), heatmap))
    left.axis("off")
    right.axis("off")
    return figure


def enlarged(picture: npt.NDArray[np.uint8], side: int = 256) -> npt.NDArray[np.uint8]:
    """A picture at least `side` pixels high and wide, in whole multiples, so that a heatmap has room."""
    times = max(1, math.ceil(side / min(picture.shape[:2])))
    return picture.repeat(times, axis=0).repeat(times, axis=1)


def plain(axes: Axes, **labels: str) -> None:
    """Two spines, a light grid."""
    axes.set(**labels)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def short(name: str, length: int = 14) -> str:
    """A class name that fits over a small picture."""
    return name if len(name) <= length else name[: length - 1] + "…"
