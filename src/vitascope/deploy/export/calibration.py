"""The pictures that int8 ranges come from, and the rounding error that these ranges cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.data.decoding import ImageError, ImageSource
from vitascope.errors import UserError
from vitascope.predict.runtimes import Batch, ExportedEngine

MEASURED = 16
"""Pictures on which the rounding error is measured; each gives thousands of numbers per layer."""


def calibration_batches(
    engine: ExportedEngine, sources: Sequence[ImageSource], count: int, seed: int
) -> list[Batch]:
    """Up to `count` readable pictures, drawn by `seed`, as the graph takes them: (1, H, W, C) each."""
    if count < 1:
        raise UserError(f"calibration needs at least 1 picture, not {count}")
    preprocess = engine.preprocess
    if engine.input == "pictures":  # keep what the graph will crop: small, but the model sees the same
        size, crop_pct = preprocess.resize_to, preprocess.crop_pct
        if size is None:
            height, width = (round(side / crop_pct) for side in preprocess.image_size)
            size, crop_pct = (height, width), 1.0
        preprocess = dataclasses.replace(preprocess, image_size=size, crop_pct=crop_pct)
    batches: list[Batch] = []
    reason = "there is none"
    for index in np.random.default_rng(seed).permutation(len(sources)):
        try:
            pixels = preprocess.pixels(sources[index])
        except ImageError as error:
            reason = str(error)
            continue
        batches.append(np.ascontiguousarray(pixels.transpose(1, 2, 0)[None]))
        if len(batches) == count:
            break
    if not batches:
        raise UserError(f"no picture to calibrate with: {reason}")
    return batches


def rounding_error(
    pairs: Mapping[str, tuple[str, str]], pictures: Iterable[Mapping[str, npt.NDArray[Any]]]
) -> dict[str, float]:
    """The share of the energy of each layer's input that rounding loses, averaged over channels.

    `pairs` names each layer's input before and after rounding; `pictures` are those tensors, per picture.
    """
    # Averaged, because in a sum a dominant channel would hide the errors of the others, whose range it takes.
    energy: dict[str, npt.NDArray[np.float64]] = {}
    lost: dict[str, npt.NDArray[np.float64]] = {}
    for values in pictures:
        for layer, (before, after) in pairs.items():
            exact = values[before].astype(np.float64)
            energy[layer] = energy.get(layer, 0.0) + energy_of(exact)
            lost[layer] = lost.get(layer, 0.0) + energy_of(exact - values[after])
    return {  # 0 for a channel of zeros
        layer: float((lost[layer] / np.where(total > 0, total, np.inf)).mean())
        for layer, total in energy.items()
    }


def energy_of(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sum of squares per channel, of (B, C, H, W) or with the channels last."""
    channels = 1 if values.ndim == 4 else values.ndim - 1
    return np.square(values).sum(axis=tuple(axis for axis in range(values.ndim) if axis != channels))
