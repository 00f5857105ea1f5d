"""Pillow's crop and resize as matrix products, so that an exported model takes pictures of any size.

A resize of one axis is a matrix of weights, (out, in), which depends on both sizes and the filter. The graph
computes the weights from the height and width of its input, so one file serves all sizes.

Pillow rounds to bytes between the two axes, so their order matters. Since version 13, Pillow resizes the
height first if it shrinks by more than twice as many pixels as the width.
"""

import torch
from torch import Tensor, nn

from vitascope.models.preprocess import Preprocess


def bilinear(x: Tensor) -> Tensor:
    """The triangle: 1 at 0, and 0 from 1 on."""
    return (1 - x.abs()).clamp(min=0)


def bicubic(x: Tensor) -> Tensor:
    """Keys' cubic convolution with a = -1/2 (Keys 1981, equation 15): 0 from 2 on."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def lanczos(x: Tensor) -> Tensor:
    """sinc(x) sinc(x / 3), and 0 from 3 on."""
    return torch.where(x.abs() < 3, sinc(x) * sinc(x / 3), torch.zeros_like(x))


def sinc(x: Tensor) -> Tensor:
    """sin(pi x) / (pi x), 1 at 0; `torch.sinc` has no counterpart in ONNX."""
    turned = torch.pi * torch.where(x == 0, torch.ones_like(x), x)
    return torch.where(x == 0, torch.ones_like(x), turned.sin() / turned)


FILTERS = {"bilinear": bilinear, "bicubic": bicubic, "lanczos": lanczos}


def weights(size: int, start: Tensor, extent: Tensor, out: int, interpolation: str) -> Tensor:
    """Weights of each of `size` pixels in each of `out` results: (out, size), with rows that sum to one."""
    step = extent / out
    centres = centres_of(start, extent, out).clamp(0, size)  # there are no pixels beside the picture
    places = torch.arange(size, dtype=torch.float32, device=start.device)  # (size,)
    if interpolation == "nearest":
        return (places == centres.floor()[:, None]).float()
    away = (places + 0.5 - centres[:, None]) / step.clamp(min=1)
    shares = FILTERS[interpolation](away)
    return shares / shares.sum(dim=1, keepdim=True)


def centres_of(start: Tensor, extent: Tensor, out: int) -> Tensor:
    """Centres of `out` results, in pixels of the axis, float32 (out,)."""
    return start + (torch.arange(out, dtype=torch.float32, device=start.device) + 0.5) * (extent / out)


def whole(values: Tensor) -> Tensor:
    """Round and clamp to bytes, as Pillow does after each pass."""
    return (values + 0.5).floor().clamp(0, 255)


class Resize(nn.Module):
    """`Preprocess.pixels` of upright pictures in the model's colours, in a graph.

    Equal to Pillow except for rounding: a value may be 1 of 255 off if a sum lies between two values. With
    "nearest", a centre between two pixels may give the other one.
    """

    border: Tensor

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        self.height, self.width = preprocess.image_size
        self.interpolation = preprocess.interpolation
        self.rule = Fractions(preprocess) if preprocess.resize_to is None else WholePixels(preprocess)
        border = torch.tensor(preprocess.border, dtype=torch.float32).view(-1, 1, 1)
        self.register_buffer("border", border, persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures (B, C, H, W) of any size, values in [0, 255], to (B, C, height, width), whole numbers."""
        height, width = pictures.shape[2:]
        rows, columns = (
            torch.full((), side, dtype=torch.int64, device=pictures.device) for side in (height, width)
        )
        (down_to, top, seen_rows), (across_to, left, seen_columns) = self.rule.seen(rows, columns)
        across = weights(width, left, seen_columns, self.width, self.interpolation).T  # (W, width')
        down = weights(height, top, seen_rows, self.height, self.interpolation)  # (height', H)
        tall = (rows > down_to) & (rows - down_to > 2 * (columns - across_to))
        # Computes both and selects one, because OpenVINO 2026.4 sometimes computes a branch wrong.
        height_first = whole(whole(down @ pictures) @ across)
        resized = torch.where(tall, height_first, whole(down @ whole(pictures @ across)))
        if not self.rule.may_exceed:
            return resized
        inside = covered(rows, top, seen_rows, self.height)[:, None] & covered(
            columns, left, seen_columns, self.width
        )
        return torch.where(inside, resized, self.border)


