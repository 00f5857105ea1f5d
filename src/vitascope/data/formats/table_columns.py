"""The columns of a table by their role, image, label, split or group: named, or known by their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from difflib import get_close_matches

from vitascope.data.table_options import ROLES, TableOptions
from vitascope.errors import UserError, nearest
from vitascope.formatting import canonical, listed

USUAL: dict[str, tuple[str, ...]] = {
    "image": ("image", "file", "filename", "filepath", "path", "image_path"),
    "label": ("label", "labels", "class", "category", "target", "tags"),
    "split": ("split", "fold", "set"),
    "group": (),
}
"""Usual names of the columns, in any case; a group is only named."""
LESS_USUAL = ("image_id", "image_name", "file_name")  # where no column has a usual name
_BOXES = (
    *({name} for name in ("bbox", "bboxes", "box", "boxes", "bounding_box", "objects")),
    {"x", "y", "width", "height"},
    {"x", "y", "w", "h"},
    {"xmin", "ymin", "xmax", "ymax"},
    {"x_min", "y_min", "x_max", "y_max"},
    {"x1", "y1", "x2", "y2"},
)
LISTED = 8
"""Columns that a message names."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """The columns of a table that are used."""

    image: str
    label: tuple[str, ...]
    """One column, or several of 0 and 1; none if no column is known to be one of labels."""
    split: str | None
    group: str | None
    guess_label: bool
    """Whether the columns of 0 and 1 are those of labels, if there is no other."""


def roles_of(names: Sequence[str], options: TableOptions, place: object) -> Roles:
    """The roles of the columns with these names; a UserError that names the columns where one is unclear."""
    image = image_column(names, options, place)
    found = {role: _column(role, names, options, place) for role in ROLES if role != "image"}
    named = options.named
    lower = {name.lower() for name in names} - {name.lower() for name in named.values()}
    boxes = next((box for box in _BOXES if box <= lower), None)
    if boxes is not None and not {"image", "label"} <= named.keys():
        raise UserError(
            f"{place}: a table of boxes ({listed(sorted(boxes), LISTED)}), and vitascope learns classes of "
            "whole images, not boxes; if it has these too, name their columns: columns image=COLUMN "
            "label=COLUMN"
        )
    label = found["label"]
    labels = () if label is None else (label,) if label in names else tuple(label.split(","))
    guess = "label" not in named
    return Roles(image, labels, found["split"], found["group"], guess)


def image_column(names: Sequence[str], options: TableOptions, place: object) -> str:
    """The column of image paths; as `roles_of`."""
    found = _column("image", names, options, place)
    if found is None:
        meant = next((name for name in names if get_close_matches(name.lower(), USUAL["image"])), "COLUMN")
        raise UserError(
            f"{place}: no column of image paths among {listed(names, LISTED)}; name it: columns image={meant}"
        )
    return found


def _column(role: str, names: Sequence[str], options: TableOptions, place: object) -> str | None:
    """The column of a role; of labels, perhaps several, separated by commas."""
    if role in options.named:
        own = {canonical(each): each for each in names}
        name = own.get(canonical(options.named[role]), options.named[role])
        parts = name.split(",") if role == "label" and name not in names else [name]
        parts = [own.get(canonical(part), part) for part in parts]
        if name and (absent := [part for part in parts if part not in names]):
            raise UserError(
                f"{place}: no column {absent[0]!r}{nearest(absent[0], names)}; it has {listed(names, LISTED)}"
            )
        return ",".join(parts) or None
    taken = set(options.named.values())
    for usual in (USUAL[role], LESS_USUAL if role == "image" else ()):
        found = [name for name in names if name.lower() in usual and name not in taken]
        if len(found) > 1:
            raise UserError(
                f"{place}: the columns {listed(found)} may each be that of the {role}; name the one that is: "
                f"columns {role}={found[0]}"
            )
        if found:
            return found[0]
    return None
