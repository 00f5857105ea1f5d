"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) as published: archives or folders, of pickles or of raw records.

Archives are read member by member, in place. The pickles are read as data (`pickles.py`), never run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.data.decoding import ImageSource
from vitascope.data.formats.archive import is_tar, naming_faults, open_tar, refuse, tar_content, tar_members
from vitascope.data.formats.pickled_arrays import read_pickle
from vitascope.data.splits import VAL_SHARE, ImageSet, Splits, stratified_split
from vitascope.errors import UserError

PIXELS = 3 * 32 * 32
"""Bytes of an image: all red ones, row by row, then all green ones, then all blue ones."""
MAX_FILE_BYTES = 2**28
"""Of one file; the largest that is published has 155 million."""
_LOOKED_AT = 16  # members at the start of a tar; CIFAR's have 5 to 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Form:
    """One of the four that are published: its files, and where labels and names stand in them."""

    train: tuple[str, ...]
    test: str
    meta: str
    classes: int
    labels_key: str = ""
    """Of a pickle; empty for raw records, which are `label_bytes` and then the pixels."""
    names_key: str = ""
    label_bytes: int = 1
    """The last of them counts: of CIFAR-100's two, the first is the coarse class."""

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test, self.meta)


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_FORMS = (
    _Form(
        train=_BATCHES,
        test="test_batch",
        meta="batches.meta",
        classes=10,
        labels_key="labels",
        names_key="label_names",
    ),
    _Form(
        train=("train",),
        test="test",
        meta="meta",
        classes=100,
        labels_key="fine_labels",
        names_key="fine_label_names",
    ),
    _Form(
        train=tuple(f"{name}.bin" for name in _BATCHES),
        test="test_batch.bin",
        meta="batches.meta.txt",
        classes=10,
    ),
    _Form(train=("train.bin",), test="test.bin", meta="fine_label_names.txt", classes=100, label_bytes=2),
)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """One file of images."""

    pixels: npt.NDArray[np.uint8]
    """(N, 3072)."""
    labels: npt.NDArray[np.int64]
    """(N,)."""


def is_cifar(path: Path) -> bool:
    """Whether a folder, or a tar, holds files with CIFAR's names."""
    if path.is_dir():
        return _form_of_folder(path) is not None
    if not is_tar(path):
        return False
    with naming_faults(path), open_tar(path) as tar:
        for _, member in zip(range(_LOOKED_AT), tar_members(tar, path), strict=False):
            if member.isreg() and _form_of(_own_name(member.name)):
                return True
            if member.size > MAX_FILE_BYTES:  # not one of ours, and long to pass over
                return False
    return False


def open_cifar(path: Path, *, seed: int) -> Splits:
    """The splits of CIFAR-10 or CIFAR-100, as published or unpacked.

    Their test set is `test`; a tenth of each class of the rest is `val`, by seed. Classes have the names
    that the set gives them, for CIFAR-100 the fine ones. Images are uint8 (32, 32, 3), views of the files'
    contents.

    Args:
        path: a folder of the files, or a tar with them, packed or not, in at most one folder.
        seed: of the validation set.

    Raises:
        UserError: a file that is missing, damaged, there twice, or not what it should be; a pickle that asks
            for more than arrays and texts; labels without class.
    """
    parts: dict[str, _Batch | tuple[str, ...]] = {}
    form = None
    with naming_faults(path):
        for name, content in _contents(path):
            form = form or _form_of(name)
            if form is not None and name in form.files:
                read = _read_names if name == form.meta else _read_batch
                parts[name] = read(form, content, f"{path}: {name}")
    if form is None:
        raise UserError(f"{path}: has none of the files of CIFAR-10 or CIFAR-100")
    missing = [name for name in form.files if name not in parts]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}")
    class_names = parts[form.meta]
    assert isinstance(class_names, tuple)
    everything = _image_set("train", [parts[name] for name in form.train], class_names)
    train, val = stratified_split(everything, VAL_SHARE, "val", seed)
    return Splits(train, val, _image_set("test", [parts[form.test]], class_names), channels=3)


