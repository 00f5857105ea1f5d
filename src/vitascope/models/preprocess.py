"""The one preprocessing: from any picture to the pixels that a model was trained on.

It is saved with the model and used by training, evaluation, prediction and explanation alike. A model of one
channel gets a picture's luma (ITU-R 601).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from PIL import ExifTags, Image

from vitascope.arguments import Increasing, Range, check_fields
from vitascope.errors import UnknownNameError, UserError, suggestion
from vitascope.models import decoding

if TYPE_CHECKING:
    import torch  # imported at run time in methods, because processes that only decode need none


Pixels: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""uint8 (C, H, W)."""
Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""

Fit: TypeAlias = Literal["crop", "pad", "squash"]
"""How a picture fits into the model's size."""

MAX_RESIZED = 1 << 26
"""Limit of pixels between resize and crop, 200 MB."""
LONGEST_SHOWN = 768
"""Longer side of a picture to look at, in pixels."""
MOST_OBLONG = 3
"""Proportions up to which all of a picture is shown; of a longer strip only the model's part is large."""


class Framed(NamedTuple):
    """A picture as a model gets it, and as people see it."""

    pixels: Pixels
    """The model's input, uint8 (C, h, w)."""
    picture: Pixels
    """The upright picture with its padding, if it has any, uint8 (C, H, W)."""
    box: Box
    """The part of `picture` that became `pixels`."""

    @classmethod
    def whole(cls, pixels: Pixels, picture: Pixels | None = None) -> Framed:
        """A picture that the model sees all of; without `picture` its own pixels are shown."""
        picture = pixels if picture is None else picture
        return cls(pixels, picture, (0.0, 0.0, float(picture.shape[2]), float(picture.shape[1])))

    def top_left(self, height: int, width: int) -> Framed:
        """The same with the first rows and columns of the model's input alone, if a model cuts the rest."""
        left, top, right, bottom = self.box
        _, H, W = self.pixels.shape
        box = (left, top, left + (right - left) * width / W, top + (bottom - top) * height / H)
        return Framed(np.ascontiguousarray(self.pixels[:, :height, :width]), self.picture, box)


def _whole(start: float, end: float, size: int) -> tuple[int, int]:
    """A part of a side in whole pixels, one at least."""
    first = min(round(start), size - 1)
    return first, min(max(round(end), first + 1), size)


def _planes(image: Image.Image) -> Pixels:
    """A picture in "L" or "RGB" as a contiguous array (C, H, W) of its own."""
    array = np.asarray(image)  # (H, W) or (H, W, C)
    return np.array(array[None] if array.ndim == 2 else array.transpose(2, 0, 1), order="C")


