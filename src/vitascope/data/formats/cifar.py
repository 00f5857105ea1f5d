"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) as published: archives or folders, of pickles or of raw records.

Archives are read member by member, in place.
"""

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vitascope.data.formats.archive import archive_errors, is_tar, open_tar, tar_content, tar_members
from vitascope.data.formats.format import DataFormat
from vitascope.data.splits import ImageSet, Inventory
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError
from vitascope.models.decoding import ImageSource
from vitascope.serialization import RestrictedUnpickler

PIXELS = 3 * 32 * 32
"""Bytes of an image: the red plane, row by row, then the green, then the blue one."""
MAX_FILE_BYTES = 2**28
"""Limit of one file; the largest that is published has 155 million bytes."""
_LOOKED_AT = 16  # members at the start of a tar; CIFAR's have 5 to 9


@dataclasses.dataclass(frozen=True)
class _Form:
    """One of the four published forms: its files, and the places of labels and names in them."""

    train: tuple[str, ...]
    test: str
    meta: str
    classes: int
    labels_key: str = ""  # key in the pickle; empty for raw records: `label_bytes`, then the pixels
    names_key: str = ""
    label_bytes: int = 1  # the last of them is the label; the first of CIFAR-100's two is the coarse class

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test, self.meta)


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_FORMS = (
    _Form(_BATCHES, "test_batch", "batches.meta", 10, labels_key="labels", names_key="label_names"),
    _Form(("train",), "test", "meta", 100, labels_key="fine_labels", names_key="fine_label_names"),
    _Form(tuple(f"{name}.bin" for name in _BATCHES), "test_batch.bin", "batches.meta.txt", 10),
    _Form(("train.bin",), "test.bin", "fine_label_names.txt", 100, label_bytes=2),
)


_Batch: TypeAlias = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
"""Pixels (N, 3072) and labels (N,) of one file."""


class Cifar(DataFormat):
    """A folder of CIFAR's files, or a tar with them in at most one folder, compressed or not.

    The published test set is `test`. Classes have the names in the files, for CIFAR-100 the fine ones. Images
    are uint8 (32, 32, 3), views of one array per file.
    """

    def matches(self, data: str) -> bool:
        path = Path(data)
        if path.is_dir():
            return _form_of_folder(path) is not None
        if not is_tar(path):
            return False
        with archive_errors(path), open_tar(path) as tar:
            for _, member in zip(range(_LOOKED_AT), tar_members(tar, path), strict=False):
                if member.isreg() and _form_of(_own_name(member.name)):
                    return True
                if member.size > MAX_FILE_BYTES:  # not one of CIFAR's, and slow to skip
                    return False
        return False

    def read(self, data: str) -> Inventory:
        path = Path(data)
        parts: dict[str, _Batch] = {}
        class_names: tuple[str, ...] = ()
        form = _FORMS[0]
        with archive_errors(path):
            for form, name, content in _contents(path):
                if name == form.meta:
                    class_names = _read_names(form, content, f"{path}: {name}")
                else:
                    parts[name] = _read_batch(form, content, f"{path}: {name}")
        missing = [name for name in (*form.train, form.test) if name not in parts]
        missing += [] if class_names else [form.meta]
        if missing:
            raise UserError(f"{path}: lacks {', '.join(missing)}")
        train = _image_set("train", [parts[name] for name in form.train], class_names)
        test = _image_set("test", [parts[form.test]], class_names)
        return Inventory((train, test), channels=3, root=path)


def _image_set(name: str, batches: list[_Batch], class_names: tuple[str, ...]) -> ImageSet:
    sources: list[ImageSource] = []
    for pixels, _ in batches:
        sources.extend(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))  # each (32, 32, 3)
    labels = np.concatenate([labels for _, labels in batches])
    return ImageSet(name, sources, ClassIndices(labels, class_names))


def _contents(path: Path) -> Iterator[tuple[_Form, str, bytes]]:
    """Yield form, name and content of each of CIFAR's files; all have the form of the first."""
    form = _form_of_folder(path) if path.is_dir() else None
    if form is not None:
        for name in form.files:
            if (path / name).is_file():
                _check_size((path / name).stat().st_size, f"{path}: {name}")
                yield form, name, (path / name).read_bytes()
        return
    with open_tar(path) as tar:
        for member in tar_members(tar, path):
            name = _own_name(member.name)
            form = form or _form_of(name)
            if form is None or name not in form.files or not member.isreg():
                continue
            _check_size(member.size, f"{path}: {name}")
            with tar_content(tar, member) as content:
                yield form, name, b"".join(iter(lambda: content.read(2**18), b""))


def _own_name(member: str) -> str:
    """The name of a file at the top of an archive or in one folder; "" for a deeper one."""
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
    if form.labels_key:
        pixels, labels = _from_pickle(form, content, where)
    else:
        length = form.label_bytes + PIXELS
        if not content or len(content) % length:
            raise UserError(
                f"{where}: {len(content):,} bytes, not a multiple of {length:,}: cut short, or not CIFAR's"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, length)  # (N, labels and pixels)
        pixels, labels = records[:, form.label_bytes :], records[:, form.label_bytes - 1].astype(np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= form.classes))
    if len(wrong):
        label = f"image {wrong[0]} has the label {labels[wrong[0]]}"
        raise UserError(f"{where}: {label}, but there are {form.classes} classes")
    return pixels, labels


def _from_pickle(form: _Form, content: bytes, where: str) -> _Batch:
    values = read_pickle(content, where)
    pixels, labels = values.get("data"), np.array(values.get(form.labels_key))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (PIXELS,):
        kind = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise UserError(f"{where}: 'data' must be uint8 (N, {PIXELS}), not {kind}")
    if labels.shape != (len(pixels),) or labels.dtype.kind != "i":
        raise UserError(
            f"{where}: {len(pixels)} images need as many integers in {form.labels_key!r}, not "
            f"{labels.dtype} {labels.shape}"
        )
    return pixels, labels.astype(np.int64)


def _read_names(form: _Form, content: bytes, where: str) -> tuple[str, ...]:
    names: Any = content.split(b"\n")
    if form.names_key:
        names = read_pickle(content, where).get(form.names_key)
    listed = names if isinstance(names, list) else []
    texts = [name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in listed]
    texts = [text.strip() for text in texts if text.strip()]
    if len(texts) != form.classes or len(set(texts)) != form.classes:
        raise UserError(f"{where}: {len(set(texts))} different class names, not {form.classes}")
    return tuple(texts)


_ADMITTED = {
    "numpy.core.multiarray._reconstruct",  # NumPy 1
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",  # bytes, up to protocol 2
}
"""The names in a pickled array of bytes."""


def read_pickle(content: bytes, name: str) -> dict[str, Any]:
    """A pickled dictionary of plain values and arrays, written by Python 2 or 3, up to protocol 4; keys that
    are bytes become text. `name` stands in messages."""
    try:
        values = RestrictedUnpickler(io.BytesIO(content), _ADMITTED, encoding="latin1").load()
    except Exception as error:  # damaged pickles raise nearly any
        raise UserError(f"{name}: rejected: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{name}: rejected: it contains a {type(values).__name__}, not a dictionary")
    return {
        key.decode("latin-1") if isinstance(key, bytes) else str(key): value for key, value in values.items()
    }
