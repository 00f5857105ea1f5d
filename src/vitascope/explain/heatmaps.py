"""What every heatmap has in common: its cells, the pixels that they stand for, and its scale."""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.model.classifier import Classifier
from vitascope.model.preprocess import check_images
from vitascope.model.resnet_shapes import feature_hw
from vitascope.model.vit import VisionTransformer


def grid_of(model: Classifier, images: Tensor) -> tuple[int, int]:
    """Rows and columns of a model's heatmaps of images (B, C, H, W).

    Of a `VisionTransformer` the grid of its patches, of a `ResNet` that of its last feature maps.

    Raises:
        UserError: what is no batch of normalized images, or a size that patches do not tile.
    """
    if isinstance(model, VisionTransformer):
        return model.grid_of(images)
    check_images(images, model.config.in_channels)
    return feature_hw((images.shape[2], images.shape[3]), model.config.layers, model.config.root)


def cell_of_pixels(grid: tuple[int, int], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The cell of each pixel, where a grid of cells tiles an image.

    Cells are equal and need not be whole pixels: a pixel belongs to the cell that its centre is in.

    Args:
        grid: rows and columns of cells, (gh, gw).
        size: height and width in pixels, (H, W); no less than the grid.

    Returns:
        The cell's row of each pixel row, int64 (H,), and its column of each pixel column, int64 (W,). Both
        rise from 0 to the last, and miss none.
    """
    return _cells(grid[0], size[0]), _cells(grid[1], size[1])


def _cells(cells: int, pixels: int) -> Tensor:
    """The cell of each pixel of one side, (pixels,)."""
    assert cells <= pixels, f"{pixels} pixels are no {cells} cells"
    return (2 * torch.arange(pixels) + 1) * cells // (2 * pixels)


def to_unit(heat: Tensor) -> Tensor:
    """Evidence (B, gh, gw) as a heatmap: what is below 0 is 0, each image's largest value 1.

    An image without any evidence stays all zeros.

    Args:
        heat: (B, gh, gw), any floats.

    Returns:
        float32 (B, gh, gw).

    Raises:
        UserError: a value that is not a finite number: it would vanish, or hide all others.
    """
    heat = heat.float()
    bad = (~heat.isfinite()).flatten(1).any(dim=1)  # (B,)
    if bad.any():
        which = ", ".join(str(index) for index in bad.nonzero()[:, 0].tolist())
        raise UserError(
            f"the heatmap of image {which} has values that are not finite: look for NaN and infinity in the "
            "images and the weights, or run the model in float32"
        )
    heat = heat.clamp_min(0)
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def check_count(name: str, value: object, most: int | None = None) -> None:
    """Refuse a number of things that is not whole, is below 1, or is above `most`.

    Raises:
        UserError: naming the number and the range.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value > (most or value):
        upper = "" if most is None else f" and at most {most}"
        raise UserError(f"{name} must be a whole number, at least 1{upper}, not {value!r}")