@functools.lru_cache(maxsize=64)
def by_channel(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """One number per channel, float32 (C, 1, 1), kept on the device, because each copy delays a step."""
    import torch

    with torch.inference_mode(False):  # training may use it next
        return torch.tensor(numbers, device=device).view(-1, 1, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Resize, crop and normalize: everything between a picture and a model's input.

    There are two rules. Models trained here get a centred box, in fractions of a pixel, of the size
    `crop_pct`. Other libraries resize to whole pixels, then crop whole pixels: `resize_to`.
    """

    image_size: Annotated[tuple[int, int], Range(ge=1)]
    """Height and width of the result, pixels."""
    channels: Annotated[int, Range(ge=1)] = 3
    """3 for RGB, 1 for grey; a model of any other number accepts tensors only."""
    resize: Literal["crop", "squash", "border"] = "crop"
    """`crop` keeps the proportions and crops the centre, `squash` gives the picture the model's proportions,
    `border` (with `resize_to` only) keeps the proportions and fills what is left with `mean`."""
    crop_pct: Annotated[float, Range(gt=0, le=1)] = 1.0
    """The share of the resized picture that the crop keeps: of its shorter side, or of both with `squash`.
    1 with `resize_to`."""
    resize_to: Annotated[tuple[int, int] | None, Range(ge=1)] = None
    """Height and width, in whole pixels, to which a picture is resized before its centre is cropped. With
    `crop` the resized picture keeps its proportions and covers this size, with `border` it fits into it.
    A picture smaller than the crop is padded with black, with `border` with the colour `mean`."""
    side_rounding: Literal["down", "nearest"] = "down"
    """With `resize_to`: rounding of the side that follows from the proportions."""
    crop_rounding: Literal["down", "even"] = "even"
    """With `resize_to`: rounding of half a pixel in the crop's offset."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic"
    """Pillow's filter, antialiased."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Per channel, of pixels in [0, 1]."""
    std: Annotated[tuple[float, ...], Range(gt=0)] = (0.5, 0.5, 0.5)
    """Per channel, of pixels in [0, 1]."""
    exif_orientation: bool = True
    """Turn a photograph upright as its EXIF data says."""
    levels: Annotated[decoding.Levels | None, Increasing()] = None
    """The values of grey of more than 8 bits that become 0 and 255, see `decoding`. None: 0 and 65,535 for
    integers, 0 and 1 for floats."""

    def __post_init__(self) -> None:
        """Reject impossible options, and a rule of whole pixels that is incomplete or contradicts itself."""
        check_fields(self)
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise UserError(f"mean {self.mean} and std {self.std} do not fit {self.channels} channels")
        if self.resize_to is not None:
            if self.crop_pct != 1:
                raise UserError(f"crop_pct {self.crop_pct} and resize_to {self.resize_to} exclude each other")
        elif self.resize == "border":
            raise UserError('resize "border" needs resize_to, a height and a width in pixels')
        elif (self.side_rounding, self.crop_rounding) != ("down", "even"):
            raise UserError("side_rounding and crop_rounding need resize_to")

    def fitted(self, fit: Fit) -> Preprocess:
        """The same with another way to fit a picture into the model's size: `crop` its centre, `pad` it with
        `mean` to its proportions, or `squash` it."""
        to = self.image_size if fit == "pad" else None
        resize: Literal["crop", "squash", "border"] = "border" if fit == "pad" else fit
        whole: dict[str, Any] = {"crop_pct": 1.0, "side_rounding": "down", "crop_rounding": "even"}
        return dataclasses.replace(self, resize=resize, resize_to=to, **whole)

    def share_seen(self, width: int, height: int) -> float:
        """The share of a picture's area that the model sees."""
        left, top, right, bottom = self.box(width, height)
        across, down = min(right, width) - max(left, 0.0), min(bottom, height) - max(top, 0.0)
        return across * down / (width * height)

    @property
    def keeps_own_size(self) -> bool:
        """Whether a picture of the model's size stays as it is."""
        return self.crop_pct == 1 and self.resize_to in (None, self.image_size)

    @property
    def border(self) -> tuple[int, ...]:
        """The colour of padding, in [0, 255] per channel."""
        is_mean = self.resize == "border"
        return tuple(round(255 * value) for value in self.mean) if is_mean else (0,) * self.channels

    @property
    def _fill(self) -> int | tuple[int, ...]:
        return self.border if self.channels > 1 else self.border[0]

    @property
    def _filter(self) -> Image.Resampling:
        return Image.Resampling[self.interpolation.upper()]

    def pixels(self, source: decoding.ImageSource) -> Pixels:
        """A picture as uint8 (C, H, W), resized and cropped; an ImageError names one that cannot be read."""
        return _planes(self.fit(self._read(source)))

    def framed(self, source: decoding.ImageSource, longest: int = LONGEST_SHOWN) -> Framed:
        """A picture as the model gets it, and at its own resolution for people.

        The longer side of the latter has at most `longest` pixels. A picture smaller than the model's input
        is enlarged to that; of a strip beyond `MOST_OBLONG`, the model's part is shown. Raises as `pixels`.
        """
        image = self._read(source)
        pixels = _planes(self.fit(image))
        rows, columns = self.image_size
        left, top, right, bottom = self.box(image.width, image.height)
        x, y = max(0.0, -left), max(0.0, -top)  # padding before the picture
        width, height = x + max(image.width, right), y + max(image.height, bottom)
        finer = min((right - left) / columns, (bottom - top) / rows)  # the picture than the model's input
        if max(width, height) > MOST_OBLONG * min(width, height):
            times = max(1, int(min(finer, longest / max(rows, columns))))
            return Framed.whole(pixels, _planes(self.at_size((times * rows, times * columns)).fit(image)))
        scale = min(max(1.0, 1 / finer), longest / max(width, height))
        canvas = Image.new(image.mode, (round(width * scale), round(height * scale)), self._fill)
        across, down = canvas.width / width, canvas.height / height  # `scale`, to whole pixels
        size = max(1, round(image.width * across)), max(1, round(image.height * down))
        canvas.paste(image.resize(size, self._filter), (round(x * across), round(y * down)))
        box = (left + x) * across, (top + y) * down, (right + x) * across, (bottom + y) * down
        return Framed(pixels, _planes(canvas), box)

    def _read(self, source: decoding.ImageSource) -> Image.Image:
        """A picture in the model's colours; an ImageError if its resize would take too much memory."""
        image = self._whole(source)
        if self.resize_to is not None:
            height, width = self.resized_hw(image.height, image.width)
            if height * width > MAX_RESIZED:
                raise decoding.ImageError(
                    f"{decoding.source_name(source)}: {image.height}x{image.width} pixels would be resized "
                    f"to {height}x{width}, more than {MAX_RESIZED:,} pixels"
                )
        return image

    def whole_pixels(self, source: decoding.ImageSource) -> Pixels:
        """All of a picture as uint8 (C, H, W), neither resized nor cropped."""
        return _planes(self._whole(source))

    def _whole(self, source: decoding.ImageSource) -> Image.Image:
        """A picture of its own size in the model's colours."""
        return self._in_colours(
            decoding.read_image(source, exif_orientation=self.exif_orientation, levels=self.levels)
        )

    def cropped(self, source: decoding.ImageSource, choose: Callable[[int, int], Box]) -> Pixels:
        """A part of a picture as uint8 (C, H, W), squashed to the model's size, for training. `choose` gives
        the part, which is rounded to whole pixels, from the upright picture's width and height."""
        # A JPEG is decoded at a half, a quarter or an eighth of its size as long as the part keeps twice the
        # pixels of the model's size in each direction. On photographs of 12 million pixels that is two to
        # four times as fast, and changes values by 0.2 of 255 on average.
        with decoding.image_errors(source):
            content = decoding.encoded_bytes(source)  # faster than reading in Pillow's steps
            image = decoding.open_image(content or source)
            lying = self.exif_orientation and image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
            width, height = image.size[::-1] if lying else image.size
            box = choose(width, height)
            smaller = min((box[2] - box[0]) / self.image_size[1], (box[3] - box[1]) / self.image_size[0]) / 2
            if smaller >= 2 and image is not source:
                image.draft(image.mode, (math.ceil(image.width / smaller), math.ceil(image.height / smaller)))
            image = decoding.decode(image, source, self.exif_orientation, self.levels)
        image = self._in_colours(image)
        x, y = image.width / width, image.height / height  # 1 unless decoded smaller
        left, right = _whole(box[0] * x, box[2] * x, image.width)
        top, bottom = _whole(box[1] * y, box[3] * y, image.height)
        return self._squashed(image.crop((left, top, right, bottom)))

    def _squashed(self, image: Image.Image) -> Pixels:
        """All of a picture at the model's size, as uint8 (C, H, W)."""
        if self.interpolation not in ("bilinear", "bicubic"):
            return _planes(self._resized(image, (0, 0, image.width, image.height)))
        # torch's filters for bytes equal Pillow's, except for rounding, in a third of the time or less.
        import torch
        import torch.nn.functional as F

        pixels = torch.from_numpy(np.array(image)).view(1, image.height, image.width, -1)
        resized = F.interpolate(
            pixels.permute(0, 3, 1, 2), self.image_size, mode=self.interpolation, antialias=True
        )
        return resized[0].contiguous().numpy()

    def _in_colours(self, image: Image.Image) -> Image.Image:
        """The picture with the model's number of channels."""
        if self.channels not in (1, 3):
            raise UserError(f"pictures have 1 or 3 channels, the model has {self.channels}")
        mode = "L" if self.channels == 1 else "RGB"
        return image if image.mode == mode else image.convert(mode)

    def fit(self, image: Image.Image) -> Image.Image:
        """The part of a picture for the model, at the model's size, by one of the two rules."""
        if self.resize_to is not None:
            height, width = self.resized_hw(image.height, image.width)
            y, x = self.crop_offset(height, width)
            resized = image.resize((width, height), self._filter)
            if height >= self.image_size[0] and width >= self.image_size[1]:
                return resized.crop((x, y, x + self.image_size[1], y + self.image_size[0]))
            canvas = Image.new(image.mode, self.image_size[::-1], self._fill)
            canvas.paste(resized, (-x, -y))
            return canvas
        return self._resized(image, self.box(image.width, image.height))

    def box(self, width: int, height: int) -> Box:
        """The part of an upright picture that becomes the model's input, in the picture's pixels.

        By the rule of whole pixels it reaches beyond a picture that is padded.
        """
        if self.resize_to is not None:
            rows, columns = self.resized_hw(height, width)
            y, x = self.crop_offset(rows, columns)
            across, down = width / columns, height / rows
            return x * across, y * down, (x + self.image_size[1]) * across, (y + self.image_size[0]) * down
        if self.resize == "squash":
            left, top = width * (1 - self.crop_pct) / 2, height * (1 - self.crop_pct) / 2
            return left, top, width - left, height - top
        scale = max(self.image_size[1] / width, self.image_size[0] / height) / self.crop_pct
        seen_width, seen_height = self.image_size[1] / scale, self.image_size[0] / scale
        left, top = (width - seen_width) / 2, (height - seen_height) / 2
        right, bottom = min(left + seen_width, width), min(top + seen_height, height)
        return max(0.0, left), max(0.0, top), right, bottom

    def resized_hw(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a picture after the resize to `resize_to` and before the crop."""
        assert self.resize_to is not None, "the other rule resizes and crops in one step"
        rows, columns = self.resize_to
        if self.resize == "squash":
            return rows, columns
        if self.side_rounding == "nearest":
            # In floats, as in timm: integers would round some ties differently.
            closest = max if self.resize == "border" else min
            ratio = closest(height / rows, width / columns)
            return max(1, round(height / ratio)), max(1, round(width / ratio))
        is_tall = height * columns > width * rows
        if is_tall != (self.resize == "border"):
            return max(1, height * columns // width), columns
        return rows, max(1, width * rows // height)

    def crop_offset(self, height: int, width: int) -> tuple[int, int]:
        """Top and left of the crop in a resized picture; negative if the picture is smaller than the crop."""
        rows, columns = height - self.image_size[0], width - self.image_size[1]  # to spare
        if self.crop_rounding == "down":  # as transformers; the odd pixel of a border comes first
            return rows // 2, columns // 2
        # As torchvision: half a pixel becomes the even number, and the odd pixel of a border comes last.
        top, left = (round(spare / 2) if spare >= 0 else -(-spare // 2) for spare in (rows, columns))
        return top, left

    def _resized(self, image: Image.Image, box: Box) -> Image.Image:
        return image.resize(self.image_size[::-1], self._filter, box=box)

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 (B, C, H, W), or floats in [0, 1], to normalized float32, on the pixels' device."""
        import torch

        if pixels.dtype == torch.uint8:
            return self.normalize_(pixels / 255)
        mean, std = (by_channel(numbers, pixels.device) for numbers in (self.mean, self.std))
        return (pixels - mean).div_(std)

    def normalize_(self, images: torch.Tensor) -> torch.Tensor:
        """`normalize` floats in place, in half the time on a CPU."""
        mean, std = (by_channel(numbers, images.device) for numbers in (self.mean, self.std))
        return images.sub_(mean).div_(std)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `preprocessor_config.json`."""
        values = dataclasses.asdict(self)
        if self.resize_to is None:  # as every version writes it
            for name in ("resize_to", "side_rounding", "crop_rounding"):
                del values[name]
        if self.levels is None:
            del values["levels"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """The inverse of `to_dict`; an unknown key raises UserError and names the nearest."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise UnknownNameError(f"unknown preprocessing option {name!r}{suggestion(name, known)}")
        return cls(**values)

    def at_size(self, image_size: tuple[int, int]) -> Preprocess:
        """The same for a model of another image size; `resize_to` is scaled to the nearest pixel."""
        resize_to = self.resize_to
        if resize_to is not None:
            rows, columns = (
                max(1, round(side * new / old))
                for side, new, old in zip(resize_to, image_size, self.image_size, strict=True)
            )
            resize_to = (rows, columns)
        return dataclasses.replace(self, image_size=image_size, resize_to=resize_to)