def _image_set(name: str, batches: list[Any], class_names: tuple[str, ...]) -> ImageSet:
    sources: list[ImageSource] = []
    for batch in batches:
        sources.extend(batch.pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))  # each (32, 32, 3)
    return ImageSet(name, sources, np.concatenate([batch.labels for batch in batches]), class_names)


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file that may be CIFAR's."""
    if path.is_dir():
        form = _form_of_folder(path)
        for name in form.files if form is not None else ():
            if (path / name).is_file():
                _check_size((path / name).stat().st_size, f"{path}: {name}")
                yield name, (path / name).read_bytes()
        return
    seen = set()
    with open_tar(path) as tar:
        for member in tar_members(tar, path):
            name = _own_name(member.name)
            if _form_of(name) is None or member.isdir():
                continue
            if not member.isreg() or member.issparse():
                refuse(path, member.name, "no plain file")
            if name in seen:
                refuse(path, member.name, "there twice")
            seen.add(name)
            _check_size(member.size, f"{path}: {name}")
            with tar_content(tar, member) as content:
                yield name, b"".join(iter(lambda: content.read(2**18), b""))


def _own_name(member: str) -> str:
    """The name of a file that lies at the top of an archive or in one folder; "" for one that is deeper."""
    parts = PurePosixPath(member).parts
    return parts[-1] if 1 <= len(parts) <= 2 else ""


def _form_of(name: str) -> _Form | None:
    return next((form for form in _FORMS if name in form.files), None)


def _form_of_folder(folder: Path) -> _Form | None:
    batches = {form: (*form.train, form.test) for form in _FORMS}
    return next((form for form in _FORMS if any((folder / name).is_file() for name in batches[form])), None)


def _check_size(size: int, where: str) -> None:
    if size > MAX_FILE_BYTES:
        raise UserError(f"{where}: {size:,} bytes, more than the {MAX_FILE_BYTES:,} that CIFAR could have")


def _read_batch(form: _Form, content: bytes, where: str) -> _Batch:
    batch = _from_pickle(form, content, where) if form.labels_key else _from_records(form, content, where)
    wrong = np.flatnonzero((batch.labels < 0) | (batch.labels >= form.classes))
    if len(wrong):
        raise UserError(
            f"{where}: image {wrong[0]} has the label {batch.labels[wrong[0]]}, "
            f"but there are {form.classes} classes"
        )
    return batch


def _from_pickle(form: _Form, content: bytes, where: str) -> _Batch:
    values = read_pickle(content, where)
    pixels, labels = values.get("data"), values.get(form.labels_key)
    if not (isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape[1:] == (PIXELS,)):
        found = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise UserError(f"{where}: 'data' must be uint8 (N, {PIXELS}), not {found}")
    if isinstance(labels, list) and all(type(label) is int and abs(label) < 2**31 for label in labels):
        labels = np.array(labels, dtype=np.int64)
    if not (isinstance(labels, np.ndarray) and labels.shape == pixels.shape[:1] != (0,)):
        count = len(labels) if isinstance(labels, list | np.ndarray) else "no"
        raise UserError(
            f"{where}: {len(pixels)} images need as many integers in {form.labels_key!r}, there are {count}"
        )
    return _Batch(pixels, labels.astype(np.int64))


def _from_records(form: _Form, content: bytes, where: str) -> _Batch:
    length = form.label_bytes + PIXELS
    if not content or len(content) % length:
        raise UserError(
            f"{where}: {len(content):,} bytes, not a multiple of {length:,}: cut short, or not CIFAR's"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, length)  # (N, labels and pixels)
    labels = records[:, form.label_bytes - 1].astype(np.int64)
    return _Batch(records[:, form.label_bytes :], labels)


def _read_names(form: _Form, content: bytes, where: str) -> tuple[str, ...]:
    found: Any = content.split(b"\n")
    if form.names_key:
        found = read_pickle(content, where).get(form.names_key)
    if not (isinstance(found, list) and all(isinstance(name, str | bytes) for name in found)):
        raise UserError(f"{where}: no list of class names in {form.names_key!r}")
    texts = [name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in found]
    names = tuple(text.strip() for text in texts if text.strip())
    if len(names) != form.classes or len(set(names)) != form.classes:
        raise UserError(f"{where}: {len(set(names))} different class names, not {form.classes}")
    return names
