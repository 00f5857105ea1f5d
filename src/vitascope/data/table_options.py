"""How a table of images is read. No torch: the options are part of a run's configuration."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Literal, get_type_hints

import tyro

from vitascope.arguments import NamesFile, check_value
from vitascope.data.listing import suffix_of
from vitascope.errors import UserError, check_choice

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
"""Suffixes of tables, in any case."""
ROLES = ("image", "label", "split", "group")
"""The purposes of columns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How a table is read, where DATA is one (docs/data.md)."""

    columns: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROLE=COLUMN ...", help_behavior_hint="")] = ()
    """Columns of the roles image, label, split and group: `image=path label=tags group=patient`.
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

    def __post_init__(self) -> None:
        """Check the options; a mapping of columns becomes ROLE=COLUMN each, a path its text."""
        if isinstance(self.images, os.PathLike):
            object.__setattr__(self, "images", os.fspath(self.images))
        if isinstance(self.columns, Mapping):
            pairs = tuple(f"{role}={name or ''}" for role, name in self.columns.items())
            object.__setattr__(self, "columns", pairs)
        for name, kind in get_type_hints(TableOptions, include_extras=True).items():
            check_value(name, getattr(self, name), kind)
        object.__setattr__(self, "columns", tuple(self.columns))
        roles = [text.partition("=")[0] for text in self.columns]
        for role, text in zip(roles, self.columns, strict=True):
            if "=" not in text:
                raise UserError(f"columns: expected ROLE=COLUMN, such as label=tags, not {text!r}")
            check_choice("role of a column", role, ROLES)
        if len(set(roles)) < len(roles):
            raise UserError(f"columns: a role is given twice in {' '.join(self.columns)}")
        if self.label_separator == "":
            raise UserError("label_separator must be some text, such as ';'")
        if self.label_separator is not None and self.labels == "one":
            raise UserError("label_separator divides a cell into several labels, but labels=one is set")

    @property
    def named(self) -> dict[str, str]:
        """The named column of each role that is named; empty for a role without a column."""
        return {role: name for role, _, name in (text.partition("=") for text in self.columns)}

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the options that are set."""
        return tuple(f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)


AS_RECOGNIZED = TableOptions()
"""Nothing is named: columns and labels are recognized."""


def is_table(data: str) -> bool:
    """Whether a name is that of a table, or of other JSON, whose reader says why it is none."""
    return suffix_of(data) in (*TABLE_SUFFIXES, ".json")
