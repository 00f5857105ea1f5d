"""Figures of explanations, from arrays, with matplotlib's object interface: no global state, no window."""

from __future__ import annotations

import functools
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps, font_manager
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from PIL import Image

Uint8Array = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.floating[Any]]

RIGHT, WRONG, INK, GREY = "#1a7f4b", "#c2352b", "#222222", "#8a8a8a"
SERIES = ("#3457a6", "#d9772b")
MAX_GRID = 32
"""Images in a grid."""
TITLE_LETTER = 0.105
"""The approximate width of a letter of a title, in inches."""
CODE_POINT = re.compile(r"U\+[0-9A-F]{4}")
NOTE = "No installed font has the characters shown as U+…; install one, such as Noto Sans, and draw again."
_TILE, _GAP = 96, 6
"""The longer side of each picture on the sheet of heads, and the gap between two, in pixels."""


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """A figure with a size in inches; a title wider than the figure is wrapped."""
    figure = LiteralFigure(figsize=(width, height), layout="constrained", dpi=120, label=title)
    if title:
        lines = textwrap.wrap(title, max(20, int(width / TITLE_LETTER)))
        figure.suptitle("\n".join(lines), fontsize=12, color=INK, fontweight="bold")
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def to_picture(pixels: Uint8Array) -> Uint8Array:
    """(C, H, W) as matplotlib draws it: (H, W) for one channel, (H, W, 3) for three."""
    return pixels[0] if pixels.shape[0] == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))


def overlay(picture: Uint8Array, heatmap: FloatArray, strength: float = 0.6) -> Uint8Array:
    """A picture, uint8 (H, W) or (H, W, 3), under a heatmap (gh, gw): uint8 (H, W, 3)."""
    rgb = picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=-1)
    size = (rgb.shape[1], rgb.shape[0])
    heat = np.asarray(Image.fromarray(heatmap.astype(np.float32)).resize(size, Image.Resampling.BILINEAR))
    low, high = float(heatmap.min()), float(heatmap.max())
    heat = np.clip((heat - low) / max(high - low, 1e-12), 0, 1)[..., None]  # (H, W, 1)
    colour = colormaps["inferno"](heat[..., 0])[..., :3] * 255
    mixed = rgb * (1 - strength * heat) * (0.35 + 0.65 * heat) + colour * strength * heat
    return np.rint(np.clip(mixed, 0, 255)).astype(np.uint8)


def caption(guess: str, confidence: float, truth: str | None) -> tuple[str, str]:
    """The prediction of a picture, with the true class if it differs, and the colour of this text."""
    text = f"{short(guess)} {confidence:.0%}"
    if truth is None:
        return text, INK
    return (text, RIGHT) if truth == guess else (f"{text}\nis {short(truth)}", WRONG)


