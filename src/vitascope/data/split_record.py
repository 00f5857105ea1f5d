"""A run's record of its split: the part of every image, by name and by content.

A split is drawn from the images in a folder, so that adding or deleting an image moves others from one part
to another. The record keeps every image in the part that it was in when the run began.
"""

import dataclasses
import gzip
import itertools
import json
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np
import numpy.typing as npt

from vitascope.data.contents import UNREADABLE, contents_of, image_name
from vitascope.data.formats.folder import OUTSIDE
from vitascope.data.splits import ImageSet, Inventory, LazySources, Splits, check_known_classes
from vitascope.data.targets import Targets, targets_from_json
from vitascope.errors import UserError, check_choice
from vitascope.formatting import canonical
from vitascope.models.decoding import Encoded, ImageSource
from vitascope.serialization import check_record, explaining_faults, parse_json

VERSION = 2
"""Of the file; in version 1, the content of a large file was a hash of parts of it."""
_LONGEST_LINE = 1 << 24  # characters: the names of a hundred thousand classes
_HEAD = {"version": int, "images": int, "data": str, "class_names": tuple[str, ...], "parts": tuple[str, ...]}
_LINE = {"split": str, "name": str, "content": str, "fold": str, "skipped": bool}
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
    targets: Targets | None  # in the record's class names; None for images without labels
    contents: npt.NDArray[np.bytes_]  # (N,), from `contents_of`
    folds: npt.NDArray[np.str_] = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.str_))
    """(N,), as `ImageSet.folds`; (0,) without any."""

    def subset(self, rows: npt.NDArray[np.int64]) -> "RecordedPart":
        """Some of the images, in the order given."""
        targets = None if self.targets is None else self.targets.take(rows)
        names, folds = tuple(self.names[row] for row in rows.tolist()), self.folds
        return RecordedPart(names, targets, self.contents[rows], folds[rows] if len(folds) else folds)

    def with_more(self, other: "RecordedPart") -> "RecordedPart":
        """These images, and then others, with labels as these."""
        targets = self.targets
        if targets is not None and other.targets is not None:
            targets = targets.joined(other.targets)
        contents = np.concatenate([self.contents, other.contents])
        folds = np.concatenate([self.folds, other.folds])
        return RecordedPart((*self.names, *other.names), targets, contents, folds)


