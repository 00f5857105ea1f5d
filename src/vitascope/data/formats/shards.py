"""Tar shards in the WebDataset format: large files that are read almost in sequence, with random access.

A sample is a picture (`000123.jpg`) and its class as an ASCII integer (`000123.cls`), or a `000123.json`
with "label", one after the other. `vitascope pack` writes an `index.json` beside its shards, with the class
names and the size of every shard, and a `samples.npz` with the places of all pictures; other shards are found
by their names, and read header by header.

Once the headers are read, a shard set is an `ImageSet` like any other: its sources are places in files, its
order a function of (seed, epoch). So a run resumes in mid-epoch, and processes share an epoch, by cutting
that order; no state of a stream is kept, and nothing is skipped by reading it.
"""

import dataclasses
import itertools
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from vitascope.data.formats.archive import archive_errors, open_plain_tar, tar_fault, tar_members
from vitascope.data.formats.folder import OUTSIDE, files_of_splits, has_class_folders
from vitascope.data.formats.format import DataFormat
from vitascope.data.formats.shard_index import (
    CLASSES,
    SAMPLE_HEAD,
    SAMPLES,
    SamplePlaces,
    is_packed,
    member_content,
    read_index,
)
from vitascope.data.listing import IMAGE_SUFFIXES
from vitascope.data.splits import ImageSet, Inventory, LazySources
from vitascope.data.targets import ClassIndices, minus_one_is_none
from vitascope.errors import SourceError, UserError
from vitascope.formatting import canonical, counted
from vitascope.models.decoding import Encoded
from vitascope.network import Threads
from vitascope.remote import cache
from vitascope.remote.paths import AnyPath, StorePath
from vitascope.remote.stores import ChangedError, RemoteObject, StoreError
from vitascope.storage import READ_BYTES

LABELS = ("cls", "json")
"""Extensions of labels; of two the first counts."""
_DIGITS = 18
"""Of a label, which is an int64."""
GROUP = 4
"""Shards that an epoch's order mixes at a time."""
_NAME_LENGTH = 100  # bytes of a member's name that messages show


ShardFile: TypeAlias = str | RemoteObject
"""A path, or an object, of which the blocks that are read are cached."""


def open_shard(shard: ShardFile) -> AbstractContextManager[IO[bytes]]:
    """The shard as an open file without a buffer."""
    if isinstance(shard, RemoteObject):
        return cast("IO[bytes]", cache.ObjectReader(shard))
    return open(shard, "rb", buffering=0)


def read_at(shard: ShardFile, offset: int, size: int) -> bytes:
    """A part of a shard.

    Raises:
        EOFError: the shard ends earlier.
        StoreError: an object that has changed, whose offsets have no meaning any more; as `cache.read`.
    """
    if isinstance(shard, RemoteObject):
        try:
            return cache.read(shard, offset, size)
        except ChangedError as error:
            raise StoreError(f"{shard}: {error}; list the shards again by repeating the command") from error
    descriptor = os.open(shard, READ_BYTES)  # in half the time of a file object
    try:
        os.lseek(descriptor, offset, os.SEEK_SET)
        content = os.read(descriptor, size)
        while len(content) < size:  # some network file systems return a part
            more = os.read(descriptor, size - len(content))
            if not more:
                raise EOFError(f"the shard ends {size - len(content):,} bytes too early")
            content += more
    finally:
        os.close(descriptor)
    return content


class Shards(DataFormat):
    """A folder of tars, or of `train/`, `val/`, `test/` with tars, without folders of images.

    Class names are those of `index.json`, else the lines of `classes.txt`, else the numbers.
    """

    def matches(self, data: str) -> bool:
        return has_shards(Path(data))

    def read(self, data: str) -> Inventory:
        return read_shards(Path(data))


def has_shards(path: AnyPath) -> bool:
    """Whether a folder is one of shards."""
    return any(files_of_splits(path, (".tar",)).values()) and not has_class_folders(path)


