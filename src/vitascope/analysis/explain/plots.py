"""Figures of explanations, from arrays, with matplotlib's object interface: no global state, no window."""

import dataclasses
import functools
import itertools
import math
import re
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from vitascope.analysis.explain.lettering import LiteralFigure, fitted, lay_out, text_width
from vitascope.analysis.explain.pictures import Box, FloatArray, Picture, Uint8Array, dimmed, overlay

if TYPE_CHECKING:
    from vitascope.analysis.explain.faithfulness.evidence import Evidence

RIGHT, WRONG, INK, GREY = "#1a7f4b", "#c2352b", "#222222", "#8a8a8a"
SERIES = ("#3457a6", "#d9772b")
MAX_GRID = 32
"""Images in a grid."""
MAX_LINES = 5
"""Lines of a caption."""
COMPRESSION = 4
"""zlib's level for PNGs: photographs take half of level 6's time, and 5% more bytes."""
MISSING = "Glyph .* missing from font"
"""Matplotlib's warning of a letter that no font has."""
TITLE_SIZE, BOLD = 12, 1.12
"""Points of a title, and the width of bold letters in normal ones."""
_TILE, _GAP = 96, 6
"""On the sheet of heads, the longer side of the model's part of a picture, and the gap; pixels."""


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """A figure with a size in inches; a title wider than the figure is wrapped."""
    figure = LiteralFigure(figsize=(width, height), layout="constrained", dpi=120, label=title)
    if title:
        letters, lines = len(title), [title]
        while letters > 4 and any(BOLD * text_width(line, TITLE_SIZE) > 0.96 * width for line in lines):
            letters -= 1
            lines = textwrap.wrap(title, letters)
        figure.suptitle("\n".join(lines), fontsize=TITLE_SIZE, color=INK, fontweight="bold")
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG; letters that no font has are boxes, which one line on stderr tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=MISSING)
        lay_out(figure)
        figure.savefig(path, pil_kwargs={"compress_level": COMPRESSION})
    for warning in caught:
        if re.match(MISSING, str(warning.message)):
            _tell_of_boxes()
        else:
            warnings.warn(warning.message, warning.category, stacklevel=2)
    return path


@functools.cache  # once per process
def _tell_of_boxes() -> None:
    print(
        "vitascope: figures have boxes for letters that no installed font has: install Noto Sans CJK "
        "(Debian, Ubuntu: apt install fonts-noto-cjk) or another font of their script, and draw again",
        file=sys.stderr,
    )


@dataclasses.dataclass(frozen=True)
class Caption:
    """The prediction of a picture, with the truth if it differs."""

    guess: str = ""
    """The predicted class, or the predicted classes in one text; empty for a model without classes."""
    confidence: float | None = None
    """The probability of the class; None for several."""
    truth: str | None = None
    note: str = ""

    @property
    def colour(self) -> str:
        """Of the text: whether the prediction is right, if that is known."""
        if self.truth is None:
            return INK
        return RIGHT if self.truth == self.guess else WRONG

    def lines(self) -> "list[CaptionLine]":
        """The lines in the colour of the caption."""
        confidence = "" if self.confidence is None else f" {self.confidence:.0%}"
        lines = [CaptionLine(name=self.guess, after=confidence, colour=self.colour)] if self.guess else []
        if self.truth not in (None, self.guess):
            lines.append(CaptionLine(before="is ", name=str(self.truth), colour=self.colour))
        return lines + [CaptionLine(before=self.note, colour=self.colour)] * bool(self.note)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptionLine:
    """A line of a caption: a class name between other text."""

    before: str = ""
    name: str = ""
    after: str = ""
    colour: str = INK

    def text(self, inches: float, size: float) -> str:
        """The line with at most this width, at a font size in points, by a shorter name."""
        room = inches - text_width(self.before + self.after, size)
        return f"{self.before}{fitted(self.name, room, size)}{self.after}"


