"""How a table of images is read. No torch: the options are part of a run's configuration."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import tyro

from vitascope.arguments import NamesFile, Range, check_fields
from vitascope.data.listing import suffix_of
from vitascope.errors import UserError, check_choice, suggestion
from vitascope.formatting import canonical, listed

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
"""Suffixes of tables, in any case."""
ROLES = ("image", "label", "split", "group", "fold")
"""The purposes of columns."""
ABOUT_IMAGES = ("audit", "min_images", "rare")
"""The options of any data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How a table is read, where DATA is one, and decisions on the images of any DATA (docs/data.md)."""

    columns: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROLE=COLUMN ...", help_behavior_hint="")] = ()
    """Columns of the roles image, label, split, group and fold: `image=path label=tags group=patient`.
    A label may be several columns of 0 and 1, separated by commas; `split=` uses no column.
    Default: by their usual names, and no group."""
    images: Annotated[str | None, NamesFile(), tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Folder that the paths of the images are relative to. Default: that of the table."""
    labels: Annotated[
        Literal["one", "several"] | None,
        tyro.conf.arg(metavar="{one,several}", help_behavior_hint=""),
    ] = None
    """Number of classes per image. Default: by the cells."""
    label_separator: Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")] = None
    """Text between the classes in a cell. Default: by the cells."""
    blank: Literal["zero", "unknown"] = "zero"
    """Meaning of a blank cell in columns of 0 and 1; -1 is unknown there.
    What is unknown counts neither in the loss nor in the measures."""
    audit: Annotated[str | None, NamesFile(), tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Decisions on the images of any DATA: the decisions.csv that an audit's page downloads.
    Dropped images are left out, others relabelled. Default: every image, with its own label."""
    min_images: Annotated[int, Range(ge=1)] = 1
    """Leave out the classes that have fewer training images, with a line that names them."""
    rare: Literal["reject", "train"] = "reject"
    """Classes of too few images for every part: `train` keeps all of them in training.
    Validation and test then measure the other classes."""

    def __post_init__(self) -> None:
        """Check the options; a mapping of columns becomes ROLE=COLUMN each, a path its text."""
        for name in ("images", "audit"):
            if isinstance(value := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        if isinstance(self.columns, Mapping):
            pairs = tuple(f"{role}={name or ''}" for role, name in self.columns.items())
            object.__setattr__(self, "columns", pairs)
        check_fields(self)
        roles = [text.partition("=")[0] for text in self.columns]
        for role, text in zip(roles, self.columns, strict=True):
            if "=" not in text:
                raise UserError(f"columns: expected ROLE=COLUMN, such as label=tags, not {text!r}")
            check_choice("role of a column", role, ROLES)
        if len(set(roles)) < len(roles):
            raise UserError(f"columns: a role is given twice in {' '.join(self.columns)}")
        if self.label_separator == "":
            raise UserError("label_separator must be some text, such as ';'")

    @property
    def named(self) -> dict[str, str]:
        """The named column of each role that is named; empty for a role without a column."""
        return {role: name for role, _, name in (text.partition("=") for text in self.columns)}

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the options of a table that are set."""
        return tuple(name for name in self._set if name not in ABOUT_IMAGES)

    @property
    def about_images(self) -> tuple[str, ...]:
        """The names of the options of any data that are set: of images and classes."""
        return tuple(name for name in self._set if name in ABOUT_IMAGES)

    def of_images(self) -> "TableOptions":
        """The same without the options of a table."""
        return TableOptions(**{name: getattr(self, name) for name in self.about_images})

    @property
    def _set(self) -> list[str]:
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]


DataOptions = Annotated[TableOptions, tyro.conf.arg(name="data")]
"""The group `data options` of the help."""
AS_RECOGNIZED = TableOptions()
"""Nothing is named: columns and labels are recognized."""


def is_table(data: str) -> bool:
    """Whether a name is that of a table."""
    return suffix_of(data) in TABLE_SUFFIXES


USUAL: dict[str, tuple[str, ...]] = {
    "image": ("image", "file", "filename", "filepath", "path", "image_path"),
    "label": ("label", "labels", "class", "category", "target", "tags"),
    "split": ("split", "set"),
    "group": (),
    "fold": ("fold",),
}
"""Usual names of the columns, in any case; a group is only named."""
LESS_USUAL = ("image_id", "image_name", "file_name")  # where no column has a usual name
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
    fold: str | None
    guess_label: bool
    """Whether the columns of 0 and 1 are those of labels, if there is no other."""


def roles_of(names: Sequence[str], options: TableOptions, place: object) -> Roles:
    """The roles of the columns with these names; a UserError that names the columns where one is unclear."""
    label, *others = (_columns(role, names, options, place) for role in ROLES[1:])
    split, group, fold = (next(iter(columns), None) for columns in others)
    image = image_column(names, options, place)
    return Roles(image, label, split, group, fold, guess_label="label" not in options.named)


def image_column(names: Sequence[str], options: TableOptions, place: object) -> str:
    """The column of image paths; as `roles_of`."""
    for column in _columns("image", names, options, place):
        return column
    raise UserError(
        f"{place}: no column of image paths among {listed(names, LISTED)}; name it: columns image=COLUMN"
    )


def _columns(role: str, names: Sequence[str], options: TableOptions, place: object) -> tuple[str, ...]:
    """The columns of a role: none, one, or several of labels."""
    named = {role: canonical(name) for role, name in options.named.items()}
    stored = {canonical(name): name for name in names}
    if role in named:
        several = role == "label" and named[role] not in stored
        columns = tuple(filter(None, named[role].split(",") if several else [named[role]]))
        if absent := [column for column in columns if column not in stored]:
            close = suggestion(absent[0], names)
            raise UserError(f"{place}: no column {absent[0]!r}{close}; it has {listed(names, LISTED)}")
        return tuple(stored[column] for column in columns)
    for usual in (USUAL[role], LESS_USUAL if role == "image" else ()):
        columns = tuple(name for name in names if name.lower() in usual and name not in named.values())
        if len(columns) > 1:
            raise UserError(
                f"{place}: the columns {listed(columns)} may each be that of the {role}; name the one that "
                f"is: columns {role}={columns[0]}"
            )
        if columns:
            return columns
    return ()
