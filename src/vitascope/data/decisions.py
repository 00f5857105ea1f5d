"""Decisions on the images of a data set: to keep, leave out or relabel each. An audit's page writes them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from vitascope.data.contents import contents_of, image_name
from vitascope.data.decoding import ImageSource
from vitascope.data.formats.table_file import read_table
from vitascope.data.splits import ImageSet, Inventory
from vitascope.data.table_options import is_table
from vitascope.data.targets import Targets
from vitascope.errors import UserError, suggestion
from vitascope.formatting import canonical, counted, listed

Choice = Literal["keep", "drop", "relabel"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
COLUMNS = ("image", "content", "decision", "label")
"""Of a file of decisions; `label` is that of `relabel`, with `SEPARATOR` between several classes."""
SEPARATOR = ";"
_CLASSES = 8  # that a message names
_Key = tuple[str, str]  # the name and the content of an image


def decided_names(
    sources: Sequence[ImageSource], root: Path | str | None, contents: npt.NDArray[np.bytes_]
) -> list[str]:
    """The name of each of N images in a file of decisions: its path below the data's folder. Pixels in memory
    have none, and get their number among the images of the same content, which are all given.

    Args:
        root: as in `image_name`.
        contents: from `contents_of`, (N,).
    """
    copies: Counter[bytes] = Counter()
    names = [_name(source, root) for source in sources]
    for index, content in enumerate(contents.tolist()):
        if not names[index]:
            copies[content] += 1
            names[index] = str(copies[content])
    return names


def _name(source: ImageSource, root: Path | str | None) -> str:
    """The `image_name` in Unicode's composed form; what is no Unicode is escaped."""
    return canonical(image_name(source, root).encode("utf-8", "backslashreplace").decode())


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do with an image; `label` is the class to relabel it to, or its classes."""

    choice: Choice
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Decisions:
    """The decisions in a file, by the name and the content of the image."""

    path: str
    by_image: dict[_Key, Decision]

    @classmethod
    def read(cls, path: str) -> Decisions:
        """Read the `decisions.csv` that an audit's page downloads.

        Raises:
            UserError: no such file, no file of decisions, an unknown decision, a relabelling without a class,
                two decisions on one image.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            raise UserError(f"{path}: no such file; it is the decisions.csv that an audit's page downloads")
        if not is_table(path):
            raise UserError(f"{path}: not a file of decisions, which is a table, such as decisions.csv")
        table = read_table(file)
        if {"issue", "score"} <= {*table.names}:
            raise UserError(
                f"{path}: a list of findings, not of decisions; decide on them in the page beside it, "
                "audit.html, and download decisions.csv there"
            )
        if absent := [name for name in COLUMNS if name not in table.names]:
            raise UserError(
                f"{path}: not a file of decisions, because it has no column {absent[0]}; an audit's page "
                "downloads one as decisions.csv"
            )
        by_image: dict[_Key, Decision] = {}
        rows = zip(*(table.columns[name] for name in COLUMNS), strict=True)
        for number, (image, content, choice, label) in enumerate(rows, 1):
            row = f"{path}: row {number:,} ({image})"
            match choice.strip().lower():
                case "keep" | "drop" as plain:
                    decision = Decision(plain)
                case "relabel":
                    decision = Decision("relabel", label.strip())
                    if not decision.label:
                        raise UserError(f"{row}: relabel without a class in the column label")
                case _:
                    close = suggestion(choice, CHOICES)
                    raise UserError(
                        f"{row}: unknown decision {choice!r}{close}; it is one of {', '.join(CHOICES)}"
                    )
            before = by_image.setdefault((canonical(image), content.strip()), decision)
            if before != decision:
                raise UserError(f"{row}: has two decisions, {_in_words(before)} and {_in_words(decision)}")
        return cls(path, by_image)

    def applied(self, inventory: Inventory) -> Inventory:
        """The data without the dropped images, and with the new labels, as if their files had been deleted or
        moved; a note counts them. A class without any image left is none of the classes.

        Raises:
            UserError: none of the images is there; no image of a split is left; an unknown class.
        """
        sources = [source for images in inventory.sets for source in images.sources]
        found = self._found(sources, inventory.root)
        absent = len(self.by_image) - len({key for key, _ in found.values()})
        if self.by_image and not found:
            raise UserError(
                f"{self.path}: decisions for other data: of {counted(len(self.by_image), 'image')}, none is "
                "there with the same content"
            )
        known = tuple(dict.fromkeys(name for images in inventory.sets for name in images.class_names))
        sets, begin = [], 0
        for images in inventory.sets:
            places = range(begin, begin + len(images))
            own = {at - begin: found[at] for at in places if at in found}
            sets.append(self._decided(images, own, known))
            begin += len(images)
        for name in dict.fromkeys(images.name for images in inventory.sets if len(images)):
            if not any(len(images) for images in sets if images.name == name):
                raise UserError(f"{self.path}: drops all images of {name}; keep some of them")
        counts = Counter(decision.choice for _, decision in found.values())
        note = f"audit: {counted(counts['drop'], 'image')} left out, {counts['relabel']:,} relabelled"
        if absent:
            of = f"{absent:,} of {counted(len(self.by_image), 'decision')}"
            note += f"; {of} without effect, because the image is missing or has another content now"
        kept = {name for images in sets for name in images.class_names}
        if gone := [name for name in known if name not in kept]:
            note += f"; no image is left of {listed(gone, _CLASSES)}"
        return dataclasses.replace(inventory, sets=tuple(sets), notes=(*inventory.notes, note))

    def _found(
        self, sources: Sequence[ImageSource], root: Path | str | None
    ) -> dict[int, tuple[_Key, Decision]]:
        """The images with a decision, by their index; only contents that may be theirs are read."""
        wanted = {name for name, _ in self.by_image}
        names = [_name(source, root) for source in sources]
        some = [index for index, name in enumerate(names) if not name or name in wanted]
        those = [sources[index] for index in some]
        contents = contents_of(those)
        keys = zip(
            decided_names(those, root, contents), (text.decode() for text in contents.tolist()), strict=True
        )
        return {
            index: (key, self.by_image[key])
            for index, key in zip(some, keys, strict=True)
            if key in self.by_image
        }

    def _decided(
        self, images: ImageSet, found: dict[int, tuple[_Key, Decision]], known: Sequence[str]
    ) -> ImageSet:
        """A set without its dropped images, with new labels, without classes that have lost all images."""
        if not found:
            return images
        kept = np.setdiff1d(
            np.arange(len(images)), [at for at, (_, d) in found.items() if d.choice == "drop"]
        )
        targets = images.targets
        relabelled = {at: value for at, value in found.items() if value[1].choice == "relabel"}
        if relabelled and targets is None:
            (name, _), _ = next(iter(relabelled.values()))
            raise UserError(f"{self.path}: {name} has no label, so it cannot be relabelled")
        if targets is None:
            return images.subset(images.name, kept)
        names = targets.names()
        for at, ((name, _), decision) in relabelled.items():
            names[at] = self._classes(name, decision.label, targets, known)
        lost = {name for name, count in zip(targets.class_names, targets.counts, strict=True) if count}
        left = [names[at] for at in kept.tolist()]
        lost -= set().union(*left)
        new = dict.fromkeys(name for row in left for name in row)
        class_names = tuple(name for name in dict.fromkeys([*targets.class_names, *new]) if name not in lost)
        return dataclasses.replace(
            images.subset(images.name, kept), targets=targets.of_names(left, class_names)
        )

    def _classes(self, image: str, label: str, targets: Targets, known: Sequence[str]) -> tuple[str, ...]:
        """The classes of a new label, all of them known."""
        parts = [label] if targets.exclusive else [part.strip() for part in label.split(SEPARATOR)]
        for part in parts:
            if canonical(part) not in known:
                classes = suggestion(part, known) or f"; the classes are {listed(known, _CLASSES)}"
                raise UserError(f"{self.path}: {image}: unknown class {part!r}{classes}")
        return tuple(dict.fromkeys(map(canonical, parts)))


def _in_words(decision: Decision) -> str:
    return f"{decision.choice} {decision.label}".strip()
