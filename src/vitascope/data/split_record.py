"""A run's record of its split: the part of every image, by name and by content.

A split is drawn from the images in a folder, so that adding or deleting an image moves others from one part
to another. The record keeps every image in the part that it was in when the run began.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import zlib
from collections import defaultdict, deque
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitascope.data.contents import UNREADABLE, contents_of, image_name
from vitascope.data.decoding import Encoded, ImageSource
from vitascope.data.splits import ImageSet, Inventory, LazySources, Splits, check_known_classes
from vitascope.errors import UserError

VERSION = 1
_FAULTS = (OSError, EOFError, zlib.error, RecursionError, ValueError, KeyError, TypeError, AttributeError)
_NAMED = 3  # images that a message names


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
    contents: npt.NDArray[np.bytes_]  # (N,), from `contents_of`


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
        known = set(self.parts["train"].contents.tolist()) - {UNREADABLE}
        return np.isin(images.identified().contents, np.array(list(known), dtype=np.bytes_))

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
                for name, label, content in zip(
                    part.names, part.labels.tolist(), part.contents.tolist(), strict=True
                ):
                    line = {"split": split, "name": name, "label": label, "content": content.decode()}
                    packed.write(json.dumps(line).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> SplitRecord:
        """The record in a file of `write`."""
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                head = json.loads(file.readline())
                if head["version"] != VERSION:
                    raise UserError(
                        f"{path}: version {head['version']!r}, this vitascope reads {VERSION}; update it"
                    )
                lines: dict[str, list[tuple[str, int, str]]] = {split: [] for split in head["parts"]}
                for line in map(json.loads, file):
                    lines[line["split"]].append((line["name"], line["label"], line["content"]))
            parts = {}
            for split, found in lines.items():
                names, labels, contents = zip(*found, strict=True) if found else ((), (), ())
                parts[split] = RecordedPart(
                    names, np.array(labels, dtype=np.int64), np.array(contents, dtype=np.bytes_)
                )
            record = cls(tuple(head["class_names"]), parts, head["data"])
            if record.images() != head["images"] or not {"train", "val"} <= parts.keys():
                raise ValueError(f"{record.images()} of {head['images']} images")
        except UserError:
            raise
        except _FAULTS as error:
            raise UserError(
                f"{path} is damaged ({error}); restore it, or remove it to skip the check of the split"
            ) from error
        return record


def record_of(splits: Splits, place: str = "") -> SplitRecord:
    """The record of the splits that a run begins with."""
    parts = {
        split: RecordedPart(
            tuple(image_name(source, splits.root) for source in images.sources),
            images.labels,
            images.contents,
        )
        for split, images in splits.identified().parts.items()
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
            inside = bool(((begin <= found) & (found < begin + len(images))).all())
            if inside and isinstance(images.sources, LazySources):  # sources of shards stay that
                sources = images.sources.take(found - begin)
                return ImageSet(split, sources, part.labels, self.record.class_names, part.contents)
            begin += len(images)
        now = _all_sources(self.inventory)
        listed: list[ImageSource] = []
        for index, place in enumerate(found.tolist()):
            other = self.changed[split][index]
            reason = "another content than in training" if other else "no longer there"
            gone = Gone(part.names[index] or f"{split} image {index}", reason)
            listed.append(now[place] if place >= 0 else gone)
        return ImageSet(split, listed, part.labels, self.record.class_names, part.contents)

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
    contents = dict(zip(read, contents_of([sources[index] for index in read]).tolist(), strict=True))
    by_name = {name: index for index, name in enumerate(names) if name}

    found = {split: np.full(len(part.names), -1, dtype=np.int64) for split, part in record.parts.items()}
    for split, part in record.parts.items():
        for index, (name, content) in enumerate(zip(part.names, part.contents.tolist(), strict=True)):
            place = by_name.get(name)
            if place is not None and contents.get(place, content) == content:
                found[split][index] = place

    claimed = {place for places in found.values() for place in places.tolist()}
    pool: dict[bytes, deque[int]] = defaultdict(deque)  # images that no name claims, by content
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
