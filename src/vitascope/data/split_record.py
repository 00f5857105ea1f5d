"""A run's record of its split: the part of every image, by name and by content.

A split is drawn from the images in a folder, so that adding or deleting an image moves others from one part
to another. The record keeps every image in the part that it was in when the run began.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import os
import zlib
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from tqdm import tqdm

from vitascope.data.decoding import Encoded, ImageSource, source_name
from vitascope.data.formats.shards import ShardMember
from vitascope.data.splits import ImageSet, Inventory, Splits, check_known_classes
from vitascope.errors import UserError
from vitascope.serialization import parse_json

VERSION = 1
WHOLE = 32 * 1024
"""Bytes up to which a file is hashed completely."""
PIECE = 4096
"""Bytes of each of the pieces of a larger file that are hashed, `WHOLE` in all."""
UNREADABLE = "unreadable"
"""The content of a file that cannot be opened."""
_LONGEST_LINE = 1 << 24  # characters: the names of a hundred thousand classes
_FAULTS = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError)
_THREADS = 16
_NAMED = 3  # images that a message names


def content_of(source: ImageSource) -> str:
    """The identity of an image's content: the size in bytes and a BLAKE2b hash of the encoded picture (a file
    and its copy in a shard have the same), or of the pixels of an array."""
    if isinstance(source, np.ndarray | Image.Image):
        pixels = np.ascontiguousarray(source)
        return f"{pixels.nbytes}-{_digest(repr(pixels.shape).encode(), pixels.tobytes())}"
    try:
        with _opened(source) as (file, start, size):
            places, length = [start], size
            if size > WHOLE:  # pieces from the first byte to the last: a photograph costs 32 KB of reading
                step, length = (size - PIECE) / (WHOLE // PIECE - 1), PIECE
                places = [start + round(step * number) for number in range(WHOLE // PIECE)]
            pieces = []
            for place in places:
                file.seek(place)
                pieces.append(file.read(length))
    except (OSError, EOFError):
        return UNREADABLE
    return f"{size}-{_digest(*pieces)}"


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=12).hexdigest()


@contextlib.contextmanager
def _opened(source: ImageSource) -> Iterator[tuple[IO[bytes], int, int]]:
    """An open file, the place of the encoded picture in it, and its bytes."""
    if isinstance(source, ShardMember):
        with open(source.path, "rb", buffering=0) as file:
            yield file, source.offset, source.size
    elif isinstance(source, str | os.PathLike):
        with open(source, "rb", buffering=0) as file:
            yield file, 0, os.fstat(file.fileno()).st_size
    else:
        content = source.read_bytes() if isinstance(source, Encoded) else source
        assert isinstance(content, bytes)
        yield io.BytesIO(content), 0, len(content)


def contents_of(sources: Sequence[ImageSource]) -> list[str]:
    """`content_of` each source, with a bar if that takes long."""
    with ThreadPoolExecutor(_THREADS) as pool:  # on a network drive, each file waits
        found = pool.map(content_of, sources) if len(sources) > _THREADS else map(content_of, sources)
        bar = tqdm(found, "images identified", len(sources), delay=3, leave=False, disable=None)
        return list(bar)


def image_name(source: ImageSource, root: Path | None) -> str:
    """An image's name in the record: its path below the data's folder; empty for pixels in memory."""
    if not isinstance(source, str | os.PathLike | Encoded):
        return ""
    name = source_name(source).replace("\\", "/")
    return name if root is None else name.removeprefix(root.as_posix()).lstrip("/:")


@dataclasses.dataclass(frozen=True)
class Gone(Encoded):
    """Stands for an image that is missing now, or has another content."""

    name: str
    reason: str

    def __str__(self) -> str:
        return self.name

    def read_bytes(self) -> bytes:
        """Raise an EOFError with the reason."""
        raise EOFError(self.reason)


@dataclasses.dataclass(frozen=True)
class RecordedPart:
    """The images of one part of a split, in their order."""

    names: tuple[str, ...]  # relative to the data's folder; empty where images have none
    labels: npt.NDArray[np.int64]  # (N,), indices into the record's class names
    contents: tuple[str, ...]  # from `content_of`


@dataclasses.dataclass(frozen=True)
class SplitRecord:
    """The parts of a run's data when the run began."""

    class_names: tuple[str, ...]
    parts: dict[str, RecordedPart]  # `train`, `val` and, where there was one, `test`
    place: str = ""  # the data's path relative to the run, so that a project can be moved; or empty

    @property
    def final(self) -> str:
        """The part that the finished model is measured on."""
        return "test" if "test" in self.parts else "val"

    def images(self) -> int:
        """The number of images in all parts."""
        return sum(len(part.names) for part in self.parts.values())

    def trained_on(self, images: ImageSet) -> npt.NDArray[np.bool_]:
        """Whether each image has the content of a training image, (N,)."""
        known = set(self.parts["train"].contents) - {UNREADABLE}
        return np.array([content in known for content in contents_of(images.sources)], dtype=np.bool_)

    def write(self, path: Path) -> None:
        """Write the record as gzipped JSON lines: a header, then one line per image."""
        head = {
            "version": VERSION,
            "images": self.images(),
            "data": self.place,
            "class_names": self.class_names,
            "parts": list(self.parts),
        }
        with open(path, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
            packed.write(json.dumps(head).encode() + b"\n")
            for split, part in self.parts.items():
                for name, label, content in zip(part.names, part.labels.tolist(), part.contents, strict=True):
                    line = {"split": split, "name": name, "label": label, "content": content}
                    packed.write(json.dumps(line).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> SplitRecord:
        """The record in a file of `write`."""
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                head = parse_json(file.readline(_LONGEST_LINE))
                if head["version"] != VERSION:
                    raise UserError(
                        f"{path}: version {head['version']!r}, this vitascope reads {VERSION}; update it"
                    )
                class_names, place = tuple(head["class_names"]), head["data"]
                if not all(isinstance(text, str) for text in (*class_names, *head["parts"], place)):
                    raise ValueError("a name in its first line is not text")
                lines: dict[str, list[tuple[str, int, str]]] = {split: [] for split in head["parts"]}
                while text := file.readline(_LONGEST_LINE):
                    line = parse_json(text)
                    lines[line["split"]].append(_checked(line, len(class_names)))
            parts = {}
            for split, found in lines.items():
                names, labels, contents = zip(*found, strict=True) if found else ((), (), ())
                parts[split] = RecordedPart(names, np.array(labels, dtype=np.int64), contents)
            record = cls(class_names, parts, place)
            if record.images() != head["images"] or not {"train", "val"} <= parts.keys():
                raise ValueError(f"{record.images()} of {head['images']} images")
        except UserError:
            raise
        except _FAULTS as error:
            raise UserError(
                f"{path} is damaged ({error}); restore it, or remove it to skip the check of the split"
            ) from error
        return record


def _checked(line: dict[str, Any], num_classes: int) -> tuple[str, int, str]:
    """The name, the label and the content of an image's line; a ValueError for other types, or a class that
    is not there."""
    name, label, content = line["name"], line["label"], line["content"]
    texts = isinstance(name, str) and isinstance(content, str)
    if not texts or type(label) is not int or not 0 <= label < num_classes:
        raise ValueError("an image without a name, a content, or a label of its classes")
    return name, label, content


def record_of(splits: Splits, place: str = "") -> SplitRecord:
    """The record of the splits that a run begins with."""
    parts = {
        split: RecordedPart(
            tuple(image_name(source, splits.root) for source in images.sources),
            images.labels,
            tuple(contents_of(images.sources)),
        )
        for split, images in splits.parts.items()
    }
    return SplitRecord(splits.train.class_names, parts, place)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A recorded split, found again in the data as they are now; each array is (N,) per part."""

    record: SplitRecord
    inventory: Inventory
    found: dict[str, npt.NDArray[np.int64]]  # places in `inventory.sets`; -1 if missing or changed
    changed: dict[str, npt.NDArray[np.bool_]]  # whether a file of an image's name has another content now
    renamed: dict[str, npt.NDArray[np.bool_]]  # whether an image was found by its content only
    new: int  # number of images that the record lacks

    def as_recorded(self) -> Splits:
        """The split as it was: every image in its place, `Gone` where it is missing."""
        parts = {split: self._part(split) for split in self.record.parts}
        now = self.inventory
        return Splits(parts["train"], parts["val"], parts.get("test"), now.channels, now.root)

    def _part(self, split: str) -> ImageSet:
        part, found = self.record.parts[split], self.found[split]
        begin = 0
        for images in self.inventory.sets:
            if np.array_equal(found, np.arange(begin, begin + len(images))):  # sources of shards stay that
                return ImageSet(split, images.sources, part.labels, self.record.class_names)
            begin += len(images)
        now = _all_sources(self.inventory)
        sources: list[ImageSource] = []
        for index, place in enumerate(found.tolist()):
            other = self.changed[split][index]
            reason = "another content than in training" if other else "no longer there"
            gone = Gone(part.names[index] or f"{split} image {index}", reason)
            sources.append(now[place] if place >= 0 else gone)
        return ImageSet(split, sources, part.labels, self.record.class_names)

    def present(self, split: str, class_names: tuple[str, ...]) -> ImageSet:
        """The images of a part that still exist. A renamed one has the class of its new folder."""
        found, labels = self.found[split], self.record.parts[split].labels
        there = np.flatnonzero(found >= 0)
        if not len(there):
            raise UserError(
                f"none of the {len(found)} {split} images of the run exists unchanged: "
                f"{self.note()}; restore them, or give other images to measure on"
            )
        now = _all_sources(self.inventory)
        classes = [images.class_names[label] for images in self.inventory.sets for label in images.labels]
        named = [
            classes[found[row]] if self.renamed[split][row] else self.record.class_names[labels[row]]
            for row in there
        ]
        check_known_classes(sorted(set(named)), class_names, f"{split} images")
        numbers = {name: number for number, name in enumerate(class_names)}
        return ImageSet(
            split,
            [now[place] for place in found[there].tolist()],
            np.array([numbers[name] for name in named], dtype=np.int64),
            class_names,
        )

    @property
    def complete(self) -> bool:
        """Whether every image exists under its own name, unchanged as far as contents were read."""
        renamed = any(flags.any() for flags in self.renamed.values())
        return not renamed and all((found >= 0).all() for found in self.found.values())

    def counts(self) -> dict[str, int]:
        """The number of images that are missing, changed, renamed and new."""
        by_part = {change: sum(parts.values()) for change, parts in self._by_part().items()}
        return {**by_part, "new": self.new}

    def _by_part(self) -> dict[str, dict[str, int]]:
        """The number of images per part that are missing, changed and renamed."""
        missing = {split: (found < 0) & ~self.changed[split] for split, found in self.found.items()}
        flags = {"missing": missing, "changed": self.changed, "renamed": self.renamed}
        return {
            change: {split: int(some.sum()) for split, some in parts.items()}
            for change, parts in flags.items()
        }

    def note(self) -> str:
        """The differences between the data and the record, in words; empty if there are none."""
        changes = []
        for change, parts in self._by_part().items():
            if total := sum(parts.values()):
                listed = ", ".join(f"{count:,} {split}" for split, count in parts.items() if count)
                changes.append(f"{total:,} {change} ({listed})")
        if self.new:
            changes.append(f"{self.new:,} new")
        had = set(self.record.class_names)
        has = {name for images in self.inventory.sets for name in images.class_names}
        labelled = had != {"image"}
        for change, classes in (("gone", had - has), ("new", has - had)):
            if classes and labelled:
                changes.append(f"classes {change}: {_first(sorted(classes))}")
        names = [
            self.record.parts[split].names[index]
            for split, found in self.found.items()
            for index in np.flatnonzero(found < 0)
        ]
        absent = [name for name in names if name]
        return ", ".join(changes) + (f": {_first(absent)}" if absent else "")


def _first(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _all_sources(inventory: Inventory) -> list[ImageSource]:
    return list(itertools.chain.from_iterable(images.sources for images in inventory.sets))


def restore(record: SplitRecord, inventory: Inventory, check: Collection[str]) -> Restored:
    """Find the images of a recorded split in the data as they are now: by name (in the parts in `check`, only
    if the content is the same as well), the rest by content among images that the record does not name."""
    sources = _all_sources(inventory)
    names = [image_name(source, inventory.root) for source in sources]
    recorded = {name: split for split, part in record.parts.items() for name in part.names if name}
    read = [index for index, name in enumerate(names) if not name or recorded.get(name) in {None, *check}]
    contents = dict(zip(read, contents_of([sources[index] for index in read]), strict=True))
    by_name = {name: index for index, name in enumerate(names) if name}

    found = {split: np.full(len(part.names), -1, dtype=np.int64) for split, part in record.parts.items()}
    for split, part in record.parts.items():
        for index, (name, content) in enumerate(zip(part.names, part.contents, strict=True)):
            place = by_name.get(name)
            if place is not None and contents.get(place, content) == content:
                found[split][index] = place

    claimed = {place for places in found.values() for place in places.tolist()}
    pool: dict[str, deque[int]] = defaultdict(deque)  # images that no name claims, by content
    for index, content in contents.items():
        if index not in claimed:
            pool[content].append(index)
    renamed = {split: np.zeros(len(part.names), dtype=np.bool_) for split, part in record.parts.items()}
    changed = {split: np.zeros(len(part.names), dtype=np.bool_) for split, part in record.parts.items()}
    for split, part in record.parts.items():
        for index in np.flatnonzero(found[split] < 0).tolist():
            name, same = part.names[index], pool.get(part.contents[index])
            if same and part.contents[index] != UNREADABLE:
                found[split][index] = same.popleft()
                renamed[split][index] = bool(name)
            else:
                changed[split][index] = name in by_name
    claimed = {place for places in found.values() for place in places.tolist()}
    new = sum(1 for index, name in enumerate(names) if index not in claimed and name not in recorded)
    return Restored(record, inventory, found, changed, renamed, new)
