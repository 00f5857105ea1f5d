"""The rows of a table, checked against each other, and the sets of images that they make."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vitascope.data.formats.folder import OUTSIDE
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError
from vitascope.formatting import listed


@dataclasses.dataclass(frozen=True)
class LabelledRows:
    """Paths, the names of their classes, splits and groups, each (N,)."""

    paths: Sequence[str]
    classes: Sequence[tuple[str, ...]] | None
    """None for a table without labels."""
    several: bool
    """Whether an image may have any number of classes; else one without any is unlabelled."""
    splits: Sequence[str]
    groups: Sequence[str]
    """Empty without groups; an empty one is that of an image without a group."""

    def __len__(self) -> int:
        return len(self.paths)

    def without_copies(self, place: Path) -> LabelledRows:
        """One row of those that repeat an image; a UserError if they differ."""
        if len(set(self.paths)) == len(self):
            return self
        first: dict[str, int] = {}
        for row, path in enumerate(self.paths):
            before = first.setdefault(path, row)
            for what, values in (("labels", self.classes), ("splits", self.splits), ("groups", self.groups)):
                if values and values[before] != values[row]:
                    different = " and ".join(repr(_in_words(values[each])) for each in (before, row))
                    raise UserError(
                        f"{place}: {path} is in several rows, with different {what}: {different} in rows "
                        f"{before + 1:,} and {row + 1:,}; give each image one row with all that it has"
                    )
        return self._take(list(first.values()))

    def check_groups(self, column: str) -> None:
        """Reject groups that the splits divide, with the numbers."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for group, split in zip(self.groups, self.splits, strict=True) if self.groups else ():
            if group and split != OUTSIDE:
                found[group][split] += 1
        divided = {group: splits for group, splits in found.items() if len(splits) > 1}
        if divided:
            some = [
                f"{group} ({', '.join(f'{count:,} {split}' for split, count in splits.items())})"
                for group, splits in divided.items()
            ]
            raise UserError(
                f"{column}: {len(divided):,} of {len(found):,} groups are in several splits: "
                f"{listed(some)}; correct the splits, or leave them out, so that they are drawn by group, "
                "with columns split="
            )

    def with_secret_labels_outside(self) -> LabelledRows:
        """The same rows, but those of a split without any label beside labelled ones are in no split: the
        labels of a competition's test images are secret."""
        if self.classes is None:
            return self
        labelled = {split for split, classes in zip(self.splits, self.classes, strict=True) if classes}
        return dataclasses.replace(
            self, splits=[split if split in labelled else OUTSIDE for split in self.splits]
        )

    def sets(self) -> Iterator[ImageSet]:
        """The images of each split: the labelled ones, and those without a label."""
        by_split: dict[str, list[int]] = defaultdict(list)
        for row, split in enumerate(self.splits):
            by_split[split].append(row)
        for split, rows in by_split.items():
            labelled = [row for row in rows if self._is_labelled(row, split)]
            if labelled:
                yield self._set(split, labelled)
            if len(labelled) < len(rows):
                some = set(labelled)
                without = [row for row in rows if row not in some]
                yield dataclasses.replace(self, classes=None)._set(split, without)

    def _is_labelled(self, row: int, split: str) -> bool:
        if self.classes is None:
            return False
        return bool(self.classes[row]) or (self.several and split != OUTSIDE)

    def _set(self, split: str, rows: Sequence[int]) -> ImageSet:
        """The images of some rows, in the order of their classes and paths."""
        chosen = self._take(rows)
        classes = chosen.classes
        names = () if classes is None else tuple(sorted(set().union(*set(classes))))
        # The order of `Path`, which is that of its parts.
        by_path = sorted(range(len(chosen)), key=lambda row: chosen.paths[row].split("/"))
        if classes is not None and not self.several:
            by_path.sort(key=classes.__getitem__)
        ordered = chosen._take(by_path)
        targets = None
        if ordered.classes is not None:
            targets = (ClassSets if self.several else ClassIndices).of_names(ordered.classes, names)
        groups = [group or path for group, path in zip(ordered.groups, ordered.paths, strict=False)]
        return ImageSet(
            split, [Path(path) for path in ordered.paths], targets, groups=np.array(groups, dtype=np.str_)
        )

    def _take(self, rows: Sequence[int]) -> LabelledRows:
        """Some of the rows, in the order given."""
        return dataclasses.replace(
            self,
            paths=[self.paths[row] for row in rows],
            classes=None if self.classes is None else [self.classes[row] for row in rows],
            splits=[self.splits[row] for row in rows],
            groups=[self.groups[row] for row in rows] if self.groups else (),
        )


def _in_words(value: str | tuple[str, ...]) -> str:
    """A label, a split or a group."""
    return value if isinstance(value, str) else ", ".join(value)
