"""From a split to batches of uint8 pixels: kept in memory where they fit, read by workers where not."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitascope.data.datasets import ImageSet
from vitascope.data.preprocess import ImageError, Preprocess
from vitascope.data.randomness import epoch_order
from vitascope.errors import UserError

MEMORY_BUDGET = 2**30
"""Bytes of pixels that are kept in memory; a larger split is read again in every epoch."""
MAX_UNREADABLE = 0.1
"""The share of unreadable images above which a split is refused: then it is not a few bad files."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Pixels uint8 (B, C, H, W) and labels int64 (B,) on the device; `indices` (B,) into the split."""

    pixels: Tensor
    labels: Tensor
    indices: npt.NDArray[np.int64]


class Loader:
    """Batches of a split, in an order that depends on nothing but seed and epoch.

    Images that cannot be read are left out and gathered in `unreadable`, path and reason; more than
    `MAX_UNREADABLE` of them raise UserError.

    Args:
        images: the split.
        preprocess: makes the pixels.
        batch_size: images a batch; the last batch of an epoch may be smaller.
        seed: of the order; None keeps the split's own order.
        device: where batches go; a split that fits in `memory_budget` bytes is kept there.
        workers: processes that read images where the split does not fit.
        memory_budget: bytes of pixels to keep.
    """

    def __init__(
        self,
        images: ImageSet,
        preprocess: Preprocess,
        batch_size: int,
        *,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        workers: int | None = None,
        memory_budget: int = MEMORY_BUDGET,
    ) -> None:
        self.images = images
        self.preprocess = preprocess
        self.batch_size = batch_size
        self.seed = seed
        self.device = torch.device(device)
        self.workers = (os.cpu_count() or 1) if workers is None else workers
        self.unreadable: dict[str, str] = {}
        self._kept: Tensor | None = None  # (N, C, H, W), all readable images
        self._readable = np.arange(len(images))
        size = preprocess.channels * math.prod(preprocess.image_size)
        if len(images) * size <= memory_budget:
            self._keep()
        self._labels = torch.from_numpy(images.labels).to(self.device)

    def __len__(self) -> int:
        """Images that can be read, as far as is known: all files are opened only where they are kept."""
        return len(self._readable)

    @property
    def batches_per_epoch(self) -> int:
        """Batches in an epoch."""
        return math.ceil(len(self) / self.batch_size)

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on."""
        order = np.arange(len(self)) if self.seed is None else epoch_order(self.seed, epoch, len(self))
        cuts = range(start * self.batch_size, len(self), self.batch_size)
        rows = [order[cut : cut + self.batch_size] for cut in cuts]  # rows of what is readable
        if self._kept is None:
            yield from self._streamed(rows)
            return
        for row in rows:
            indices = self._readable[row]
            at = torch.from_numpy(row).to(self.device)
            yield Batch(self._kept[at], self._labels[torch.from_numpy(indices).to(self.device)], indices)

    def _keep(self) -> None:
        """Read every image once, in threads: Pillow decodes and resizes without Python's lock."""
        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            results = list(pool.map(self._read, range(len(self.images))))
        for index, result in enumerate(results):
            if isinstance(result, str):
                self._leave_out(index, result)
        pixels = [result for result in results if not isinstance(result, str)]
        if not pixels:
            raise UserError(
                f"no image of the {self.images.name} set can be read: {'; '.join(self.unreadable.values())}"
            )
        self._readable = np.array(
            [i for i, r in enumerate(results) if not isinstance(r, str)], dtype=np.int64
        )
        self._kept = torch.from_numpy(np.stack(pixels)).to(self.device)

    def _streamed(self, rows: list[npt.NDArray[np.int64]]) -> Iterator[Batch]:
        reader: DataLoader[Any] = DataLoader(
            _Reader(self),
            batch_sampler=[row.tolist() for row in rows],
            num_workers=self.workers,
            collate_fn=list,
            pin_memory=False,
        )
        for results in reader:
            for index, result in results:
                if isinstance(result, str):
                    self._leave_out(index, result)
            read = [(index, pixels) for index, pixels in results if not isinstance(pixels, str)]
            indices = np.array([index for index, _ in read], dtype=np.int64)
            shape = (len(read), self.preprocess.channels, *self.preprocess.image_size)
            stacked = np.array([pixels for _, pixels in read], dtype=np.uint8).reshape(shape)
            pixels = torch.from_numpy(stacked).to(self.device)
            yield Batch(pixels, self._labels[torch.from_numpy(indices).to(self.device)], indices)

    def _read(self, index: int) -> npt.NDArray[np.uint8] | str:
        """An image's pixels, or the reason why there are none."""
        try:
            return self.preprocess.pixels(self.images.sources[index])
        except ImageError as error:
            return str(error)

    def _leave_out(self, index: int, reason: str) -> None:
        self.unreadable[str(self.images.sources[index])] = reason
        if len(self.unreadable) > max(1, MAX_UNREADABLE * len(self.images)):
            listed = "; ".join(list(self.unreadable.values())[:3])
            raise UserError(
                f"more than {MAX_UNREADABLE:.0%} of the {len(self.images)} images of the {self.images.name} "
                f"set cannot be read: {listed}; remove or repair them"
            )


class _Reader(Dataset[Any]):
    """What a worker process runs."""

    def __init__(self, loader: Loader) -> None:
        self.read = loader._read

    def __getitem__(self, index: int) -> tuple[int, npt.NDArray[np.uint8] | str]:
        return index, self.read(index)
