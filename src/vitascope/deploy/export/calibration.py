"""The pictures that int8's ranges are taken from, and what rounding in those ranges takes away."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.data.decoding import ImageError, ImageSource
from vitascope.data.preprocess import Preprocess
from vitascope.deploy.predict.exported_model import Batch, Metadata
from vitascope.errors import UserError

LOOKED_AT = 16
"""Pictures that rounding is measured on: each layer's input has thousands of numbers for each."""


class Calibration:
    """Pictures that ranges are taken from, as a graph takes them.

    Args:
        about: what the file tells of its input.
        sources: pictures; what cannot be read is left out.
        count: how many to draw.
        seed: which.

    Raises:
        UserError: fewer than one wanted, or none can be read.
    """

    def __init__(self, about: Metadata, sources: Sequence[ImageSource], count: int, seed: int) -> None:
        if count < 1:
            raise UserError(f"calibration needs at least 1 picture, not {count}")
        fit = smallest_frame(about.preprocess) if about.input == "pictures" else about.preprocess
        self._batches: list[Batch] = []
        reason = "there is none"
        for index in np.random.default_rng(seed).permutation(len(sources)):
            try:
                pixels = fit.pixels(sources[index])
            except ImageError as error:
                reason = str(error)
                continue
            self._batches.append(np.ascontiguousarray(pixels.transpose(1, 2, 0)[None]))  # (1, H, W, C)
            if len(self._batches) == count:
                break
        if not self._batches:
            raise UserError(f"no picture to calibrate with: {reason}")

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def smallest_frame(preprocess: Preprocess) -> Preprocess:
    """What makes pictures of which a graph sees what it sees of the originals, but small enough to keep."""
    if preprocess.resize_to is not None:
        return dataclasses.replace(preprocess, image_size=preprocess.resize_to)
    height, width = (round(side / preprocess.crop_pct) for side in preprocess.image_size)
    return dataclasses.replace(preprocess, image_size=(height, width), crop_pct=1.0)


class Rounding:
    """The energy of each channel of each layer's input, and that of what rounding changed, over pictures.

    Channels count alike: one that dwarfs the others takes the range from them, and hides it in a sum.

    Args:
        pairs: by the layer's name, those of its input before and after rounding.
    """

    def __init__(self, pairs: Mapping[str, tuple[str, str]]) -> None:
        self._pairs = dict(pairs)
        self._energy: dict[str, npt.NDArray[np.float64]] = {}
        self._lost: dict[str, npt.NDArray[np.float64]] = {}

    def add(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """The tensors of one more picture, by name."""
        for layer, (before, after) in self._pairs.items():
            exact = values[before].astype(np.float64)
            self._energy[layer] = self._energy.get(layer, 0.0) + energy_of(exact)
            self._lost[layer] = self._lost.get(layer, 0.0) + energy_of(exact - values[after])

    def shares(self) -> dict[str, float]:
        """What a channel loses as a share of its energy, on average; nothing of one that is all zeros."""
        return {
            layer: float((self._lost[layer] / np.where(energy > 0, energy, np.inf)).mean())
            for layer, energy in self._energy.items()
        }


def energy_of(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sum of squares of each channel: of (B, C, H, W), or with the channels last."""
    channels = 1 if values.ndim == 4 else values.ndim - 1
    return np.square(values).sum(axis=tuple(axis for axis in range(values.ndim) if axis != channels))
