"""Features of any number of images: those in the cache are taken from it, the others are computed."""

import dataclasses
import functools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.data.contents import digests_of
from vitascope.data.features.cache import Contents, FeatureCache, Features
from vitascope.data.pictures import PictureBatch, stream, through_device
from vitascope.data.reading import Faults, ImageReader
from vitascope.errors import UserError
from vitascope.models.decoding import ImageSource, source_name
from vitascope.models.engines.compute import DEFAULT, Compute
from vitascope.models.engines.engine import WHOLE_PICTURES, Engine, TorchEngine
from vitascope.models.engines.features import FeatureSpec

BATCH_SIZE = 64
"""On a CPU."""
BLOCK = 512
"""Images that are looked up together, and whose features come together."""

Indices = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class FeatureRows:
    """The features of some images."""

    indices: Indices
    """(n,), of the images among the sources, ascending."""
    features: list[Features]
    """For each representation, float32 (n, D)."""


class FeatureStream:
    """The features of images, in their order, up to `BLOCK` images at a time.

    Iterating raises a UserError for features that are not finite numbers; it names the image. After an
    error or an interruption, the features of all batches but the last two are in the cache.

    Args:
        engine: a model that has these representations.
        specs: the representations, which are computed in one forward pass.
        sources: the images.
        compute: the batch size, by default `BATCH_SIZE`, and on a GPU as many as keep it busy; the reading
            processes; and whether features are taken from the cache and kept there.

    Attributes:
        origins: for each representation, everything that it depends on beside the images, as values of JSON.
        faults: the images that cannot be read, by index; they have no features.
        computed: the number of images whose features were computed.
    """

    def __init__(
        self,
        engine: Engine,
        specs: Sequence[FeatureSpec],
        sources: Sequence[ImageSource],
        compute: Compute = DEFAULT,
    ) -> None:
        self.engine = engine
        self.specs = [engine.resolved(spec) for spec in specs]
        self.sources = sources
        size = engine.batch_size(compute.batch_size, BATCH_SIZE)
        self.batch_size = min(size, WHOLE_PICTURES) if engine.own_pixels else size
        self.workers = compute.workers
        self.faults = Faults(len(sources))
        self.computed = 0
        self._cached = compute.cache
        self.origins = [_origin_of(engine, spec, self.batch_size) for spec in self.specs]
        self._caches = [FeatureCache(origin) if compute.cache else None for origin in self.origins]
        self._blocks: deque[_Block] = deque()

    def __iter__(self) -> Generator[FeatureRows, None, None]:
        try:
            for batch, columns in self._computed():
                for block in self._blocks:
                    block.receive(batch, columns)
                yield from self._finished()
            yield from self._finished()
        finally:
            for cache in self._caches:
                if cache is not None:
                    cache.flush()

    def _missing(self) -> Iterator[Indices]:
        """Batches of the images that are not in the cache; looks up a block when the last one is asked."""
        pending = np.arange(0)
        for start in range(0, len(self.sources), BLOCK):
            indices = np.arange(start, min(start + BLOCK, len(self.sources)))
            contents = None
            if self._cached:
                contents = digests_of([self.sources[index] for index in indices.tolist()])
            block = _Block(indices, contents, self._caches)
            self._blocks.append(block)
            pending = np.concatenate([pending, indices[block.missing]])
            while len(pending) >= self.batch_size:
                yield pending[: self.batch_size]
                pending = pending[self.batch_size :]
        if len(pending):
            yield pending

    def _computed(self) -> Iterator[tuple[PictureBatch[Indices], list[Features]]]:
        """The missing images in batches, with their features for each representation."""
        engine, size = self.engine, self.batch_size
        reader = ImageReader(self.sources, engine.preprocess)
        with closing(stream(engine, reader, self._missing(), size, self.workers)) as batches:
            features_of = functools.partial(engine.features, specs=self.specs, batch_size=size)
            for batch, columns in through_device(batches, features_of, engine.device):
                for row, reason in batch.faults.items():
                    self.faults.add(int(batch.items[row]), reason)
                self.computed += int(batch.readable.sum())
                arrays = [column.numpy() for column in columns]
                self._check_finite(batch, arrays)
                yield batch, arrays

    def _check_finite(self, batch: PictureBatch[Indices], columns: Sequence[Features]) -> None:
        for spec, features in zip(self.specs, columns, strict=False):
            wrong = np.flatnonzero(~np.isfinite(features).all(axis=1))
            if len(wrong):
                index = int(batch.items[batch.readable][wrong[0]])
                raise UserError(
                    f"image {index}, {source_name(self.sources[index])}: its features ({spec}) are not "
                    f"finite in {self.engine.precision_for(self.batch_size)}: use fp32, or check the weights"
                )

    def _finished(self) -> Iterator[FeatureRows]:
        """The blocks, in their order, of which no image is missing any more."""
        while self._blocks and self._blocks[0].is_complete:
            block = self._blocks.popleft()
            if block.kept.any():
                yield FeatureRows(block.indices[block.kept], block.features())


