"""Decisions on images: to keep, drop or relabel each. The page of an audit downloads them as CSV, and in
`audit.csv` they are filled in: a row without a decision is none."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from vitascope.data.contents import image_name
from vitascope.data.formats.table_file import read_table
from vitascope.data.splits import ImageSet, Inventory
from vitascope.data.table_options import is_table
from vitascope.errors import UserError, check_choice, suggestion
from vitascope.formatting import canonical, counted, listed
from vitascope.models.decoding import ImageSource

COLUMNS = ("image", "content", "decision", "label")
"""Of a file of decisions."""
CHOICES = ("keep", "drop", "relabel")
Decision: TypeAlias = tuple[str, str]
"""One of `CHOICES`, and the new label of `relabel`."""
_CLASSES = 8  # that a message names


def decided_names(
    sources: Sequence[ImageSource], root: Path | str | None, contents: npt.NDArray[np.bytes_]
) -> list[str]:
    """The names of N images in a file of decisions: their paths below the data's folder, in Unicode's
    composed form, with escapes for what is no Unicode. An image in memory has its number among the images of
    its content, all of which must be given.

    Args:
        root: as in `image_name`.
        contents: from `contents_of`, (N,).
    """
    names, copies = [], Counter[bytes]()
    for source, content in zip(sources, contents.tolist(), strict=True):
        name = image_name(source, root).encode("utf-8", "backslashreplace").decode()
        copies[content] += not name
        names.append(canonical(name) or str(copies[content]))
    return names


def decided_in(notes: Sequence[str], part: str) -> str:
    """The note of data whose decisions have changed a part, such as "test"; empty for other data."""
    return next((note for note in notes if note.startswith(f"audit, {part}: ")), "")


def _changes(dropped: int, relabelled: int) -> str:
    return f"{counted(dropped, 'image')} left out, {relabelled:,} relabelled"


def _unescaped(text: str) -> str:
    """A cell without the apostrophe that `csv_text` puts before what a spreadsheet would compute."""
    return text[1:] if text[:1] == "'" and text[1:2] in ("=", "+", "-", "@") else text


@dataclasses.dataclass(frozen=True)
class Decisions:
    """The decisions in a file, by the name and the content of the image."""

    path: str
    by_image: dict[tuple[str, str], Decision]

    @classmethod
    def read(cls, path: str) -> Self:
        """Read a file of decisions.

        Raises:
            UserError: no such file, another kind of file, an unknown decision, a relabelling without a label,
                two decisions on one image.
        """
        file = Path(path).expanduser()
        if not file.is_file() or not is_table(path):
            reason = "not a file of decisions" if file.exists() else "no such file"
            raise UserError(f"{path}: {reason}; the page of an audit downloads one, decisions.csv")
        table = read_table(file)
        if absent := [name for name in COLUMNS if name not in table.names]:
            kind = "findings, not" if "issue" in table.names else "something else than"
            raise UserError(
                f"{path}: a table of {kind} decisions (no column {absent[0]}); decide in the page of the "
                "audit, audit.html, and download decisions.csv there, or fill in that column of audit.csv"
            )
        by_image: dict[tuple[str, str], Decision] = {}
        rows = zip(*(table.columns[name] for name in COLUMNS), strict=True)
        for number, (image, content, choice, label) in enumerate(rows, 1):
            row = f"{path}, row {number:,}, {image}"
            choice, label = choice.strip().lower(), _unescaped(label.strip())
            if not choice:
                continue
            check_choice(f"decision in {row}:", choice, CHOICES)
            if choice == "relabel" and not label:
                raise UserError(f"{row}: relabel without a label")
            decision = (choice, label if choice == "relabel" else "")
            before = by_image.setdefault((canonical(_unescaped(image)), content.strip()), decision)
            if before != decision:
                both = " and ".join(" ".join(each).strip() for each in (before, decision))
                raise UserError(f"{row}: two decisions on this image, {both}")
        return cls(path, by_image)

    def applied(self, inventory: Inventory) -> Inventory:
        """The data as if the files of dropped images were deleted, and those of relabelled ones moved; notes
        count both, in each part and then in all. Of an image that has another content now, the decision does
        not count.

        Raises:
            UserError: none of the images is there; no image of a split is left; an unknown class.
        """
        identified = [images.identified() for images in inventory.sets]
        sources = [source for images in identified for source in images.sources]
        contents = np.concatenate([images.contents for images in identified])
        names = decided_names(sources, inventory.root, contents)
        keys = list(zip(names, map(bytes.decode, contents.tolist()), strict=True))
        counts = Counter(self.by_image[key][0] for key in keys if key in self.by_image)
        parts = [images.name for images in identified for _ in range(len(images))]
        by_part = Counter(
            (part, self.by_image.get(key, ("",))[0]) for part, key in zip(parts, keys, strict=True)
        )
        if self.by_image and not counts:
            of = counted(len(self.by_image), "image")
            raise UserError(f"{self.path}: decisions for other data: of {of}, none is there with its content")
        known = tuple(dict.fromkeys(name for images in identified for name in images.class_names))
        decisions = iter([self.by_image.get(key, ("keep", "")) for key in keys])
        sets = [self._decided(images, list(islice(decisions, len(images))), known) for images in identified]
        left = {images.name for images in sets if len(images)}
        if lost := [images.name for images in inventory.sets if len(images) and images.name not in left]:
            raise UserError(f"{self.path}: drops all images of {lost[0]}; keep some of them")
        changes = [
            (part, by_part[part, "drop"], by_part[part, "relabel"]) for part in ("train", "val", "test")
        ]
        of_parts = [f"audit, {part}: {_changes(*numbers)}" for part, *numbers in changes if any(numbers)]
        note = f"audit: {_changes(counts['drop'], counts['relabel'])}"
        if absent := len(self.by_image) - counts.total():
            note += f"; {counted(absent, 'decision')} on images that are missing or changed"
        if gone := sorted({*known}.difference(*(images.class_names for images in sets))):
            note += f"; no image is left of {listed(gone, _CLASSES)}"
        return dataclasses.replace(inventory, sets=tuple(sets), notes=(*inventory.notes, *of_parts, note))

    def settle(self, names: Sequence[str], contents: npt.NDArray[np.bytes_]) -> npt.NDArray[np.bool_]:
        """Whether each of N images, by `decided_names`, was looked at and kept or relabelled, (N,)."""
        keys = zip(names, map(bytes.decode, contents.tolist()), strict=True)
        return np.array(
            [self.by_image.get(key, ("", ""))[0] in ("keep", "relabel") for key in keys], np.bool_
        )

    def _decided(self, images: ImageSet, decisions: Sequence[Decision], known: Sequence[str]) -> ImageSet:
        """A set after the decisions on its images, without the classes that have lost all their images."""
        kept = np.flatnonzero([choice != "drop" for choice, _ in decisions])
        relabelled = {n: label for n, (_, label) in enumerate(decisions) if label}
        some, targets = images.subset(images.name, kept), images.targets
        if targets is None and relabelled:
            raise UserError(
                f"{self.path}: relabels an image that has no label, as {next(iter(relabelled.values()))}"
            )
        if targets is None:
            return some
        names = targets.names()
        before = {name for row in names for name in row}
        for n, label in relabelled.items():
            names[n] = tuple(dict.fromkeys(map(canonical, targets.names_in(label))))
            if unknown := [name for name in names[n] if name not in known]:
                close = suggestion(unknown[0], known) or f"; the classes are {listed(known, _CLASSES)}"
                raise UserError(f"{self.path}: relabels an image as {unknown[0]!r}, an unknown class{close}")
        after = [names[n] for n in kept.tolist()]
        present = dict.fromkeys(name for row in after for name in row)
        lost = before - present.keys()
        every = dict.fromkeys([*targets.class_names, *present])
        class_names = tuple(name for name in every if name not in lost)
        return dataclasses.replace(some, targets=targets.take(kept).relabelled(after, class_names))
