"""Figures of what a network has learned, from arrays: its filters, positions, heads and features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from vitascope.explain.plots import GREY, INK, SERIES, new_figure, overlay, place_tile, plain

Floats = npt.NDArray[np.floating[Any]]

_TILE, _GAP = 96, 6
"""The longer side of each picture on the sheet of heads, and the gap between two, in pixels."""


def draw_position_similarity(similarity: Floats) -> Figure:
    """Similarity (gh, gw, gh, gw) of position embeddings (paper, figure 7, centre), for at most 8 x 8."""
    shown = [
        np.unique(np.linspace(0, side - 1, min(side, 8)).round().astype(int)) for side in similarity.shape[:2]
    ]
    figure = new_figure(
        max(4.0, 0.75 * len(shown[1]) + 1.6),
        max(2.4, 0.75 * len(shown[0]) + 1.2),
        "Similarity of position embeddings",
    )
    axes = figure.subplots()
    for i, row in enumerate(shown[0]):
        for j, column in enumerate(shown[1]):
            tile = similarity[row, column]
            drawn = place_tile(axes, tile, (j, i, 0.94, 0.94), cmap="viridis", vmin=-1, vmax=1)
    axes.set(xlim=(0, len(shown[1])), ylim=(len(shown[0]), 0))
    axes.set_xticks(np.arange(len(shown[1])) + 0.47, [str(column) for column in shown[1]])
    axes.set_yticks(np.arange(len(shown[0])) + 0.47, [str(row) for row in shown[0]])
    axes.tick_params(length=0, labelsize=9, labelcolor=GREY)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("column of the patch", fontsize=10, color=INK)
    axes.set_ylabel("row of the patch", fontsize=10, color=INK)
    figure.colorbar(drawn, ax=axes, label="cosine similarity to each patch", fraction=0.05)
    return figure


def draw_patch_filters(components: Floats, shares: Floats) -> Figure:
    """Components (k, C, ph, pw) of the patch embedding's filters and their shares (k,) (paper, figure 7,
    left).

    Each is scaled by itself, with zero in the middle.
    """
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
    distances: Floats, uniform: float, title: str = "Mean attention distance"
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


def draw_heads(picture: npt.NDArray[np.uint8], maps: Floats, title: str = "Attention of each head") -> Figure:
    """A picture (H, W) or (H, W, 3) under maps (depth, heads, gh, gw): layers down, heads across."""
    depth, heads = maps.shape[:2]
    small = np.asarray(Image.fromarray(picture).resize(_tile_size(picture), Image.Resampling.BILINEAR))
    th, tw = small.shape[0] + _GAP, small.shape[1] + _GAP
    sheet = np.full((depth * th - _GAP, heads * tw - _GAP, 3), 255, dtype=np.uint8)
    for layer, row in enumerate(maps):
        for head, heatmap in enumerate(row):
            top, left = layer * th, head * tw
            sheet[top : top + small.shape[0], left : left + small.shape[1]] = overlay(small, heatmap)
    width = min(12.0, max(4.0, 0.75 * heads + 0.9))
    figure = new_figure(width, (width - 0.9) * sheet.shape[0] / sheet.shape[1] + 1.0, title)
    axes = figure.subplots()
    axes.imshow(sheet)  # one image: matplotlib takes a minute for hundreds of axes
    axes.set_xticks((np.arange(heads) + 0.5) * tw - _GAP / 2, [str(head) for head in range(heads)])
    axes.set_yticks((np.arange(depth) + 0.5) * th - _GAP / 2, [str(layer) for layer in range(depth)])
    axes.set(xlabel="head", ylabel="layer")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _tile_size(picture: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Width and height of a picture whose longer side is `_TILE`."""
    height, width = picture.shape[:2]
    scale = _TILE / max(height, width)
    return max(1, round(width * scale)), max(1, round(height * scale))


def draw_feature_colours(
    pictures: Sequence[npt.NDArray[np.uint8]],
    colours: Floats,
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