@dataclasses.dataclass(frozen=True)
class SplitRecord:
    """The parts of a run's data when the run began."""

    class_names: tuple[str, ...]  # none for images without labels
    parts: dict[str, RecordedPart]  # `train`, `val` and, where there was one, `test`
    place: str = ""  # the data's path relative to the run, so that a project can be moved; or empty
    skipped: dict[str, RecordedPart] = dataclasses.field(default_factory=dict)
    """Images of the parts that were missing when the run was resumed, which went on without them."""

    @property
    def measured(self) -> str:
        """The part that the finished model is measured on; of folds without test images, `train`."""
        if "test" in self.parts:
            return "test"
        return "val" if self.parts["val"].names else "train"

    def images(self) -> int:
        """The number of images in all parts, without skipped ones."""
        return sum(len(part.names) for part in self.parts.values())

    def lines(self) -> Iterator[tuple[str, RecordedPart, bool]]:
        """Each part with its images, and again with those that were skipped."""
        yield from ((split, part, False) for split, part in self.parts.items())
        yield from ((split, part, True) for split, part in self.skipped.items())

    def trained_on(self, images: ImageSet) -> npt.NDArray[np.bool_]:
        """Whether each image has the content of a training image, even of a skipped one, (N,)."""
        return self.among(images, "train")

    def among(self, images: ImageSet, split: str) -> npt.NDArray[np.bool_]:
        """Whether each image has the content of an image of the split, even of a skipped one, (N,)."""
        contents = np.concatenate([part.contents for name, part, _ in self.lines() if name == split])
        return np.isin(images.identified().contents, contents[contents != UNREADABLE])

    def write(self, path: Path) -> None:
        """Write the record as gzipped JSON lines: a header, then one line per image."""
        head = {
            "version": VERSION,
            "images": sum(len(part.names) for _, part, _ in self.lines()),
            "data": self.place,
            "class_names": self.class_names,
            "parts": list(self.parts),
        }
        with open(path, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
            packed.write(json.dumps(head).encode() + b"\n")
            for split, part, skipped in self.lines():
                more = {"skipped": True} if skipped else {}
                labels = [None] * len(part.names) if part.targets is None else part.targets.to_json()
                folds = part.folds.tolist() or [None] * len(part.names)
                rows = zip(part.names, labels, part.contents.tolist(), folds, strict=True)
                for name, label, content, fold in rows:
                    line = {"split": split, "name": name, "label": label, "content": content.decode()}
                    line |= {} if fold is None else {"fold": fold}
                    packed.write(json.dumps(line | more).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record in a file of `write`."""
        remedy = "restore it, or remove it to skip the check of the split"
        with explaining_faults(path, remedy), gzip.open(path, "rt", encoding="utf-8") as file:
            head = check_record(parse_json(file.readline(_LONGEST_LINE)), {"version": int}, ("version",))
            if head["version"] == VERSION:
                return cls._of_lines(head, file)
        version = head["version"]
        advice = "update it" if version > VERSION else "train again, or use the vitascope that wrote it"
        raise UserError(f"{path}: version {version}, this vitascope reads {VERSION}; {advice}")

    @classmethod
    def _of_lines(cls, head: dict[str, Any], file: TextIO) -> Self:
        """The record of a header and the lines below it; a ValueError for others."""
        check_record(head, _HEAD, _HEAD)
        class_names = tuple(map(canonical, head["class_names"]))
        lines: dict[bool, dict[str, list[tuple[str, Any, str, str | None]]]] = {
            False: {split: [] for split in head["parts"]},
            True: defaultdict(list),
        }
        while text := file.readline(_LONGEST_LINE):
            line = check_record(parse_json(text), _LINE, ("split", "name", "label", "content"))
            check_choice("split", line["split"], head["parts"])
            part = lines[line.get("skipped", False)][line["split"]]
            part.append((line["name"], line["label"], line["content"], line.get("fold")))
        parts, skipped = (
            {split: _recorded_part(listed, class_names) for split, listed in lines[kind].items()}
            for kind in (False, True)
        )
        record = cls(class_names, parts, head["data"], skipped)
        count = sum(len(part.names) for _, part, _ in record.lines())
        if count != head["images"] or not {"train", "val"} <= parts.keys():
            raise ValueError(f"{count} of {head['images']} images")
        return record


def _recorded_part(
    lines: Sequence[tuple[str, Any, str, str | None]], class_names: tuple[str, ...]
) -> RecordedPart:
    names, labels, contents, folds = zip(*lines, strict=True) if lines else ((), (), (), ())
    return RecordedPart(
        names,
        targets_from_json(labels, class_names),
        np.array(contents, dtype=np.bytes_),
        np.array([fold for fold in folds if fold is not None], dtype=np.str_),
    )


def record_of(splits: Splits, place: str = "") -> SplitRecord:
    """The record of the splits that a run begins with."""
    parts = {
        split: RecordedPart(
            tuple(image_name(source, splits.root) for source in images.sources),
            images.targets,
            images.contents,
            images.folds,
        )
        for split, images in splits.identified().parts.items()
    }
    return SplitRecord(splits.train.class_names, parts, place)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A recorded split, found again in the data as they are now; each array is (N,) per part."""

    record: SplitRecord
    inventory: Inventory
    names: list[str]  # of the images in `inventory.sets`, in the record's Unicode form
    found: dict[str, npt.NDArray[np.int64]]  # places in `inventory.sets`; -1 if missing or changed
    changed: dict[str, npt.NDArray[np.bool_]]  # whether a file of an image's name has another content now
    renamed: dict[str, npt.NDArray[np.bool_]]  # whether an image was found by its content only
    new: int  # number of images that the record lacks

    def as_recorded(self) -> Splits:
        """The split as it was: every image in its place, `Gone` where it is missing."""
        parts = {split: self._part(split) for split in self.record.parts}
        now = self.inventory
        drawn = tuple(split for split in parts if split not in {"train", *now.by_name})
        train, val, test = parts["train"], parts["val"], parts.get("test")
        return Splits(train, val, test, now.channels, now.root, drawn=drawn, notes=now.notes)

    def _part(self, split: str) -> ImageSet:
        part, found = self.record.parts[split], self.found[split]
        begin = 0
        for images in self.inventory.sets:
            inside = bool(((begin <= found) & (found < begin + len(images))).all())
            if inside and isinstance(images.sources, LazySources):  # sources of shards stay that
                sources = images.sources.take(found - begin)
                return ImageSet(split, sources, part.targets, part.contents, folds=part.folds)
            begin += len(images)
        now = _all_sources(self.inventory)
        listed: list[ImageSource] = []
        for index, place in enumerate(found.tolist()):
            other = self.changed[split][index]
            reason = "another content than in training" if other else "no longer there"
            gone = Gone(part.names[index] or f"{split} image {index}", reason)
            listed.append(now[place] if place >= 0 else gone)
        return ImageSet(split, listed, part.targets, part.contents, folds=part.folds)

    def present(self, split: str, class_names: tuple[str, ...]) -> ImageSet:
        """The images of a part that still exist. A renamed one has the classes of its new place, if any."""
        found, recorded = self.found[split], self.record.parts[split].targets
        there = np.flatnonzero(found >= 0)
        if not len(there):
            raise UserError(
                f"none of the {len(found)} {split} images of the run exists unchanged: "
                f"{self.note()}; restore them, or give other images to measure on"
            )
        now = _all_sources(self.inventory)
        images = ImageSet(split, [now[place] for place in found[there].tolist()])
        if recorded is None:
            return images
        classes, named = _classes(self.inventory), recorded.take(there).names()
        for at, row in enumerate(there.tolist()):
            if self.renamed[split][row] and (new := classes[found[row]]):
                named[at] = new
        check_known_classes(sorted(set().union(*named)), class_names, f"{split} images")
        return dataclasses.replace(images, targets=recorded.take(there).relabelled(named, class_names))

    def remaining(self) -> SplitRecord:
        """The record of a run that goes on without the images that are missing or changed, which are skipped
        from now on; renamed images have their new names. A part without any image left is a UserError."""
        parts, skipped = {}, dict(self.record.skipped)
        for split, part in self.record.parts.items():
            found = self.found[split]
            there, gone = np.flatnonzero(found >= 0), np.flatnonzero(found < 0)
            if not len(there):
                raise UserError(f"none of the {len(found):,} {split} images is left: {self.note()}")
            names = tuple(self.names[place] for place in found[there].tolist())
            parts[split] = dataclasses.replace(part.subset(there), names=names)
            if len(gone):
                more = part.subset(gone)
                skipped[split] = skipped[split].with_more(more) if split in skipped else more
        return dataclasses.replace(self.record, parts=parts, skipped=skipped)

    @property
    def complete(self) -> bool:
        """Whether every image exists under its own name, unchanged as far as contents were read."""
        renamed = any(flags.any() for flags in self.renamed.values())
        return not renamed and all((found >= 0).all() for found in self.found.values())

    def counts(self) -> dict[str, int]:
        """The number of images that are missing, changed, renamed and new, without skipped ones."""
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

    def _relabelled(self, classes: list[tuple[str, ...]]) -> int:
        """The number of images that have their names still, but other classes."""
        count = 0
        for split, part in self.record.parts.items():
            kept = np.flatnonzero((self.found[split] >= 0) & ~self.renamed[split])
            if part.targets is not None:
                now = (classes[place] for place in self.found[split][kept].tolist())
                was = part.targets.take(kept).names()
                count += sum(bool(new) and {*new} != {*old} for new, old in zip(now, was, strict=True))
        return count

    def note(self) -> str:
        """The differences between the data and the record, in words; empty if there are none."""
        changes = []
        if skipped := {split: len(part.names) for split, part in self.record.skipped.items()}:
            listed = ", ".join(f"{count:,} {split}" for split, count in skipped.items())
            changes.append(f"{sum(skipped.values()):,} skipped since the run was resumed ({listed})")
        for change, parts in self._by_part().items():
            if total := sum(parts.values()):
                listed = ", ".join(f"{count:,} {split}" for split, count in parts.items() if count)
                changes.append(f"{total:,} {change} ({listed})")
        classes = _classes(self.inventory)
        if relabelled := self._relabelled(classes):
            changes.append(f"{relabelled:,} with other labels, which are taken as recorded")
        if self.new:
            changes.append(f"{self.new:,} new")
        had = {name for *_, part, _ in self.record.lines() for name in _present(part)}
        has = set().union(*classes)
        for change, some in (("gone", had - has), ("new", has - had)):
            if some and self.record.class_names:
                changes.append(f"classes {change}: {_first(sorted(some))}")
        names = [
            self.record.parts[split].names[index]
            for split, found in self.found.items()
            for index in np.flatnonzero(found < 0)
        ]
        absent = [name for name in names if name]
        return ", ".join(changes) + (f": {_first(absent)}" if absent else "")


def _present(part: RecordedPart) -> list[str]:
    """The names of the classes that images of a part have, in their one form."""
    if part.targets is None:
        return []
    names = part.targets.class_names
    return [names[k] for k in np.flatnonzero(part.targets.counts)]


def _first(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _all_sources(inventory: Inventory) -> list[ImageSource]:
    return list(itertools.chain.from_iterable(images.sources for images in inventory.sets))


def _classes(inventory: Inventory) -> list[tuple[str, ...]]:
    """The names of each image's classes; none for an image without a label."""
    none: tuple[str, ...] = ()
    return [
        names
        for images in inventory.sets
        for names in ([none] * len(images) if images.targets is None else images.targets.names())
    ]


def restore(record: SplitRecord, inventory: Inventory, check: Collection[str]) -> Restored:
    """Find the images of a recorded split in the data as they are now: by name (in the parts in `check`, only
    if the content is the same as well), the rest by content among images that the record does not name."""
    sources = _all_sources(inventory)
    recorded = {name: split for split, part, _ in record.lines() for name in part.names if name}
    in_form = {canonical(name): name for name in recorded}
    listed = [image_name(source, inventory.root) for source in sources]
    there = set(listed)
    names = [
        name if name in recorded or (known := in_form.get(canonical(name), name)) in there else known
        for name in listed
    ]
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
    usable = [  # images without a label, or in no split, were there and not used
        images.name != OUTSIDE and (images.targets is not None or not record.class_names)
        for images in inventory.sets
        for _ in range(len(images))
    ]
    new = sum(
        usable[index] and index not in claimed and name not in recorded for index, name in enumerate(names)
    )
    return Restored(record, inventory, names, found, changed, renamed, new)