def read_shards(path: AnyPath) -> Inventory:
    """The images of a folder of shards."""
    if (index := read_index(path)) is None:
        files = files_of_splits(path, (".tar",))
        found = {split: _read_split([*map(_file_of, paths)]) for split, paths in files.items() if paths}
        names, channels = _class_names(path), 3
    else:
        places, names, channels = SamplePlaces.read(path, index), index.class_names, index.channels
        found = {
            split: _placed(places, [shard.name for shard in paths], [*map(_file_of, paths)])
            for split, paths in index.checked_files(path).items()
        }
    if not any(len(labels) for _, labels in found.values()):
        raise UserError(f"{path}: no images in its shards; expected <key>.jpg and <key>.cls")
    return Inventory(sets_of_numbers(found, names, str(path)), channels, path.as_posix())


def _file_of(path: AnyPath) -> ShardFile:
    return path.object if isinstance(path, StorePath) else str(path)


@dataclasses.dataclass(frozen=True, slots=True)
class ShardMember(Encoded):
    """An encoded picture inside a shard."""

    file: ShardFile
    name: str
    offset: int
    size: int
    label: int | None = None
    """As `samples.npz` has it, which is compared with the shard; None where it was read there."""

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"

    def read_bytes(self) -> bytes:
        """The encoded picture.

        Raises:
            EOFError: the shard has become shorter.
            SourceError: a shard of another packing than `samples.npz`; as `read_at`.
        """
        if self.label is None:
            return read_at(self.file, self.offset, self.size)
        sample = read_at(self.file, self.offset - SAMPLE_HEAD, SAMPLE_HEAD + self.size)
        if not is_packed(sample, self.name, self.size, self.label):
            raise SourceError(
                f"{self.file}: {self.name} of class {self.label} is not where {SAMPLES} has it: damaged, or "
                "a shard of another packing; copy the whole folder again"
            )
        return sample[SAMPLE_HEAD:]


@dataclasses.dataclass(frozen=True, eq=False)
class ShardMembers(LazySources):
    """Many pictures in shards."""

    files: tuple[ShardFile, ...]  # the shards
    shards: npt.NDArray[np.int32]  # (N,), which shard each picture is in
    offsets: npt.NDArray[np.int64]  # (N,), bytes
    sizes: npt.NDArray[np.int64]  # (N,), bytes
    names: npt.NDArray[np.bytes_]  # (N,), UTF-8
    labels: npt.NDArray[np.int64] | None = None  # (N,), as `ShardMember.label`

    def __len__(self) -> int:
        return len(self.offsets)

    def at(self, index: int) -> ShardMember:
        name = self.names[index].decode("utf-8", "replace")
        file = self.files[self.shards[index]]
        label = None if self.labels is None else int(self.labels[index])
        return ShardMember(file, name, int(self.offsets[index]), int(self.sizes[index]), label)

    def take(self, indices: npt.NDArray[np.int64]) -> "ShardMembers":
        labels = None if self.labels is None else self.labels[indices]
        rows = (self.shards[indices], self.offsets[indices], self.sizes[indices], self.names[indices])
        return ShardMembers(self.files, *rows, labels)

    @property
    def shard_files(self) -> int:
        return len(np.unique(self.shards))

    def streams(self, seed: int, epoch: int, count: int) -> list[npt.NDArray[np.int64]]:
        """The images of an epoch in `count` orders of about the same length, each of the same shards in every
        epoch, and all of different ones."""
        by_shard = np.argsort(self.shards, kind="stable")
        counts = np.bincount(self.shards, minlength=len(self.files))
        return [by_shard[order] for order in shard_streams(seed, epoch, counts, count)]


def shard_streams(
    seed: int, epoch: int, counts: npt.NDArray[np.int64], streams: int = 1, group: int = GROUP
) -> list[npt.NDArray[np.int64]]:
    """An epoch's orders, together a permutation of range(sum(counts)).

    Each shard is dealt to the shortest stream so far. In a stream, the shards are permuted, cut into groups,
    and the images permuted inside each group, so that only `group` files are read at a time, end to end.
    """
    dealt: list[list[int]] = [[] for _ in range(streams)]
    lengths = [0] * streams
    for shard, images in enumerate(counts.tolist()):
        shortest = lengths.index(min(lengths))
        dealt[shortest].append(shard)
        lengths[shortest] += images
    generator, ends, orders = np.random.default_rng([seed, epoch]), np.cumsum(counts), []
    for own in dealt:
        shards, parts = np.array(own, np.int64)[generator.permutation(len(own))], []
        for cut in range(0, len(shards), group):
            members = [np.arange(ends[s] - counts[s], ends[s]) for s in shards[cut : cut + group]]
            parts.append(generator.permutation(np.concatenate(members)))
        orders.append(np.concatenate(parts) if parts else np.empty(0, np.int64))
    return orders


