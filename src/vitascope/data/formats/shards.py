"""Tar shards in the WebDataset format: large files that are read almost in sequence, with random access.

A sample is a picture (`000123.jpg`) and its class as an ASCII integer (`000123.cls`), or a `000123.json`
with "label", one after the other. `vitascope pack` writes an `index.json` beside its shards, with the class
names and the size of every shard; other shards are found by their names.

Once the headers are read, a shard set is an `ImageSet` like any other: its sources are places in files, its
order a function of (seed, epoch). So a run resumes in mid-epoch, and processes share an epoch, by cutting
that order; no state of a stream is kept, and nothing is skipped by reading it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitascope.data.decoding import Encoded
from vitascope.data.formats.folder import files_of_splits, has_class_folders
from vitascope.data.formats.format import DataFormat
from vitascope.data.formats.shard_index import INDEX, read_index
from vitascope.data.formats.shard_samples import samples
from vitascope.data.splits import ImageSet, LazySources, Splits, complete_splits
from vitascope.errors import UserError

GROUP = 4
"""Shards that an epoch's order mixes at a time."""
MAX_CLASSES = 100_000
_NAME_LENGTH = 100  # bytes of a member's name that messages show


class Shards(DataFormat):
    """A folder of tars, or of `train/`, `val/`, `test/` with tars, without folders of images."""

    def matches(self, data: str) -> bool:
        path = Path(data)
        return path.is_dir() and any(_tars(path).values()) and not has_class_folders(path)

    def open(self, data: str, *, seed: int) -> Splits:
        index = read_index(Path(data))
        channels = 3 if index is None else index.channels
        return complete_splits(read_shards(Path(data)), data, seed=seed, channels=channels, root=Path(data))


@dataclasses.dataclass(frozen=True, slots=True)
class ShardMember(Encoded):
    """An encoded picture inside a shard."""

    path: str
    """The shard."""
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    def read_bytes(self) -> bytes:
        """The encoded picture; EOFError where the shard has become shorter."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise EOFError(f"the shard ends {self.size - len(content):,} bytes too early")
        return content


@dataclasses.dataclass(frozen=True, eq=False)
class ShardMembers(LazySources):
    """Many pictures in shards."""

    paths: tuple[str, ...]
    """The shards."""
    shards: npt.NDArray[np.int32]
    """(N,), which shard each picture is in."""
    offsets: npt.NDArray[np.int64]
    """(N,)."""
    sizes: npt.NDArray[np.int64]
    """(N,), bytes."""
    names: npt.NDArray[np.bytes_]
    """(N,), UTF-8."""

    def __len__(self) -> int:
        return len(self.offsets)

    def at(self, index: int) -> ShardMember:
        """One picture."""
        name = self.names[index].decode("utf-8", "replace")
        path = self.paths[self.shards[index]]
        return ShardMember(path, name, int(self.offsets[index]), int(self.sizes[index]))

    def take(self, indices: npt.NDArray[np.int64]) -> ShardMembers:
        """Some of them, in the order given."""
        return ShardMembers(
            self.paths, self.shards[indices], self.offsets[indices], self.sizes[indices], self.names[indices]
        )

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The order of an epoch, which reads a few shards at a time: a permutation of range(len(self))."""
        by_shard = np.argsort(self.shards, kind="stable")
        return by_shard[shard_order(seed, epoch, np.bincount(self.shards, minlength=len(self.paths)))]


def shard_order(
    seed: int, epoch: int, counts: npt.NDArray[np.int64], group: int = GROUP
) -> npt.NDArray[np.int64]:
    """An epoch's order of images that lie in shards one after the other: a permutation of range(sum(counts)).

    The shards are permuted, cut into groups, and the images permuted inside each group, so that only `group`
    files are read at a time, and these from end to end.
    """
    generator = np.random.default_rng([seed, epoch])
    ends = np.cumsum(counts)
    shards = generator.permutation(len(counts))
    parts = []
    for cut in range(0, len(shards), group):
        members = [np.arange(ends[s] - counts[s], ends[s]) for s in shards[cut : cut + group]]
        parts.append(generator.permutation(np.concatenate(members)))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def read_shards(path: Path) -> dict[str, ImageSet]:
    """The splits in a folder of shards: those of train, val and test that exist, or `all`.

    Class names are those of `index.json`, else the lines of `classes.txt`, else the numbers.
    """
    index = read_index(path)
    files = _tars(path) if index is None else index.checked_files(path)
    found = {split: _read_split(split, paths) for split, paths in files.items() if paths}
    if not any(map(len, found.values())):
        raise UserError(f"{path}: no images in its shards; expected <key>.jpg and <key>.cls")
    for split, images in found.items():
        if index is not None and len(images) != index.images(split):
            raise UserError(
                f"{path}: {len(images)} images in the {split} shards, {INDEX} has {index.images(split)}; "
                "pack them again"
            )
    names = _class_names(path, found) if index is None else index.class_names
    for split, images in found.items():
        if len(images) and images.labels.max() >= len(names):
            raise UserError(
                f"{path}: label {images.labels.max()} in the {split} shards, with {len(names)} class names, "
                "which are counted from 0"
            )
    return {split: dataclasses.replace(images, class_names=names) for split, images in found.items()}


def numbered_classes(largest: int, place: str) -> tuple[str, ...]:
    """Names of classes that are known by number only: "0" to the largest."""
    if not 1 <= largest < MAX_CLASSES:
        raise UserError(
            f"{place}: the largest label is {largest}; a classifier has 2 to {MAX_CLASSES:,} classes, from 0"
        )
    return tuple(map(str, range(largest + 1)))


def _tars(path: Path) -> dict[str, list[Path]]:
    return files_of_splits(path, (".tar",))


def _class_names(folder: Path, found: Mapping[str, ImageSet]) -> tuple[str, ...]:
    path = folder / "classes.txt"
    if not path.is_file():
        labels = [int(images.labels.max()) for images in found.values() if len(images)]
        return numbered_classes(max(labels), str(folder))
    try:
        names = tuple(line.strip() for line in path.read_text("utf-8").splitlines() if line.strip())
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from error
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"{path}: {len(names)} lines, {len(set(names))} different; expected one per line")
    return names


def _read_split(split: str, paths: Sequence[Path]) -> ImageSet:
    """The images of some shards, without class names."""
    with ThreadPoolExecutor(8) as pool:  # not for the arithmetic: on a network each seek is a wait
        shards = list(pool.map(samples, paths))
    found = list(itertools.chain.from_iterable(shards))
    members = ShardMembers(
        tuple(map(str, paths)),
        np.repeat(np.arange(len(paths), dtype=np.int32), [len(shard) for shard in shards]),
        np.array([sample.offset for sample in found], dtype=np.int64),
        np.array([sample.size for sample in found], dtype=np.int64),
        np.array([sample.name.encode()[:_NAME_LENGTH] for sample in found], dtype=np.bytes_),
    )
    labels = np.array([sample.label for sample in found], dtype=np.int64)
    return ImageSet(split, members, labels, ())