@dataclasses.dataclass(frozen=True)
class LabelsCaption:
    """The classes of a picture that may have several: predicted, or missed.

    Attributes:
        right, wrong, missed: names and probabilities of classes that are predicted and apply, are predicted
            and do not apply, apply and are not predicted.
    """

    right: tuple[tuple[str, float], ...] = ()
    wrong: tuple[tuple[str, float], ...] = ()
    missed: tuple[tuple[str, float], ...] = ()

    def lines(self) -> list[CaptionLine]:
        """A line per class, by colour; of many, the mistakes come first."""
        kinds = (("", self.wrong, WRONG), ("missed ", self.missed, SERIES[1]), ("", self.right, RIGHT))
        lines = [
            CaptionLine(before=before, name=name, after=f" {probability:.0%}", colour=colour)
            for before, named, colour in kinds
            for name, probability in named
        ]
        if len(lines) > MAX_LINES:
            rest = len(lines) - MAX_LINES + 1
            lines = [*lines[: MAX_LINES - 1], CaptionLine(before=f"and {rest} more", colour=INK)]
        return lines or [CaptionLine(before="no class", colour=RIGHT)]


def draw_grid(
    pictures: Sequence[Uint8Array], captions: Sequence[Caption] | Sequence[LabelsCaption], title: str
) -> Figure:
    """A grid of pictures, (h, w) or (h, w, 3), each below its caption."""
    ratio = float(np.mean([picture.shape[1] / picture.shape[0] for picture in pictures]))
    columns = min(8 if ratio < 1.5 else 4, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    width, height, size = 1.45 * max(1.0, ratio), 1.45, 9  # inches, inches, points
    line_height = 0.15
    lined = [caption.lines() for caption in captions]
    text_height = 0.05 + line_height * max(1, *map(len, lined))
    figure = new_figure(width * columns, (height + text_height) * rows + 0.4, title)
    axes = figure.subplots()
    for index, (picture, lines) in enumerate(zip(pictures, lined, strict=True)):
        row, column = divmod(index, columns)
        left, top = column * width, row * (height + text_height) + text_height
        place_tile(axes, picture, (left, top, width - 0.06, height - 0.06), cmap="gray", vmin=0, vmax=255)
        place, foot = left + width / 2, top - 0.04
        for colour, same in itertools.groupby(reversed(lines), lambda line: line.colour):  # from below
            block = [line.text(width - 0.18, size) for line in same][::-1]
            axes.text(place, foot, "\n".join(block), color=colour, fontsize=size, ha="center", va="bottom")
            foot -= line_height * len(block)
    axes.set_axis_off()
    axes.set(xlim=(0, width * columns), ylim=((height + text_height) * rows, 0))
    return figure


def draw_similar(
    picture: Uint8Array | None,
    name: str,
    similar: Sequence[Uint8Array | None],
    captions: Sequence[tuple[str, str]],
    title: str,
) -> Figure:
    """A picture over its name, beside a grid of similar ones, each over its similarity and its label; without
    the picture the grid alone.

    Pictures are (h, w) or (h, w, 3); None leaves a place empty.
    """
    shown = [tile for tile in similar if tile is not None]
    ratio = float(np.mean([tile.shape[1] / tile.shape[0] for tile in shown])) if shown else 1.0
    rows = math.ceil(len(similar) / (6 if len(similar) <= 24 else 10))
    columns = math.ceil(len(similar) / rows)
    width, height, text_height = 1.45 * min(2.0, max(1.0, ratio)), 1.45, 0.5  # inches
    times = min(2, rows)  # as large is the picture
    start = times * width + 0.25 if picture is not None else 0.0
    across, down = start + width * columns, (height + text_height) * rows
    figure = new_figure(max(4.5, across), down, title)
    lines = figure.get_suptitle().count("\n") + 1
    figure.set_figheight(down + 0.2 * lines + 0.2)
    axes = figure.subplots()
    if picture is not None:
        axes.axvline(start - 0.15, color=GREY, linewidth=0.75)
        side = min(times * width - 0.06, times * height + text_height) if times > 1 else height
        _place_above(axes, picture, (0, 0, times * width - 0.06, side), [CaptionLine(name=name)])
    for index, (tile, (similarity, label)) in enumerate(zip(similar, captions, strict=True)):
        row, column = divmod(index, columns)
        box = (start + column * width, row * (height + text_height), width - 0.06, height)
        _place_above(axes, tile, box, [CaptionLine(after=similarity), CaptionLine(name=label)])
    axes.set_axis_off()
    axes.set(xlim=(0, across), ylim=(down, 0), aspect="equal")
    return figure


def _place_above(
    axes: Axes,
    tile: Uint8Array | None,
    box: tuple[float, float, float, float],
    lines: Sequence[CaptionLine],
) -> None:
    """Draw a tile in a box (left, top, width, height) of the axes, in inches, and lines below the box."""
    left, top, width, height = box
    middle, size = left + width / 2, 9
    if tile is None:
        axes.add_patch(
            Rectangle((left, top), width, height, facecolor="none", edgecolor=GREY, linewidth=0.75)
        )
        text = axes.text(middle, top + height / 2, "no picture", color=GREY, fontsize=size)
        text.set(ha="center", va="center")
    else:
        place_tile(axes, tile, box, cmap="gray", vmin=0, vmax=255)
    caption = "\n".join(line.text(width - 0.12, size) for line in lines)
    axes.text(middle, top + height + 0.05, caption, color=INK, fontsize=size, ha="center", va="top")


def place_tile(
    axes: Axes, tile: npt.NDArray[Any], box: tuple[float, float, float, float], **scale: Any
) -> AxesImage:
    """Draw a tile, (h, w) or (h, w, 3), in the middle of a box (left, top, width, height) of the axes."""
    # Many tiles in the same axes draw many times faster than one axes each.
    left, top, width, height = box
    size = min(width / tile.shape[1], height / tile.shape[0])
    across, down = left + width / 2, top + height / 2
    w, h = tile.shape[1] * size / 2, tile.shape[0] * size / 2
    return axes.imshow(tile, extent=(across - w, across + w, down + h, down - h), **scale)


def frame_patches(axes: Axes, which: npt.NDArray[np.bool_], colour: str, box: Box | None = None) -> None:
    """Frame some patches of the picture in the axes; `which` is (gh, gw). `box` is the part with the patches,
    in pixels; None is all of the picture."""
    height, width = axes.images[0].get_size()
    left, top, right, bottom = box or (0, 0, width, height)
    ph, pw = (bottom - top) / which.shape[0], (right - left) / which.shape[1]
    for row, column in zip(*np.nonzero(which), strict=True):
        corner = (left + column * pw - 0.5, top + row * ph - 0.5)
        axes.add_patch(Rectangle(corner, pw, ph, fill=False, edgecolor=colour, linewidth=1.5))


def draw_explanation(
    picture: Picture, heatmap: FloatArray, title: str, note: str = "", evidence: "Evidence | None" = None
) -> Figure:
    """A picture beside itself under its heatmap (gh, gw), a note across it, and the evidence for it."""
    columns = 2 if evidence is None else 3
    figure = new_figure(4 * columns, max(3 * (columns - 2), 4 * picture.height / picture.width) + 0.6, title)
    left, right, *beside = figure.subplots(1, columns)
    left.imshow(dimmed(picture), cmap="gray", vmin=0, vmax=255)
    right.imshow(overlay(picture.enlarged(), heatmap))
    _write_across(right, note, 12)
    left.axis("off")
    right.axis("off")
    if evidence is not None:
        _draw_evidence(beside[0], evidence)
    return figure


def _draw_evidence(axes: Axes, evidence: "Evidence") -> None:
    """The deletion curve of a map, over the middle 95% and the mean of the curves of random maps."""
    x, random = 100 * evidence.shares, 100 * evidence.random
    low, high = np.quantile(random, (0.025, 0.975), axis=0)
    axes.fill_between(x, low, high, color=GREY, alpha=0.3, linewidth=0, label="95% of random maps")
    axes.plot(x, random.mean(axis=0), color=GREY, linestyle="--", linewidth=1, label="their mean")
    axes.plot(x, 100 * evidence.curve, color=SERIES[0], linewidth=2, label="this map")
    plain(axes, xlabel="cells deleted, hottest first (%)", ylabel="probability of the class (%)")
    axes.set(xlim=(0, 100), ylim=(0, None))
    axes.legend(frameon=False, fontsize=9)


def draw_explanations(
    picture: Picture, heatmaps: Mapping[str, FloatArray], title: str, notes: Mapping[str, str] | None = None
) -> Figure:
    """A picture, and the same under each heatmap (gh, gw), by the method's name, some with a note across."""
    panels = {"picture": dimmed(picture)}
    panels |= {name: overlay(picture.enlarged(), heatmap) for name, heatmap in heatmaps.items()}
    rows = math.ceil(len(panels) / 4)
    columns = math.ceil(len(panels) / rows)
    inches = 2.2 / max(picture.height, picture.width)  # of a pixel
    height, width = picture.height * inches, picture.width * inches
    figure = new_figure(max(1.6, width) * columns, (height + 0.3) * rows + 0.4, title)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid:
        axes.axis("off")
    for axes, (name, panel) in zip(grid, panels.items(), strict=False):  # the last row may have gaps
        axes.imshow(panel, cmap="gray", vmin=0, vmax=255)
        axes.set_title(name, fontsize=10, color=INK)
        _write_across(axes, (notes or {}).get(name, ""), 8)
    return figure


def _write_across(axes: Axes, note: str, size: float) -> None:
    if note:
        lines = "\n".join(textwrap.wrap(note, 22))
        text = axes.text(0.5, 0.5, lines, transform=axes.transAxes, ha="center", va="center", fontsize=size)
        text.set(color="white", bbox={"facecolor": INK, "edgecolor": "none", "alpha": 0.75})
        text.set_in_layout(False)


def draw_position_similarity(similarity: FloatArray) -> Figure:
    """Similarity (gh, gw, gh, gw) of position embeddings (paper, figure 7, centre), for at most 8 x 8."""
    rows, columns = (
        np.unique(np.linspace(0, side - 1, min(side, 8)).round().astype(int)) for side in similarity.shape[:2]
    )
    width, height = max(4.0, 0.75 * len(columns) + 1.6), max(2.4, 0.75 * len(rows) + 1.2)
    figure = new_figure(width, height, "Similarity of position embeddings")
    axes = figure.subplots()
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            tile = similarity[row, column]
            drawn = place_tile(axes, tile, (j, i, 0.94, 0.94), cmap="viridis", vmin=-1, vmax=1)
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    axes.set_xticks(np.arange(len(columns)) + 0.47, [str(column) for column in columns])
    axes.set_yticks(np.arange(len(rows)) + 0.47, [str(row) for row in rows])
    axes.tick_params(length=0, labelsize=9, labelcolor=GREY)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("column of the patch", fontsize=10, color=INK)
    axes.set_ylabel("row of the patch", fontsize=10, color=INK)
    figure.colorbar(drawn, ax=axes, label="cosine similarity to each patch", fraction=0.05)
    return figure


def draw_patch_filters(components: FloatArray, shares: FloatArray) -> Figure:
    """Filters' components (k, C, ph, pw), each on its own scale, with shares (k,) (paper, figure 7, left)."""
    count = len(components)
    columns = min(7, count)
    rows = math.ceil(count / columns)
    title = f"Patch embedding filters: first {count} principal components, {shares.sum():.0%} of the variance"
    figure = new_figure(max(4.0, 0.95 * columns + 0.4), 0.95 * rows + 0.9, title)
    axes = figure.subplots()
    for index, component in enumerate(components):
        row, column = divmod(index, columns)
        tile = component.transpose(1, 2, 0)  # (ph, pw, C)
        tile = 0.5 + 0.5 * tile / np.abs(tile).max()
        tile = tile if tile.shape[2] == 3 else tile[..., 0]
        place_tile(axes, tile, (column, row, 0.94, 0.94), cmap="gray", vmin=0, vmax=1)
    axes.set_axis_off()
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    return figure


def draw_attention_distance(
    distances: FloatArray, uniform: float, title: str = "Mean attention distance"
) -> Figure:
    """Attention distances (depth, heads) beside uniform attention's, pixels (paper, figure 7, right)."""
    depth, heads = distances.shape
    layers = np.arange(depth)
    figure = new_figure(7, 4.2, title)
    axes = figure.subplots()
    axes.axhline(uniform, color=GREY, linestyle="--", linewidth=1, label="uniform attention")
    dots = axes.plot(layers.repeat(heads), distances.ravel(), "o", color=SERIES[0], label="one head")[0]
    dots.set(alpha=0.65, markeredgewidth=0)
    averages = [row[~np.isnan(row)].mean() if not np.isnan(row).all() else np.nan for row in distances]
    axes.plot(layers, averages, color=SERIES[1], linewidth=1.5, label="mean of the heads")
    plain(axes, xlabel="layer", ylabel="mean attention distance (pixels)")
    axes.set_xlim(-0.5, depth - 0.5)
    axes.set_ylim(0, 1.1 * np.nanmax([uniform, *distances.ravel()]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_heads(picture: Picture, maps: FloatArray, title: str = "Attention of each head") -> Figure:
    """A picture under maps (depth, heads, gh, gw): layers down, heads across."""
    depth, heads = maps.shape[:2]
    left, top, right, bottom = picture.box
    scale = _TILE / max(right - left, bottom - top)
    height, width = (max(1, round(side * scale)) for side in (picture.height, picture.width))
    small = picture.resized(height, width)
    th, tw = height + _GAP, width + _GAP
    sheet = np.full((depth * th - _GAP, heads * tw - _GAP, 3), 255, dtype=np.uint8)
    for layer, row in enumerate(maps):
        for head, heatmap in enumerate(row):
            y, x = layer * th, head * tw
            sheet[y : y + height, x : x + width] = overlay(small, heatmap)
    inches = min(12.0, max(4.0, 0.75 * heads * width / min(height, width) + 0.9))
    figure = new_figure(inches, (inches - 0.9) * sheet.shape[0] / sheet.shape[1] + 1.0, title)
    axes = figure.subplots()
    axes.imshow(sheet)  # one image: matplotlib takes a minute for hundreds of axes
    axes.set_xticks((np.arange(heads) + 0.5) * tw - _GAP / 2, [str(head) for head in range(heads)])
    axes.set_yticks((np.arange(depth) + 0.5) * th - _GAP / 2, [str(layer) for layer in range(depth)])
    axes.set(xlabel="head", ylabel="layer")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def draw_feature_colours(
    pictures: Sequence[Picture],
    colours: FloatArray,
    title: str = "Similar features have similar colours",
) -> Figure:
    """Pictures, each above its patches' colours (n, gh, gw, 3) in [0, 1], which lie where the patches are."""
    n = len(pictures)
    lines = math.ceil(n / 8)
    columns = math.ceil(n / lines)
    tallest = max(picture.height / picture.width for picture in pictures)
    side = min(2.5, max(1.25, 7.5 / columns))  # inches across; a few pictures are larger
    figure = new_figure(max(4.5, side * columns), 2 * lines * side * tallest + 0.6, title)
    grid = figure.subplots(2 * lines, columns, squeeze=False)
    for axes in grid.ravel():
        axes.axis("off")
    for index, (picture, patches) in enumerate(zip(pictures, colours, strict=True)):
        line, column = divmod(index, columns)
        left, top, right, bottom = picture.box
        grid[2 * line, column].imshow(dimmed(picture), cmap="gray", vmin=0, vmax=255)
        below = grid[2 * line + 1, column]
        below.imshow(patches, extent=(left, right, bottom, top), interpolation="nearest")
        below.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    return figure


def plain(axes: Axes, **labels: str) -> None:
    """Label axes; draw only two spines, and a light grid."""
    axes.set(**labels)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