def sets_of_numbers(
    found: Mapping[str, tuple[LazySources, npt.NDArray[np.int64]]], names: tuple[str, ...] | None, place: str
) -> tuple[ImageSet, ...]:
    """The images of each split, whose labels are numbers, (N,): those with a class, and those of -1, without.

    Without names, the classes are the numbers that occur, ascending. A split whose labels are all -1 beside
    others is in no split, as in a table: they are secret.
    """
    different = np.unique(np.concatenate([labels for _, labels in found.values()]))
    with_none = names is not None or minus_one_is_none(different.tolist())
    if with_none:
        different = different[different != -1]
    if names is None:
        names = tuple(map(str, different.tolist()))
        found = {split: (images, _places(labels, different)) for split, (images, labels) in found.items()}
    sets = []
    for split, (images, labels) in found.items():
        if len(wrong := labels[(labels < -1) | (labels >= len(names))]):
            raise UserError(
                f"{place}: label {wrong[0]} in the {split} images, with {len(names)} class names, which are "
                "counted from 0"
            )
        known = labels >= 0
        rows, others = np.flatnonzero(known), np.flatnonzero(~known)
        if len(rows) or not len(others):
            sets.append(ImageSet(split, images.take(rows), ClassIndices(labels[rows], names)))
        if len(others):
            secret = not len(rows) and len(different)
            sets.append(ImageSet(OUTSIDE if secret else split, images.take(others)))
    return tuple(sets)