Axis = tuple[Tensor, Tensor, Tensor]
"""Of an axis: the resized size, then start and extent of the part of the original that the model sees, in
pixels. Each is a number ()."""


class Fractions:
    """Our own rule, `Preprocess.crop_pct`: one resize of a centred box."""

    may_exceed = False

    def __init__(self, preprocess: Preprocess) -> None:
        self.height, self.width = preprocess.image_size
        self.crop = preprocess.resize == "crop"
        self.crop_pct = preprocess.crop_pct

    def seen(self, height: Tensor, width: Tensor) -> tuple[Axis, Axis]:
        """The part that `Preprocess.fit` takes of a picture of this height and width, int64 ()."""
        rows, columns = height.float(), width.float()
        if self.crop:
            scale = torch.maximum(self.height / rows, self.width / columns) / self.crop_pct
            seen_rows = torch.minimum(self.height / scale, rows)
            seen_columns = torch.minimum(self.width / scale, columns)
        else:
            seen_rows, seen_columns = rows * self.crop_pct, columns * self.crop_pct
        return (
            (torch.full_like(height, self.height), (rows - seen_rows) / 2, seen_rows),
            (torch.full_like(width, self.width), (columns - seen_columns) / 2, seen_columns),
        )


class WholePixels:
    """Other libraries' rule, `Preprocess.resize_to`: a resize to whole pixels, then a crop.

    Only the cropped part of the resized picture is computed.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        assert preprocess.resize_to is not None
        self.height, self.width = preprocess.image_size
        self.resize = preprocess.resize
        self.resize_to = preprocess.resize_to
        self.rounds_down = preprocess.side_rounding == "down"
        self.crops_down = preprocess.crop_rounding == "down"
        is_larger = self.height > self.resize_to[0] or self.width > self.resize_to[1]
        self.may_exceed = is_larger or self.resize == "border"

    def seen(self, height: Tensor, width: Tensor) -> tuple[Axis, Axis]:
        """The part that `Preprocess.fit` takes of a picture of this height and width, int64 ()."""
        down_to, across_to = self.resized_hw(height, width)
        return self.axis(height, down_to, self.height), self.axis(width, across_to, self.width)

    def axis(self, size: Tensor, resized: Tensor, out: int) -> Axis:
        """The `out` pixels in the middle of an axis of `size` pixels that is resized to `resized`."""
        step = size.float() / resized.float()
        half = (resized - out).float() / 2
        even = torch.where(half >= 0, half.round(), half.ceil())
        first = half.floor() if self.crops_down else even
        return resized, first * step, out * step

    def resized_hw(self, height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        """`Preprocess.resized_hw` in integers: 1 pixel off for a tie that timm's floats decide otherwise."""
        rows, columns = (torch.full_like(height, side) for side in self.resize_to)
        if self.resize == "squash":
            return rows, columns
        is_tall = height * columns > width * rows
        follows_width = is_tall if self.resize == "crop" else ~is_tall
        return (
            torch.where(follows_width, self.scaled(height, columns, width), rows),
            torch.where(follows_width, columns, self.scaled(width, rows, height)),
        )

    def scaled(self, side: Tensor, wanted: Tensor, other: Tensor) -> Tensor:
        """The length of a side when the other one becomes `wanted`, at least 1."""
        quotient, rest = quotient_and_rest(side * wanted, other)
        if not self.rounds_down:
            is_odd = quotient - 2 * quotient_and_rest(quotient, torch.full_like(quotient, 2))[0] == 1
            quotient = quotient + ((2 * rest > other) | ((2 * rest == other) & is_odd)).long()
        return quotient.clamp(min=1)


def quotient_and_rest(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of positive integers; corrects runtimes whose float division is 1 off."""
    quotient = torch.div(a, b, rounding_mode="floor")
    rest = a - quotient * b
    quotient = quotient + (rest >= b).long() - (rest < 0).long()
    return quotient, a - quotient * b


def covered(size: Tensor, start: Tensor, extent: Tensor, out: int) -> Tensor:
    """Whether each of `out` pixels lies on an axis of `size` pixels, bool (out,); the others are border."""
    centres = centres_of(start, extent, out)
    return (centres > 0) & (centres < size)
