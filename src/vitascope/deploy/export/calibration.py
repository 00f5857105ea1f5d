"""The pictures that int8 ranges come from, and the rounding error that these ranges cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.data.decoding import ImageError, ImageSource
from vitascope.data.preprocess import Preprocess
from vitascope.deploy.predict.exported_model import Batch, ExportedEngine
from vitascope.errors import UserError

MEASURED = 16
"""Pictures on which the rounding error is measured; each gives thousands of numbers per layer."""


class CalibrationPictures:
    """Pictures as a graph takes them."""

    def __init__(self, engine: ExportedEngine, sources: Sequence[ImageSource], count: int, seed: int) -> None:
        if count < 1:
            raise UserError(f"calibration needs at least 1 picture, not {count}")
        preprocess = engine.preprocess
        if engine.input == "pictures":
            preprocess = without_crop(preprocess)
        self._batches: list[Batch] = []
        reason = "there is none"
        for index in np.random.default_rng(seed).permutation(len(sources)):
            try:
                pixels = preprocess.pixels(sources[index])
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


def without_crop(preprocess: Preprocess) -> Preprocess:
    """A preprocessing that keeps what the graph will crop: small pictures that look the same to the model."""
    if preprocess.resize_to is not None:
        return dataclasses.replace(preprocess, image_size=preprocess.resize_to)
    height, width = (round(side / preprocess.crop_pct) for side in preprocess.image_size)
    return dataclasses.replace(preprocess, image_size=(height, width), crop_pct=1.0)


class RoundingError:
    """The share of the energy of each layer's input that rounding loses, over pictures.

    Each channel counts the same: in a sum, one channel that dwarfs the others would hide that it takes the
    range from them.
    """

    def __init__(self, pairs: Mapping[str, tuple[str, str]]) -> None:
        self._pairs = dict(pairs)
        self._energy: dict[str, npt.NDArray[np.float64]] = {}
        self._lost: dict[str, npt.NDArray[np.float64]] = {}

    def add(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add the tensors of one picture, by name."""
        for layer, (before, after) in self._pairs.items():
            exact = values[before].astype(np.float64)
            self._energy[layer] = self._energy.get(layer, 0.0) + energy_of(exact)
            self._lost[layer] = self._lost.get(layer, 0.0) + energy_of(exact - values[after])

    def shares(self) -> dict[str, float]:
        """The lost share of each channel's energy, averaged over channels; 0 for a channel of zeros."""
        return {
            layer: float((self._lost[layer] / np.where(energy > 0, energy, np.inf)).mean())
            for layer, energy in self._energy.items()
        }


def energy_of(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sum of squares per channel, of (B, C, H, W) or with the channels last."""
    channels = 1 if values.ndim == 4 else values.ndim - 1
    return np.square(values).sum(axis=tuple(axis for axis in range(values.ndim) if axis != channels))