def _places(labels: npt.NDArray[np.int64], different: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The place of each label, (N,), among different ones, ascending; -1 for -1 if that is not among them."""
    places = np.searchsorted(different, labels)
    return np.where(np.isin(labels, different), places, -1)


def _class_names(folder: AnyPath) -> tuple[str, ...] | None:
    """The names in `classes.txt`, one per label from 0 on; None without the file."""
    path = folder / CLASSES
    if not path.is_file():
        return None
    try:
        lines = member_content(path).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from error
    names = tuple(canonical(line.strip()) for line in lines if line.strip())
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"{path}: {len(names)} lines, {len(set(names))} different; expected one per line")
    return names


def _placed(
    places: SamplePlaces, names: Sequence[str], files: Sequence[ShardFile]
) -> tuple[ShardMembers, npt.NDArray[np.int64]]:
    """The images of some shards, by their names and as files, and their labels, (N,)."""
    numbers = np.full(len(places.files), -1, np.int32)
    for number, name in enumerate(names):
        numbers[places.files == name.encode()] = number
    shards = numbers[places.shards]
    own = np.flatnonzero(shards >= 0)
    own = own[np.argsort(shards[own], kind="stable")]
    labels = places.labels[own]
    rows = (shards[own], places.offsets[own], places.sizes[own], places.names[own], labels)
    return ShardMembers(tuple(files), *rows), labels


def _read_split(files: Sequence[ShardFile]) -> tuple[ShardMembers, npt.NDArray[np.int64]]:
    """The images of some shards, and their labels, (N,)."""
    with Threads(8) as pool:  # on a network drive, each seek waits
        shards = list(pool.map(samples, files))
    found = list(itertools.chain.from_iterable(shards))
    members = ShardMembers(
        tuple(files),
        np.repeat(np.arange(len(files), dtype=np.int32), [len(shard) for shard in shards]),
        np.array([sample.offset for sample in found], dtype=np.int64),
        np.array([sample.size for sample in found], dtype=np.int64),
        np.array([sample.name.encode()[:_NAME_LENGTH] for sample in found], dtype=np.bytes_),
    )
    return members, np.array([sample.label for sample in found], dtype=np.int64)


class ShardSample(NamedTuple):
    """A labelled picture."""

    name: str
    offset: int  # the place of its first byte in the shard
    size: int
    label: int


class _Part(NamedTuple):
    """A member of a sample."""

    key: str
    extension: str
    name: str
    offset: int
    size: int
    content: bytes  # the content of a label; else empty


def samples(shard: ShardFile) -> list[ShardSample]:
    """The labelled pictures of a shard, by WebDataset's rule: neighbours with one key are a sample. Only
    headers and labels are read; other members (captions, notes) are skipped. Those of an object are kept in
    the cache, because reading all headers fetches the whole object."""
    if not isinstance(shard, RemoteObject):
        return _samples(shard)
    found = cache.kept(shard, "samples 3", lambda: json.dumps(_samples(shard)).encode())
    return [ShardSample(*row) for row in json.loads(found)]


def _samples(shard: ShardFile) -> list[ShardSample]:
    found, path = [], str(shard)
    with (
        archive_errors(path),
        open_shard(shard) as file,
        open_plain_tar(file, path) as tar,
    ):
        for key, group in itertools.groupby(_parts(tar, path), key=lambda part: part.key):
            sample = _sample(path, key, group)
            if sample is not None:
                found.append(sample)
    return found


def _parts(tar: tarfile.TarFile, path: str) -> Iterator[_Part]:
    assert tar.fileobj is not None
    for member in tar_members(tar, path):
        if fault := tar_fault(member):
            raise UserError(f"{path}: {member.name!r} is {fault}; pack the files themselves")
        if member.isdir():
            continue
        # A name that is no UTF-8 comes with surrogates, which cannot be printed.
        full = member.name.removeprefix("./").encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        folder, slash, name = full.rpartition("/")
        if name.startswith("."):  # `._1.jpg`: what macOS's tar keeps of a file beside it
            continue
        stem, _, extension = name.partition(".")  # at the first dot: `1.seg.png` is not the picture of `1`
        extension = extension.lower()
        content = b""
        if extension in LABELS:
            tar.fileobj.seek(member.offset_data)
            content = tar.fileobj.read(member.size)
        yield _Part(
            canonical(folder + slash + stem), extension, full, member.offset_data, member.size, content
        )


def _sample(path: str, key: str, parts: Iterable[_Part]) -> ShardSample | None:
    pictures: list[_Part] = []
    labels: dict[str, int] = {}
    parts = list(parts)
    for part in parts:
        if f".{part.extension}" in IMAGE_SUFFIXES:
            pictures.append(part)
        elif part.extension in LABELS:
            label = _label(path, part)
            labels |= {} if label is None else {part.extension: label}
    _check_keys(path, key, parts, whole=bool(pictures))
    if not pictures and "cls" not in labels:
        return None
    if len(pictures) != 1 or not labels:
        has = f"{len(pictures)} pictures" if labels else 'no label (.cls, or "label" in .json)'
        raise UserError(
            f"{path}: sample {key!r} has {has}; expected one of each, one after the other (tar --sort=name "
            "keeps them together)"
        )
    picture = pictures[0]
    label = next(labels[kind] for kind in LABELS if kind in labels)
    return ShardSample(picture.name, picture.offset, picture.size, label)


def _check_keys(path: str, key: str, parts: Sequence[_Part], *, whole: bool) -> None:
    """Reject samples with a dot in their keys, such as `cat.1.jpg` with `cat.1.cls`, beside a sample of this
    key that is whole, or without it. Pictures in words, such as `1.seg.png`, belong to sample 1."""
    dotted = [
        part.name
        for part in parts
        for word, dot, suffix in [part.extension.rpartition(".")]
        if dot and f".{suffix}" in IMAGE_SUFFIXES and (not whole or word.isdecimal())
    ]
    if dotted:
        raise UserError(
            f"{path}: {dotted[0]!r} has a dot in its key, and a key ends at its first dot (WebDataset), so "
            f"that {counted(len(dotted), 'picture')} named {key}.* would be lost: write {key}_1.jpg and "
            f"{key}_1.cls, for example"
        )


def _label(path: str, part: _Part) -> int | None:
    """The label in a member; None for a .json without one."""
    if part.extension == "cls":
        text = part.content.strip()
        if re.fullmatch(rb"-?[0-9]{1,%d}" % _DIGITS, text):
            return int(text)
        raise UserError(f"{path}: {part.name!r} contains {part.content[:40]!r}, not an integer")
    try:
        values = json.loads(part.content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {part.name!r} is not JSON: {error}") from error
    label = values.get("label") if isinstance(values, dict) else None
    if label is None or (type(label) is int and abs(label) < 10**_DIGITS):
        return label
    raise UserError(f"{path}: {part.name!r} has the label {label!r:.40}, not an integer; -1 is none")
