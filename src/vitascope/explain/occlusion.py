"""Occlusion: what hiding a part of the image costs.

Zeiler and Fergus 2014, "Visualizing and Understanding Convolutional Networks", section 4.2. Slow, but it asks
the model itself and knows nothing of its inside: what the other methods can be compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.explain.forward import pooled_and_logits
from vitascope.explain.heatmaps import cell_of_pixels, check_count, grid_of, to_unit
from vitascope.explain.targets import Target, TargetLike, as_target
from vitascope.model.classifier import Classifier


@torch.no_grad()
def occlusion(
    model: Classifier,
    images: Tensor,
    target: TargetLike = None,
    *,
    window: int = 1,
    batch_size: int = 64,
) -> Tensor:
    """How far the target's score falls when a part of the image is hidden.

    Hidden pixels become 0, which in normalized images is the mean colour of the data. A window of `window` x
    `window` cells moves over the image in steps of one cell; a cell's heat is the mean drop over the windows
    that cover it. A larger window is smoother, and finds what hiding a single cell leaves readable. Where the
    score rises, the heat is 0.

    The cells are the patches of a `VisionTransformer`, or the places of a `ResNet`'s last feature maps. Where
    these overlap or reach over the edge, cells are equal parts of the image, as many as the grid has.

    Args:
        model: any; it is run as in evaluation, once for each image and each place of the window.
        images: normalized floats (B, C, H, W).
        target: what to explain; None is the class that the model predicts for the whole image.
        window: height and width of the window, cells.
        batch_size: the most images that the model is given at once.

    Returns:
        float32 (B, grid_h, grid_w), each image's largest value 1.

    Raises:
        UserError: a window that is larger than the grid, a batch size below 1; no such target; scores that
            are not finite.
    """
    grid = grid_of(model, images)
    check_count("window", window, most=min(grid))
    check_count("batch_size", batch_size)
    pooled, logits = (
        torch.cat(parts)
        for parts in zip(*(pooled_and_logits(model, part) for part in images.split(batch_size)), strict=True)
    )  # (B, D), (B, K)
    asked = as_target(target, model.config, logits)
    scores = asked.score(pooled, logits)  # (B,)
    over_rows, over_columns = (places(cells, window) for cells in grid)  # (nh, gh), (nw, gw)
    covered = over_rows.sum(dim=0)[:, None] * over_columns.sum(dim=0)  # (gh, gw): the windows over each cell
    rows, columns = cell_of_pixels(grid, (images.shape[2], images.shape[3]))
    down, across = (over.bool().to(images.device) for over in (over_rows[:, rows], over_columns[:, columns]))
    pairs = torch.cartesian_prod(torch.arange(len(down)), torch.arange(len(across)))  # (nh * nw, 2)
    heat = torch.zeros(len(images), *grid)
    for index, image in enumerate(images):
        falls = [
            drops(
                model,
                image,
                pixel_masks(down[part[:, 0]], across[part[:, 1]]),
                asked.of(index),
                scores[index],
            )
            for part in pairs.split(batch_size)
        ]
        by_place = torch.cat(falls).cpu().reshape(len(over_rows), len(over_columns))
        heat[index] = over_rows.T @ by_place @ over_columns / covered
    return to_unit(heat.to(images.device))


def places(cells: int, window: int) -> Tensor:
    """The places of a window on one side of the grid: which cells each covers, 0 or 1, (places, cells)."""
    first, cell = torch.arange(cells - window + 1)[:, None], torch.arange(cells)
    return ((first <= cell) & (cell < first + window)).float()


def pixel_masks(down: Tensor, across: Tensor) -> Tensor:
    """The pixels of n places, of the rows (n, H) and columns (n, W) that each covers: bool (n, 1, H, W).

    Of a few places at a time: all those of a large image take more memory than its attention.
    """
    return (down[:, :, None] & across[:, None, :])[:, None]


def drops(model: Classifier, image: Tensor, masks: Tensor, target: Target, score: Tensor) -> Tensor:
    """How far the score of an image (C, H, W) falls under each of the masks (n, 1, H, W): float32 (n,)."""
    variants = image.masked_fill(masks, 0)  # (n, C, H, W)
    fall = score.float() - target.score(*pooled_and_logits(model, variants)).float()
    # A variant that is the image itself differs by rounding, which a map without evidence would blow up.
    return fall.where((variants != image).flatten(1).any(dim=1), 0)
