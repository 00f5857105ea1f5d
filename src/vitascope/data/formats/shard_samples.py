"""The labelled pictures in a shard, by WebDataset's rule: neighbours with one key are a sample."""

from __future__ import annotations

import itertools
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from vitascope.data.formats.folder import IMAGE_SUFFIXES
from vitascope.data.tars import archive_errors, open_tar, tar_fault, tar_members
from vitascope.errors import UserError

MAX_PICTURE = 2**30
"""Limit of bytes of an encoded picture, which is read into memory."""
MAX_LABEL = {"cls": 18, "json": 2**20}
"""Limit of bytes of a label's file, by its extension; of two labels the first in this order counts."""


class ShardSample(NamedTuple):
    """A labelled picture."""

    name: str
    offset: int
    """The place of its first byte in the shard."""
    size: int
    label: int


class _Part(NamedTuple):
    """A member of a sample."""

    key: str
    extension: str
    name: str
    offset: int
    size: int
    content: bytes
    """The content of a label; else empty."""


def samples(path: Path) -> list[ShardSample]:
    """The labelled pictures of a shard; members of other kinds (captions, notes) are skipped.

    Only headers and labels are read.
    """
    found = []
    with archive_errors(path), open_tar(path, compressed=False) as tar:
        for key, group in itertools.groupby(_parts(tar, path), key=lambda part: part.key):
            sample = _sample(path, key, group)
            if sample is not None:
                found.append(sample)
    return found


def _parts(tar: tarfile.TarFile, path: Path) -> Iterator[_Part]:
    assert tar.fileobj is not None
    for member in tar_members(tar, path):
        if fault := tar_fault(member):
            raise UserError(f"{path}: {member.name!r} is {fault}; pack the files themselves")
        if member.isdir():
            continue
        # A name that is no UTF-8 comes with surrogates, which cannot be printed.
        full = member.name.removeprefix("./").encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        folder, slash, name = full.rpartition("/")
        stem, _, extension = name.partition(".")  # at the first dot: `1.seg.png` is no picture of sample `1`
        extension = extension.lower()
        content = b""
        if extension in MAX_LABEL:
            if member.size > MAX_LABEL[extension]:
                raise UserError(f"{path}: {full!r} has {member.size:,} bytes, too many for a label")
            tar.fileobj.seek(member.offset_data)
            content = tar.fileobj.read(member.size)
        yield _Part(folder + slash + stem, extension, full, member.offset_data, member.size, content)


def _sample(path: Path, key: str, parts: Iterable[_Part]) -> ShardSample | None:
    pictures: list[_Part] = []
    labels: dict[str, int] = {}
    for part in parts:
        if f".{part.extension}" in IMAGE_SUFFIXES:
            pictures.append(part)
        elif part.extension in MAX_LABEL:
            label = _label(path, part)
            labels |= {} if label is None else {part.extension: label}
    if not pictures and "cls" not in labels:
        return None
    if len(pictures) != 1 or not labels:
        has = f"{len(pictures)} pictures" if labels else 'no label (.cls, or "label" in .json)'
        raise UserError(f"{path}: sample {key!r} has {has}; expected one of each, one after the other")
    picture = pictures[0]
    if picture.size > MAX_PICTURE:
        raise UserError(f"{path}: {picture.name!r} has {picture.size:,} bytes, too many for a picture")
    label = next(labels[kind] for kind in MAX_LABEL if kind in labels)
    return ShardSample(picture.name, picture.offset, picture.size, label)


def _label(path: Path, part: _Part) -> int | None:
    """The label in a member; None for a .json without one."""
    if part.extension == "cls":
        text = part.content.strip()
        if text.isdigit():
            return int(text)
        raise UserError(f"{path}: {part.name!r} contains {part.content!r}, not an integer")
    try:
        values = json.loads(part.content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {part.name!r} is not JSON: {error}") from error
    label = values.get("label") if isinstance(values, dict) else None
    if label is None or (type(label) is int and 0 <= label < 10 ** MAX_LABEL["cls"]):
        return label
    raise UserError(f"{path}: {part.name!r} has the label {label!r:.40}, not an integer from 0")
