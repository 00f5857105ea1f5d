"""Figures of explanations, from arrays, with matplotlib's object interface: no global state, no window."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from PIL import Image

from vitascope.explain.fonts import LiteralFigure

RIGHT, WRONG, INK, GREY = "#1a7f4b", "#c2352b", "#222222", "#8a8a8a"
SERIES = ("#3457a6", "#d9772b")
MAX_GRID = 32
"""Images in a grid."""
TITLE_LETTER = 0.105
"""The approximate width of a letter of a title, in inches."""


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


def to_picture(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(C, H, W) as matplotlib draws it: (H, W) for one channel, (H, W, 3) for three."""
    return pixels[0] if pixels.shape[0] == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))


def overlay(
    picture: npt.NDArray[np.uint8], heatmap: npt.NDArray[np.floating[Any]], strength: float = 0.6
) -> npt.NDArray[np.uint8]:
    """A picture, uint8 (H, W) or (H, W, 3), under a heatmap (gh, gw): uint8 (H, W, 3).

    The heatmap is enlarged bilinearly and scaled from its smallest to its largest value. Hot places keep
    their brightness and get warm colours, the others become dark. `strength` is the share of the heatmap's
    colour.
    """
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


def draw_grid(
    pictures: Sequence[npt.NDArray[np.uint8]], captions: Sequence[tuple[str, str]], title: str
) -> Figure:
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
    """Draw one of many pictures, (h, w) or (h, w, 3), in the same axes, whose y axis points down.

    This is many times faster than one axes per picture. The picture keeps its aspect ratio in the middle of
    `box`: left, top, width, height. Set the limits of the axes after the last tile.
    """
    left, top, width, height = box
    size = min(width / tile.shape[1], height / tile.shape[0])
    across, down = left + width / 2, top + height / 2
    w, h = tile.shape[1] * size / 2, tile.shape[0] * size / 2
    return axes.imshow(tile, extent=(across - w, across + w, down + h, down - h), **scale)


def beside_itself(
    picture: npt.NDArray[np.uint8], heatmap: npt.NDArray[np.floating[Any]], side: int = 96
) -> npt.NDArray[np.uint8]:
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


def draw_explanations(
    picture: npt.NDArray[np.uint8], heatmaps: Mapping[str, npt.NDArray[np.floating[Any]]], title: str
) -> Figure:
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


def frame_patch(axes: Axes, grid: tuple[int, int], patch: tuple[int, int]) -> None:
    """Frame one patch, (row, column) in a grid of (rows, columns), of the picture in the axes."""
    which = np.zeros(grid, dtype=bool)
    which[patch] = True
    frame_patches(axes, which, SERIES[1])


def enlarged(picture: npt.NDArray[np.uint8], side: int = 256) -> npt.NDArray[np.uint8]:
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
