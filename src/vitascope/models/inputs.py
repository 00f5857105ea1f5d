"""The check of the images that a model gets."""

from torch import Tensor

from vitascope.errors import UserError


def check_images(images: Tensor, in_channels: int) -> None:
    """Raise `UserError` for anything but normalized images (B, C, H, W)."""
    if not isinstance(images, Tensor):
        raise UserError(
            f"a model takes a tensor of normalized images, not {type(images).__name__}: make it of a picture "
            "by model.preprocess.pixels and model.preprocess.normalize, or use vitascope.Predictor"
        )
    if not images.is_floating_point() or images.ndim != 4 or images.shape[1] != in_channels:
        raise UserError(
            f"images must be normalized floats (batch, {in_channels}, height, width), as "
            f"model.preprocess.normalize returns them, not {images.dtype} {tuple(images.shape)}"
        )
