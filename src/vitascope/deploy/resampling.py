"""Pillow's crop and resize as matrix products: what lets an exported file take pictures of any size.

A resize of one axis is a matrix of weights, (out, in), that follows from the two sizes and the filter. The
weights are computed in the graph from the height and the width of what comes in, so one file serves them all.

Pillow keeps bytes between the two axes, so their order matters. Since its version 13 the height comes first
where it shrinks by more than twice as many pixels as the width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitascope.data.preprocess import Preprocess


def bilinear(x: Tensor) -> Tensor:
    """The triangle, 1 at 0 and nothing from 1 on."""
    return (1 - x.abs()).clamp(min=0)


def bicubic(x: Tensor) -> Tensor:
    """Keys' cubic convolution with a = -1/2 (Keys 1981, equation 15), nothing from 2 on."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def lanczos(x: Tensor) -> Tensor:
    """sinc(x) sinc(x / 3), nothing from 3 on."""
    return torch.where(x.abs() < 3, sinc(x) * sinc(x / 3), torch.zeros_like(x))


def sinc(x: Tensor) -> Tensor:
    """sin(pi x) / (pi x), 1 at 0; `torch.sinc` has no counterpart in ONNX."""
    turned = torch.pi * torch.where(x == 0, torch.ones_like(x), x)
    return torch.where(x == 0, torch.ones_like(x), turned.sin() / turned)


FILTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear": bilinear,
    "bicubic": bicubic,
    "lanczos": lanczos,
}


def weights(size: int, start: Tensor, extent: Tensor, out: int, interpolation: str) -> Tensor:
    """What each of `out` results takes from each of `size` pixels: (out, size), rows that sum to one.

    Args:
        size: pixels of the axis.
        start: where the seen part begins, pixels, float32 ().
        extent: how long it is, pixels, float32 ().
        out: pixels of the result.
        interpolation: Pillow's filter. Its support grows where the axis shrinks, against aliasing.
    """
    step = extent / out
    centres = start + (torch.arange(out, dtype=torch.float32, device=start.device) + 0.5) * step  # (out,)
    places = torch.arange(size, dtype=torch.float32, device=start.device)  # (size,)
    if interpolation == "nearest":
        return (places == centres.floor()[:, None]).float()
    away = (places + 0.5 - centres[:, None]) / step.clamp(min=1)
    shares = FILTERS[interpolation](away)
    return shares / shares.sum(dim=1, keepdim=True)


def whole(values: Tensor) -> Tensor:
    """Rounded and cut to a byte's range: Pillow keeps bytes between its two passes."""
    return (values + 0.5).floor().clamp(0, 255)


def rows_first(pictures: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """The height, then the width, in whole numbers after each."""
    return whole(whole(down @ pictures) @ across)


def columns_first(pictures: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """The width, then the height."""
    return whole(down @ whole(pictures @ across))


class Resize(nn.Module):
    """`Preprocess.pixels` of upright pictures in the model's colours, in a graph.

    The same as Pillow to a rounding: a value may be 1 of 255 off, where a sum lies between two. With
    "nearest" a pixel may be its neighbour, where a centre falls between two.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        self.height, self.width = preprocess.image_size
        self.crop = preprocess.resize == "crop"
        self.crop_pct = preprocess.crop_pct
        self.interpolation = preprocess.interpolation

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures (B, C, H, W) of any size, values in [0, 255], to (B, C, height, width), whole numbers."""
        height, width = pictures.shape[2:]
        rows, columns = (
            torch.full((), side, dtype=torch.float32, device=pictures.device) for side in (height, width)
        )
        seen_rows, seen_columns = self.seen(rows, columns)
        top, left = (rows - seen_rows) / 2, (columns - seen_columns) / 2
        across = weights(width, left, seen_columns, self.width, self.interpolation).T  # (W, width')
        down = weights(height, top, seen_rows, self.height, self.interpolation)  # (height', H)
        tall = (rows > self.height) & (rows - self.height > 2 * (columns - self.width))
        # Both, and one of them taken: OpenVINO 2026.4 computes a branch of the graph wrong at times.
        return torch.where(tall, rows_first(pictures, across, down), columns_first(pictures, across, down))

    def seen(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Height and width, in pixels, of the part that `Preprocess.fit` takes from the centre."""
        if not self.crop:
            return rows * self.crop_pct, columns * self.crop_pct
        scale = torch.maximum(self.height / rows, self.width / columns) / self.crop_pct
        return torch.minimum(self.height / scale, rows), torch.minimum(self.width / scale, columns)
