"""The labelled pictures in a shard, by WebDataset's rule: neighbours of one key are a sample."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vitascope.data.formats.folder import IMAGE_SUFFIXES
from vitascope.data.tar import Entry, entries
from vitascope.errors import UserError

MAX_PICTURE = 2**30
"""Bytes of an encoded picture; a larger one is no picture, and would fill the memory."""
MAX_LABEL = {"cls": 18, "json": 2**20}
"""Bytes of what holds a label, by its extension; the first that says one counts."""


class Sample(NamedTuple):
    """A labelled picture, and where it lies."""

    picture: Entry
    label: int


class _Part(NamedTuple):
    """A member of a sample."""

    key: str
    extension: str
    entry: Entry
    content: bytes
    """Of what may hold a label; else empty."""


def samples(path: Path) -> list[Sample]:
    """The labelled pictures of a shard; members of other kinds (captions, notes) are passed over.

    Raises:
        UserError: as `tar.entries`; a sample without exactly one picture and a label; a picture or a label
            that is too large, a label that is no integer.
    """
    found = []
    with open(path, "rb") as file:
        parts = _parts(file, path)
        for key, group in itertools.groupby(parts, key=lambda part: part.key):
            sample = _sample(path, key, group)
            if sample is not None:
                found.append(sample)
    return found


def _parts(file: BinaryIO, path: Path) -> Iterator[_Part]:
    for entry in entries(file, path):
        folder, slash, name = entry.name.rpartition("/")
        stem, _, extension = name.partition(".")  # at the first dot: `1.seg.png` is no picture of sample `1`
        extension = extension.lower()
        content = b""
        if extension in MAX_LABEL:
            if entry.size > MAX_LABEL[extension]:
                raise UserError(f"{path}: {entry.name!r} has {entry.size:,} bytes, too many for a label")
            content = file.read(entry.size)
        yield _Part(folder + slash + stem, extension, entry, content)


def _sample(path: Path, key: str, parts: Iterable[_Part]) -> Sample | None:
    pictures: list[Entry] = []
    labels: dict[str, int] = {}
    for part in parts:
        if f".{part.extension}" in IMAGE_SUFFIXES:
            pictures.append(part.entry)
        elif part.extension in MAX_LABEL:
            label = _label(path, part)
            labels |= {} if label is None else {part.extension: label}
    if not pictures and "cls" not in labels:
        return None
    if len(pictures) != 1 or not labels:
        has = f"{len(pictures)} pictures" if labels else 'no label (.cls, or "label" in .json)'
        raise UserError(f"{path}: sample {key!r} has {has}; expected one of each, one after the other")
    if pictures[0].size > MAX_PICTURE:
        raise UserError(
            f"{path}: {pictures[0].name!r} has {pictures[0].size:,} bytes, too many for a picture"
        )
    return Sample(pictures[0], next(labels[kind] for kind in MAX_LABEL if kind in labels))


def _label(path: Path, part: _Part) -> int | None:
    """The class that a member says; None for a .json without one."""
    if part.extension == "cls":
        text = part.content.strip()
        if text.isdigit():
            return int(text)
        raise UserError(f"{path}: {part.entry.name!r} holds {part.content!r}, not an integer")
    try:
        values = json.loads(part.content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {part.entry.name!r} is not JSON: {error}") from error
    label = values.get("label") if isinstance(values, dict) else None
    if label is None or (type(label) is int and 0 <= label < 10 ** MAX_LABEL["cls"]):
        return label
    raise UserError(f"{path}: {part.entry.name!r} says label {label!r:.40}, not an integer from 0")
