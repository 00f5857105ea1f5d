"""What masked patch prediction says of a patch (paper, appendix B.1.2): 3-bit colours, or pixels."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.model.patches import patchify

LEVELS = 8
"""Of a colour of 3 bits."""


def color_classes(images: Tensor, patch: tuple[int, int], side: int) -> Tensor:
    """The 3-bit colours of each patch's picture, down-sampled to side x side by averaging areas.

    A mean v in [0, 1] has the level min(floor(8 v), 7). The levels of the C colours are the octal digits of
    the class, the first colour's the highest: 64 r + 8 g + b.

    Args:
        images: floats in [0, 1], (B, C, H, W).
        patch: height and width, at least `side`; where it is no multiple of it, areas overlap as in
            `torch.nn.AdaptiveAvgPool2d`.
        side: 1 for the mean colour.

    Returns:
        int64 (B, N, side * side), row by row, in [0, 8^C).
    """
    C = images.shape[1]
    tiles = patchify(images, patch).unflatten(2, (C, *patch))  # (B, N, C, ph, pw)
    small = F.adaptive_avg_pool2d(tiles.flatten(0, 1), side).unflatten(0, tiles.shape[:2])
    levels = (small * LEVELS).long().clamp(0, LEVELS - 1).flatten(3)  # (B, N, C, side * side)
    digits = LEVELS ** torch.arange(C - 1, -1, -1, device=images.device)  # (C,)
    return (levels * digits[:, None]).sum(dim=2)


def class_colors(classes: Tensor, channels: int) -> Tensor:
    """The middle of each class's colours, the inverse of `color_classes`: (...) to (..., C) in [0, 1]."""
    digits = LEVELS ** torch.arange(channels - 1, -1, -1, device=classes.device)  # (C,)
    return (classes[..., None] // digits % LEVELS + 0.5) / LEVELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColorTarget:
    """Classes of colours: the patch's mean with a `side` of 1, its 4x4 picture with 4, all 16 in parallel.

    Raises:
        UserError: patches with fewer pixels than that.
    """

    side: int
    patch: tuple[int, int]
    channels: int

    def __post_init__(self) -> None:
        """Refuse patches that are too small."""
        if min(self.patch) < self.side:
            raise UserError(
                f"a patch of {self.patch[0]}x{self.patch[1]} pixels has no {self.side}x{self.side} picture; "
                "predict its mean_color or its pixels, or take larger patches"
            )

    @property
    def outputs(self) -> int:
        """What the head says of a patch."""
        return self.side**2 * LEVELS**self.channels

    def wanted(self, images: Tensor) -> Tensor:
        """Of images in [0, 1], (B, C, H, W): classes, int64 (B, N, side * side)."""
        return color_classes(images, self.patch, self.side)

    def measure(self, predictions: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """Each image's mean cross-entropy and accuracy, (B,), of logits (B, n, outputs)."""
        logits = predictions.float().unflatten(2, (self.side**2, -1))  # (B, n, side * side, K)
        losses = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none")
        return {
            "loss": losses.view(wanted.shape).mean(dim=(1, 2)),
            "correct": (logits.argmax(dim=3) == wanted).float().mean(dim=(1, 2)),
        }

    def said(self, predictions: Tensor) -> Tensor:
        """The most probable classes, (B, n, side * side)."""
        return predictions.unflatten(2, (self.side**2, -1)).argmax(dim=3)

    def pictures(self, classes: Tensor) -> Tensor:
        """How classes (B, n, side * side) look: floats in [0, 1], (B, n, C, ph, pw)."""
        small = class_colors(classes, self.channels).unflatten(2, (self.side, self.side)).movedim(4, 2)
        large = F.interpolate(small.flatten(0, 1), size=self.patch, mode="nearest")
        return large.unflatten(0, classes.shape[:2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelTarget:
    """Every normalized pixel of a patch, by its squared error."""

    patch: tuple[int, int]
    preprocess: Preprocess

    @property
    def outputs(self) -> int:
        """What the head says of a patch."""
        return self.preprocess.channels * self.patch[0] * self.patch[1]

    def wanted(self, images: Tensor) -> Tensor:
        """Of images in [0, 1], (B, C, H, W): normalized pixels, (B, N, C * ph * pw)."""
        return patchify(self.preprocess.normalize(images), self.patch)

    def measure(self, predictions: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """Each image's mean squared error, (B,)."""
        return {"loss": (predictions.float() - wanted).square().mean(dim=(1, 2))}

    def said(self, predictions: Tensor) -> Tensor:
        """The predictions themselves, (B, n, C * ph * pw)."""
        return predictions

    def pictures(self, pixels: Tensor) -> Tensor:
        """How normalized pixels (B, n, C * ph * pw) look: floats in [0, 1], (B, n, C, ph, pw)."""
        mean = torch.tensor(self.preprocess.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.preprocess.std, device=pixels.device).view(-1, 1, 1)
        return (pixels.float().unflatten(2, (-1, *self.patch)) * std + mean).clamp(0, 1)


Target = ColorTarget | PixelTarget


def target_of(name: str, config: ViTConfig, preprocess: Preprocess) -> Target:
    """The target that `Masking.target` names."""
    if name == "pixels":
        return PixelTarget(patch=config.patch_hw, preprocess=preprocess)
    side = {"mean_color": 1, "downsampled": 4}[name]
    return ColorTarget(side=side, patch=config.patch_hw, channels=config.in_channels)
