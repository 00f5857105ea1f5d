"""What every model asks of the images that it is given."""

from __future__ import annotations

from torch import Tensor

from vitascope.errors import UserError


def check_images(images: Tensor, in_channels: int) -> None:
    """Refuse what is no batch of normalized images (B, C, H, W).

    Raises:
        UserError: raw pixels, another number of dimensions or colours.
    """
    if not images.is_floating_point():
        raise UserError(f"images must be normalized floats, not {images.dtype}; see `Preprocess.normalize`")
    if images.ndim != 4 or images.shape[1] != in_channels:
        raise UserError(f"images must be (batch, {in_channels}, height, width), not {tuple(images.shape)}")
