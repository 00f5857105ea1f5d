"""Occlusion (Zeiler and Fergus 2014, "Visualizing and Understanding Convolutional Networks", section 4.2).

Slow, but it uses nothing inside the model, so the other methods can be compared with it.
"""

import torch
from torch import Tensor

from vitascope.analysis.explain.heatmaps import Count, cell_of_pixels, grid_of, to_unit
from vitascope.analysis.explain.inputs import Images, as_images, pooled_and_logits
from vitascope.analysis.explain.targets import Target, TargetLike, as_target
from vitascope.arguments import Range, checked
from vitascope.models.vision_model import VisionModel


@torch.no_grad()
@checked
def occlusion(
    model: VisionModel,
    images: Images,
    target: TargetLike = None,
    *,
    window: int = 1,
    batch_size: Count = 64,
    scaled: bool = True,
) -> Tensor:
    """The drop of the target's score when a part of the image is hidden.

    Hidden pixels become 0, in normalized images the mean colour. A window of `window` x `window` cells moves
    over the image in steps of one cell; a cell's heat is the mean drop over the windows that cover it, or 0
    where the score rises. A larger window finds regions that stay readable without any single cell.

    Cells are equal parts of the image, as many as a `VisionTransformer` has patches, or a `ResNet` places in
    its last feature map. The model runs once per image and window.

    Raises:
        UserError: a window larger than the grid; scores that are not finite.
    """
    images = as_images(model, images)
    grid = grid_of(model, images)
    Range(ge=1, le=min(grid)).check("window", window)
    pooled, logits = (
        torch.cat(parts)
        for parts in zip(*(pooled_and_logits(model, part) for part in images.split(batch_size)), strict=True)
    )  # (B, D), (B, K)
    targets = as_target(target, model.config, logits)
    scores = targets.score(pooled, logits)  # (B,)
    over_rows, over_columns = (windows(cells, window) for cells in grid)  # (nh, gh), (nw, gw)
    covered = over_rows.sum(dim=0)[:, None] * over_columns.sum(dim=0)  # (gh, gw): windows over each cell
    rows, columns = cell_of_pixels(grid, (images.shape[2], images.shape[3]))
    down, across = (over.bool().to(images.device) for over in (over_rows[:, rows], over_columns[:, columns]))
    pairs = torch.cartesian_prod(torch.arange(len(down)), torch.arange(len(across)))  # (nh * nw, 2)
    heat = torch.zeros(len(images), *grid)
    for index, image in enumerate(images):
        falls = []
        for part in pairs.split(batch_size):
            # A few masks at a time: all of a large image's take more memory than its attention.
            masks = down[part[:, 0], :, None] & across[part[:, 1], None, :]  # (n, H, W)
            falls.append(drops(model, image, masks[:, None], targets.select(index), scores[index]))
        by_window = torch.cat(falls).cpu().reshape(len(over_rows), len(over_columns))
        heat[index] = over_rows.T @ by_window @ over_columns / covered
    return to_unit(heat.to(images.device), scaled)


def windows(cells: int, window: int) -> Tensor:
    """The cells that each window covers along one side: 0 or 1, (windows, cells)."""
    first, cell = torch.arange(cells - window + 1)[:, None], torch.arange(cells)
    return ((first <= cell) & (cell < first + window)).float()


def drops(model: VisionModel, image: Tensor, masks: Tensor, target: Target, score: Tensor) -> Tensor:
    """The drop of the score of an image (C, H, W) under each of the masks (n, 1, H, W): float32 (n,)."""
    variants = image.masked_fill(masks, 0)  # (n, C, H, W)
    fall = score.float() - target.score(*pooled_and_logits(model, variants)).float()
    # A variant equal to the image differs by rounding, which would fill a map without evidence.
    return fall.where((variants != image).flatten(1).any(dim=1), 0)