def draw_grid(pictures: Sequence[Uint8Array], captions: Sequence[tuple[str, str]], title: str) -> Figure:
    """A grid of pictures of one size, each below a coloured text."""
    ratio = pictures[0].shape[1] / pictures[0].shape[0]
    columns = min(8 if ratio < 1.5 else 4, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    width, height, text_height = 1.45 * max(1.0, ratio), 1.45, 0.35  # inches
    figure = new_figure(width * columns, (height + text_height) * rows + 0.4, title)
    axes = figure.subplots()
    for index, (picture, (text, colour)) in enumerate(zip(pictures, captions, strict=True)):
        row, column = divmod(index, columns)
        left, top = column * width, row * (height + text_height) + text_height
        place_tile(axes, picture, (left, top, width - 0.06, height - 0.06), cmap="gray", vmin=0, vmax=255)
        axes.text(left + width / 2, top - 0.04, text, color=colour, fontsize=9, ha="center", va="bottom")
    axes.set_axis_off()
    axes.set(xlim=(0, width * columns), ylim=((height + text_height) * rows, 0))
    return figure


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


def beside_itself(picture: Uint8Array, heatmap: FloatArray, side: int = 96) -> Uint8Array:
    """A picture, enlarged to at least `side` pixels, beside itself under its heatmap, as one RGB array."""
    large = enlarged(picture, side)
    rgb = large if large.ndim == 3 else np.repeat(large[..., None], 3, axis=-1)
    gap = np.full((len(rgb), max(2, rgb.shape[1] // 24), 3), 255, dtype=np.uint8)
    return np.concatenate([rgb, gap, overlay(large, heatmap)], axis=1)


def frame_patches(axes: Axes, which: npt.NDArray[np.bool_], colour: str) -> None:
    """Frame some patches of the picture in the axes; `which` is (gh, gw)."""
    height, width = axes.images[0].get_size()
    ph, pw = height / which.shape[0], width / which.shape[1]
    for row, column in zip(*np.nonzero(which), strict=True):
        corner = (column * pw - 0.5, row * ph - 0.5)
        axes.add_patch(Rectangle(corner, pw, ph, fill=False, edgecolor=colour, linewidth=1.5))


def draw_explanation(picture: Uint8Array, heatmap: FloatArray, title: str) -> Figure:
    """A picture beside itself under its heatmap."""
    ratio = picture.shape[0] / picture.shape[1]
    figure = new_figure(8, 4 * ratio + 0.6, title)
    left, right = figure.subplots(1, 2)
    left.imshow(picture, cmap="gray", vmin=0, vmax=255)
    right.imshow(overlay(enlarged(picture), heatmap))
    left.axis("off")
    right.axis("off")
    return figure


def draw_explanations(picture: Uint8Array, heatmaps: Mapping[str, FloatArray], title: str) -> Figure:
    """A picture, and the same picture under each heatmap (gh, gw), by the method's name."""
    panels = {"picture": picture}
    for name, heatmap in heatmaps.items():
        label = name if heatmap.any() else f"{name}: no evidence"
        panels[label] = overlay(enlarged(picture), heatmap)
    rows = math.ceil(len(panels) / 4)
    columns = math.ceil(len(panels) / rows)
    inches = 2.2 / max(picture.shape[:2])  # of a pixel
    height, width = picture.shape[0] * inches, picture.shape[1] * inches
    figure = new_figure(max(1.6, width) * columns, (height + 0.3) * rows + 0.4, title)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid:
        axes.axis("off")
    for axes, (name, panel) in zip(grid, panels.items(), strict=False):  # the last row may have gaps
        axes.imshow(panel, cmap="gray", vmin=0, vmax=255)
        axes.set_title(name, fontsize=10, color=INK)
    return figure


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
    """Attention distances (depth, heads) and that of uniform attention, pixels (paper, figure 7, right)."""
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


def draw_heads(picture: Uint8Array, maps: FloatArray, title: str = "Attention of each head") -> Figure:
    """A picture (H, W) or (H, W, 3) under maps (depth, heads, gh, gw): layers down, heads across."""
    depth, heads = maps.shape[:2]
    height, width = (max(1, round(side * _TILE / max(picture.shape[:2]))) for side in picture.shape[:2])
    small = np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BILINEAR))
    th, tw = height + _GAP, width + _GAP
    sheet = np.full((depth * th - _GAP, heads * tw - _GAP, 3), 255, dtype=np.uint8)
    for layer, row in enumerate(maps):
        for head, heatmap in enumerate(row):
            top, left = layer * th, head * tw
            sheet[top : top + height, left : left + width] = overlay(small, heatmap)
    inches = min(12.0, max(4.0, 0.75 * heads + 0.9))
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
    pictures: Sequence[Uint8Array],
    colours: FloatArray,
    title: str = "Similar features have similar colours",
) -> Figure:
    """Pictures of one size, each above its patches' colours (n, gh, gw, 3) in [0, 1]."""
    n = len(pictures)
    lines = math.ceil(n / 8)
    columns = math.ceil(n / lines)
    height, width = pictures[0].shape[:2]
    side = min(2.5, max(1.25, 7.5 / columns))  # inches across; a few pictures are larger
    figure = new_figure(max(4.5, side * columns), 2 * lines * side * height / width + 0.6, title)
    grid = figure.subplots(2 * lines, columns, squeeze=False)
    for axes in grid.ravel():
        axes.axis("off")
    for index, (picture, patches) in enumerate(zip(pictures, colours, strict=True)):
        line, column = divmod(index, columns)
        grid[2 * line, column].imshow(picture, cmap="gray", vmin=0, vmax=255)
        grid[2 * line + 1, column].imshow(patches, extent=(0, width, height, 0), interpolation="nearest")
    return figure


def enlarged(picture: Uint8Array, side: int = 256) -> Uint8Array:
    """A picture enlarged by a whole factor to at least `side` pixels, as room for a heatmap."""
    times = max(1, math.ceil(side / min(picture.shape[:2])))
    return picture.repeat(times, axis=0).repeat(times, axis=1)


def plain(axes: Axes, **labels: str) -> None:
    """Label axes; draw only two spines, and a light grid."""
    axes.set(**labels)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def short(name: str, length: int = 14) -> str:
    """A class name in one short line; its middle is cut, as long names often differ only at the end."""
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    if len(name) <= length:
        return name
    tail = (length - 1) // 3
    return f"{name[: length - 1 - tail]}…{name[len(name) - tail :]}"


class LiteralFigure(Figure):
    """A figure whose texts are class names and file names of any script.

    Matplotlib reads text between two `$` as a formula, and warns about each character that its default font
    lacks. Here every text is literal. Missing characters come from other installed fonts; if none has them,
    they become code points (U+732B) with a note.
    """

    def draw(self, renderer: RendererBase) -> None:
        """Prepare the texts, then draw."""
        for axes in self.axes:
            for axis in (axes.xaxis, axes.yaxis):
                ticks = [label.get_text() for label in axis.get_ticklabels()]
                if (legible := [_legible(text) for text in ticks]) != ticks:
                    axis.set_ticklabels(legible)  # an axis renews its labels whenever it is drawn
        texts = [text for text in self.findobj(Text) if isinstance(text, Text)]
        for text in texts:
            text.set_parse_math(False)
            text.set_text(_legible(text.get_text()))
            if families := _families_with(_lacking(text.get_text()))[0]:
                text.set_fontfamily([*text.get_fontfamily(), *families])
                text.set_fontweight("normal")  # the only weight that all of them have
        if not self.get_supxlabel() and any(CODE_POINT.search(text.get_text()) for text in texts):
            self.supxlabel(NOTE, fontsize=8)
        super().draw(renderer)


def _legible(text: str) -> str:
    """A text with the characters that no font has as code points."""
    missing = _families_with(_lacking(text))[1]
    return "".join(f"U+{ord(letter):04X} " if letter in missing else letter for letter in text).rstrip(" ")


def _lacking(text: str) -> frozenset[str]:
    """The characters that the default font lacks."""
    return frozenset(
        letter for letter in text if not letter.isascii() and ord(letter) not in _default_letters()
    )


@functools.cache
def _default_letters() -> frozenset[int]:
    """Code points in matplotlib's default font."""
    return _letters(font_manager.findfont(font_manager.FontProperties()))


def _letters(path: str) -> frozenset[int]:
    """Code points in a font file; none for a font that matplotlib cannot draw, such as colour bitmaps."""
    try:
        font = FT2Font(path)
        font.set_size(12, 72)
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(font.get_charmap())


@functools.cache
def _families_with(lacking: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Installed families that cover these characters, and the characters that none has."""
    fonts = {
        font.name: font.fname
        for font in font_manager.fontManager.ttflist
        if font.style == "normal" and font.weight == 400 and "Last Resort" not in font.name  # boxes
    }
    families: list[str] = []
    missing = set(lacking)
    for name, path in sorted(fonts.items()):
        if not missing:
            break
        known = _letters(path)
        if found := {letter for letter in missing if ord(letter) in known}:
            families.append(name)
            missing -= found
    return tuple(families), frozenset(missing)