class _Block:
    """Images that were looked up together."""

    def __init__(
        self, indices: Indices, contents: Contents | None, caches: Sequence[FeatureCache | None]
    ) -> None:
        self.indices = indices  # (n,), consecutive
        self.contents = contents  # (n,)
        self.caches = caches  # of each representation
        self.places = [  # in each cache (n,), -1 for an image that it does not have
            np.full(len(indices), -1) if cache is None or contents is None else cache.find(contents)
            for cache in caches
        ]
        self.missing = np.any([places < 0 for places in self.places], axis=0)  # (n,), whether it is computed
        self.kept = np.ones(len(indices), np.bool_)  # (n,), whether it can be read
        self._rows: list[Features] = []  # for each representation (n, D), once there are any
        self._awaited = int(self.missing.sum())

    @property
    def is_complete(self) -> bool:
        """Whether all images that are computed have come."""
        return self._awaited == 0

    def receive(self, batch: PictureBatch[Indices], columns: Sequence[Features]) -> None:
        """Take what a batch has of this block; new features go into the caches."""
        inside = (batch.items >= self.indices[0]) & (batch.items <= self.indices[-1])
        if not inside.any():
            return
        self._awaited -= int(inside.sum())
        self.kept[batch.items[inside & ~batch.readable] - self.indices[0]] = False
        among = batch.items[inside & batch.readable] - self.indices[0]  # the images of this block
        for number, column in enumerate(columns):
            features, cache = column[inside[batch.readable]], self.caches[number]
            self._put(number, among, features)
            if cache is not None and self.contents is not None:
                new = self.places[number][among] < 0
                cache.add(self.contents[among[new]], features[new])

    def _put(self, number: int, images: npt.NDArray[Any], features: Features) -> None:
        """Take the features of some images for a representation."""
        if number == len(self._rows):
            self._rows.append(np.empty((len(self.indices), features.shape[1]), np.float32))
        self._rows[number][images] = features

    def features(self) -> list[Features]:
        """For each representation those of the kept images, float32 (m, D), m at least 1."""
        for number, cache in enumerate(self.caches):
            if cache is not None and not self.missing.all():
                self._put(number, ~self.missing, cache.take(self.places[number][~self.missing]))
        return [rows[self.kept] for rows in self._rows]


def _origin_of(engine: Engine, spec: FeatureSpec, batch_size: int) -> dict[str, Any]:
    """Everything that a resolved representation depends on beside the images."""
    # A file of features has the digest of its model's body, and rounds differently.
    file = {} if isinstance(engine, TorchEngine) else {"file": engine.digest}
    return {
        "digest": engine.body_digest,
        "layer": spec.layer,
        "pool": spec.pool,
        "preprocess": engine.preprocess.to_dict(),
        "precision": engine.precision_for(batch_size),
        **file,
    }
