"""Common to all heatmaps: the grid of cells, the pixels of each cell, and the scale."""

from typing import Annotated

import torch
from torch import Tensor

from vitascope.arguments import Range
from vitascope.errors import UserError
from vitascope.models.inputs import check_images
from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer

Count = Annotated[int, Range(ge=1)]


def grid_of(model: VisionModel, images: Tensor) -> tuple[int, int]:
    """Rows and columns of heatmaps: of a ViT's patches, of a ResNet's last feature map."""
    if isinstance(model, VisionTransformer):
        return model.grid_of(images)
    check_images(images, model.config.in_channels)
    return model.config.grid_of((images.shape[2], images.shape[3]))


def cell_of_pixels(grid: tuple[int, int], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The cell, from 0, whose area holds the centre of each pixel row, int64 (H,), and column, int64 (W,);
    cells are equal parts of the image."""
    assert grid[0] <= size[0] and grid[1] <= size[1], f"{size} pixels for {grid} cells"  # noqa: PT018
    rows, columns = (
        (2 * torch.arange(pixels) + 1) * cells // (2 * pixels)
        for cells, pixels in zip(grid, size, strict=True)
    )
    return rows, columns


def not_finite(what: str) -> UserError:
    """The error for numbers that are not finite, with the way out."""
    return UserError(
        f"{what}: look for NaN or infinity in the images and the weights, or run the model in float32"
    )


def to_unit(heat: Tensor, scaled: bool = True) -> Tensor:
    """Scale evidence (B, gh, gw) to float32: negative values become 0, each image's largest 1 (0 without
    evidence). With `scaled=False` only the dtype changes; not finite values are a UserError too."""
    heat = heat.float()
    if torch.compiler.is_exporting():  # a graph does not raise
        return _scaled(heat)
    bad = (~heat.isfinite()).flatten(1).any(dim=1).nonzero()[:, 0].tolist()
    if bad:
        raise not_finite(f"the heatmap of image {', '.join(map(str, bad))} has values that are not finite")
    return _scaled(heat) if scaled else heat


def _scaled(heat: Tensor) -> Tensor:
    heat = heat.clamp_min(0)
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
