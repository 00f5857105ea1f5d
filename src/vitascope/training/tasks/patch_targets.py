"""Targets for hidden patches: 3-bit colours or pixels (paper, appendix B.1.2), or normalized pixels (MAE)."""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.errors import UserError
from vitascope.models.patches import patchify
from vitascope.models.preprocess import Preprocess

LEVELS = 8
"""Levels of a 3-bit colour."""


def color_classes(images: Tensor, patch: tuple[int, int], side: int) -> Tensor:
    """Each patch's 3-bit colours, of areas (side x side): floats (B, C, H, W) -> int64 (B, N, side * side).

    A mean v in [0, 1] has the level min(floor(8 v), 7); the class is 64 r + 8 g + b.
    """
    C = images.shape[1]
    tiles = patchify(images, patch).unflatten(2, (C, *patch))  # (B, N, C, ph, pw)
    small = F.adaptive_avg_pool2d(tiles.flatten(0, 1), side).unflatten(0, tiles.shape[:2])
    levels = (small * LEVELS).long().clamp(0, LEVELS - 1).flatten(3)  # (B, N, C, side * side)
    return (levels * _place_values(C, images.device)[:, None]).sum(dim=2)


def class_colors(classes: Tensor, channels: int) -> Tensor:
    """The mean colour of each class, the inverse of `color_classes`: (...) to (..., C) in [0, 1]."""
    digits = classes[..., None] // _place_values(channels, classes.device) % LEVELS
    return (digits + 0.5) / LEVELS


def _place_values(channels: int, device: torch.device) -> Tensor:
    """64, 8, 1 for three channels, (C,)."""
    return LEVELS ** torch.arange(channels - 1, -1, -1, device=device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColorTarget:
    """Colour classes: of the patch's mean with `side` 1, of its 4x4 picture with 4."""

    caption: ClassVar[str] = "predicted"
    """Of the predictions' pictures."""
    side: int
    patch: tuple[int, int]
    channels: int

    def __post_init__(self) -> None:
        if min(self.patch) < self.side:
            raise UserError(
                f"a patch of {self.patch[0]}x{self.patch[1]} pixels has no {self.side}x{self.side} picture; "
                "predict its mean_color or its pixels, or use larger patches"
            )

    @property
    def outputs(self) -> int:
        """Number of outputs per patch."""
        return self.side**2 * LEVELS**self.channels

    def targets(self, images: Tensor) -> Tensor:
        """The classes of images in [0, 1], (B, C, H, W): int64 (B, N, side * side)."""
        return color_classes(images, self.patch, self.side)

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The mean cross-entropy and accuracy of each image, (B,), for logits (B, n, outputs)."""
        logits = outputs.float().unflatten(2, (self.side**2, -1))  # (B, n, side * side, K)
        losses = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none")
        return {
            "loss": losses.view(targets.shape).mean(dim=(1, 2)),
            "accuracy": (logits.argmax(dim=3) == targets).float().mean(dim=(1, 2)),
        }

    def predictions(self, outputs: Tensor) -> Tensor:
        """The most probable classes, (B, n, side * side)."""
        return outputs.unflatten(2, (self.side**2, -1)).argmax(dim=3)

    def pictures(self, targets: Tensor, patches: Tensor) -> Tensor:
        """Classes (B, n, side * side) as pictures: floats in [0, 1], (B, n, C, ph, pw)."""
        small = class_colors(targets, self.channels).unflatten(2, (self.side, self.side)).movedim(4, 2)
        large = F.interpolate(small.flatten(0, 1), size=self.patch, mode="nearest")
        return large.unflatten(0, targets.shape[:2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelTarget:
    """The normalized pixels of a patch, with a squared error."""

    caption: ClassVar[str] = "predicted"
    """Of the predictions' pictures."""
    patch: tuple[int, int]
    preprocess: Preprocess

    @property
    def outputs(self) -> int:
        """Number of outputs per patch."""
        return self.preprocess.channels * self.patch[0] * self.patch[1]

    def targets(self, images: Tensor) -> Tensor:
        """The normalized pixels of images in [0, 1], (B, C, H, W): (B, N, C * ph * pw)."""
        return patchify(self.preprocess.normalize(images), self.patch)

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The mean squared error of each image, (B,)."""
        return {"loss": (outputs.float() - targets).square().mean(dim=(1, 2))}

    def predictions(self, outputs: Tensor) -> Tensor:
        """The outputs themselves, (B, n, C * ph * pw)."""
        return outputs

    def pictures(self, targets: Tensor, patches: Tensor) -> Tensor:
        """Normalized pixels (B, n, C * ph * pw) as pictures: floats in [0, 1], (B, n, C, ph, pw)."""
        mean = torch.tensor(self.preprocess.mean, device=targets.device).view(-1, 1, 1)
        std = torch.tensor(self.preprocess.std, device=targets.device).view(-1, 1, 1)
        return (targets.float().unflatten(2, (-1, *self.patch)) * std + mean).clamp(0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormalizedPixelTarget(PixelTarget):
    """The pixels of a patch, normalized by its own mean and variance (He et al. 2022, section 3)."""

    caption: ClassVar[str] = "predicted\n(contrast given)"
    """The pictures have the mean and contrast of the right answer, which are not predicted."""

    def targets(self, images: Tensor) -> Tensor:
        """The pixels of images in [0, 1], with mean 0 and variance 1 in each patch."""
        patches = super().targets(images)  # (B, N, C * ph * pw)
        mean, deviation = patch_statistics(patches)
        return (patches - mean) / deviation

    def pictures(self, targets: Tensor, patches: Tensor) -> Tensor:
        """Pictures with the mean and variance of the hidden `patches`, which are pixels in [0, 1]."""
        pixels = self.preprocess.normalize(patches.unflatten(2, (-1, *self.patch)))
        mean, deviation = patch_statistics(pixels.flatten(2))
        return super().pictures(targets.float() * deviation + mean, patches)


def patch_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each patch, (B, n, X) -> (B, n, 1) each, as in MAE's code."""
    variance, mean = torch.var_mean(patches, dim=2, keepdim=True)  # unbiased
    return mean, (variance + 1e-6).sqrt()


Target = ColorTarget | PixelTarget
