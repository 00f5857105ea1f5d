"""Files of features: `.npz`, `.npy` with a `.json` beside it, and Parquet; written part by part, any size.

Every format has `image` (text), `label` (text, where there are labels), `split` (text), `feature` float32
(N, D), and `made`, JSON that says how the features were made.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from vitascope.data.features.cache import Features
from vitascope.data.rows.cells import check_absent, check_output, escaped, write_parquet
from vitascope.errors import UserError
from vitascope.models.weights.files import read_npz
from vitascope.serialization import parse_json
from vitascope.storage import check_room, replacing, temporary_folder

FORMATS = (".npz", ".npy", ".parquet")
READ_ROWS = 2**14
GROUP_BYTES = 2**25
"""Features in a row group of Parquet, which bounds the memory."""

_BESIDE = ("image", "label", "split", "made")

Text = npt.NDArray[np.str_]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingColumns:
    """What stands beside the features of N images; a ValueError for columns that do not fit together."""

    images: Text
    """(N,), the path of each, or its split and number."""
    labels: Text | None
    """(N,), the class of each, or its classes with ";" between them; None without labels."""
    splits: Text
    """(N,), `train`, `val`, `test`, or `all` where the data are not divided."""

    def __post_init__(self) -> None:
        columns = [self.images, self.splits, *([] if self.labels is None else [self.labels])]
        if any(column.shape != (self.images.size,) for column in columns):
            shapes = ", ".join(str(column.shape) for column in columns)
            raise ValueError(f"columns of different lengths or of several dimensions: {shapes}")

    def __len__(self) -> int:
        return len(self.images)

    @classmethod
    def joined(cls, parts: "Sequence[EmbeddingColumns]") -> Self:
        """The columns of parts, one after the other; at least one part."""
        labels = [part.labels for part in parts if part.labels is not None]
        return cls(
            images=np.concatenate([part.images for part in parts]),
            labels=np.concatenate(labels) if labels else None,
            splits=np.concatenate([part.splits for part in parts]),
        )

    def subset(self, rows: npt.NDArray[Any]) -> "EmbeddingColumns":
        """Those of some of the images, by their indices or by a mask (N,)."""
        labels = None if self.labels is None else self.labels[rows]
        return EmbeddingColumns(images=self.images[rows], labels=labels, splits=self.splits[rows])

    def lists(self) -> dict[str, list[str]]:
        """By the names in files, without bytes that are no UTF-8."""
        named = {"image": self.images, "label": self.labels, "split": self.splits}
        return {
            name: [escaped(text) for text in column.tolist()]
            for name, column in named.items()
            if column is not None
        }


class OfImages:
    """What has `columns`: values of N images."""

    columns: EmbeddingColumns

    @property
    def images(self) -> Text:
        """The path of each image, or its split and number, such as `test/17`: (N,)."""
        return self.columns.images

    @property
    def labels(self) -> Text | None:
        """The class of each image, or its classes with ";" between them, empty for an image without one:
        (N,). None without labels."""
        return self.columns.labels

    @property
    def splits(self) -> Text:
        """`train`, `val` or `test`, or `all` where the data are not divided: (N,)."""
        return self.columns.splits


Part = tuple[EmbeddingColumns, Features]
"""Some images, at least one."""


def check_out(out: Path) -> None:
    """Reject a file that cannot be written, or that exists."""
    check_output(out, FORMATS, "a file of features")
    check_absent(out, *([beside(out)] if out.suffix == ".npy" else []))


def is_embedding_file(path: Path) -> bool:
    """Whether a path is a file of features by its name, or for `.parquet`, which may be a table of images, by
    its metadata."""
    if path.suffix != ".parquet":
        return path.suffix in FORMATS
    if not path.is_file() or importlib.util.find_spec("pyarrow") is None:
        return False
    import pyarrow.parquet as pq

    try:
        return b"made" in (pq.read_schema(path).metadata or {})
    except (OSError, ValueError):  # damaged, which the reader of tables explains
        return False


def beside(out: Path) -> Path:
    """The JSON file of a `.npy` file."""
    return out.with_name(f"{out.name}.json")


def write_embeddings(out: Path, parts: Iterable[Part], total: int, made: Mapping[str, Any]) -> int:
    """Write a new file from parts, `total` images at most; returns their number. It is whole or absent."""
    writer = {".npz": _write_npz, ".npy": _write_npy, ".parquet": _write_parquet}[out.suffix]
    return writer(out, _with_room(out, parts, total), dict(made))


def _with_room(out: Path, parts: Iterable[Part], total: int) -> Iterator[Part]:
    """The parts, once it is known that the disk has room for them."""
    copies = 2 if out.suffix == ".npz" else 1
    for number, (columns, features) in enumerate(parts):
        if number == 0:
            check_room(out, copies * total * features.itemsize * features.shape[1])
        yield columns, features


def _write_npz(out: Path, parts: Iterable[Part], made: dict[str, Any]) -> int:
    with temporary_folder(out.absolute().parent) as folder:
        whole = folder / "feature.npy"  # the number of images, at its head, is known at the end
        columns = _write_array(whole, parts)
        with replacing(out) as aside, zipfile.ZipFile(aside, "w", allowZip64=True) as archive:
            archive.write(whole, whole.name)
            for name, values in {**columns, "made": json.dumps(made)}.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.array(values, dtype=np.str_), allow_pickle=False)
    return len(columns["image"])


def _write_npy(out: Path, parts: Iterable[Part], made: dict[str, Any]) -> int:
    with replacing(beside(out)) as described, replacing(out) as aside:
        columns = _write_array(aside, parts)
        described.write_text(json.dumps({"made": made, **columns}), encoding="utf-8")
    return len(columns["image"])


def _write_array(path: Path, parts: Iterable[Part]) -> dict[str, list[str]]:
    """Write the features as a `.npy` file; return the other columns."""
    columns: dict[str, list[str]] = {}
    count = width = 0
    with open(path, "wb") as file:
        for named, features in parts:
            count, width = count + len(features), features.shape[1]
            if not columns:
                _write_header(file, (0, width))
            file.write(np.ascontiguousarray(features, np.float32).data)
            for name, values in named.lists().items():
                columns.setdefault(name, []).extend(values)
        file.seek(0)
        _write_header(file, (count, width))
    return columns


def _write_header(file: IO[bytes], shape: tuple[int, int]) -> None:
    """The head of a `.npy` file, which is as long for any number of rows."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})


def _write_parquet(out: Path, parts: Iterable[Part], made: dict[str, Any]) -> int:
    import pyarrow as pa

    def table(columns: EmbeddingColumns, features: Features) -> Any:
        N, D = features.shape
        arrays = {name: pa.array(values, pa.string()) for name, values in columns.lists().items()}
        flat = pa.array(np.ascontiguousarray(features, np.float32).reshape(N * D))
        arrays["feature"] = pa.FixedSizeListArray.from_arrays(flat, D)
        return pa.table(arrays).replace_schema_metadata({"made": json.dumps(made)})

    def group_rows(schema: Any) -> int:
        return max(1, GROUP_BYTES // (4 * schema.field("feature").type.list_size))

    with replacing(out) as aside:
        return write_parquet(aside, itertools.starmap(table, parts), group_rows)


def read_columns(path: Path) -> tuple[EmbeddingColumns, dict[str, Any]]:
    """What stands beside the features, and how they were made.

    Raises:
        UserError: no such file, or none of `write_embeddings`.
    """
    with explaining_damage(path):
        if path.suffix == ".npz":
            columns = {name: array.tolist() for name, array in read_npz(path, _BESIDE).items()}
            made = parse_json(columns.pop("made"))
        elif path.suffix == ".npy":
            columns = parse_json(beside(path).read_text(encoding="utf-8"))
            made = columns.pop("made")
        else:
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                made = parse_json(str(file.schema_arrow.metadata[b"made"], "utf-8"))
                names = [name for name in _BESIDE if name in file.schema_arrow.names]
                columns = file.read(columns=names).to_pydict()
        text = {name: np.array(values, dtype=np.str_) for name, values in columns.items()}
        found = EmbeddingColumns(images=text["image"], labels=text.get("label"), splits=text["split"])
    return found, made


def read_features(path: Path) -> Features:
    """The features in a file, float32 (N, D); those of `.npy` are read when they are used.

    Raises:
        UserError: as `read_columns`.
    """
    if path.suffix == ".npy":
        with explaining_damage(path):
            return _checked(np.load(path, mmap_mode="r", allow_pickle=False))
    return np.concatenate(list(read_blocks(path, READ_ROWS)))


def read_blocks(path: Path, size: int) -> Iterator[Features]:
    """The features in a file, float32 (n, D) of `size` images at a time, of which none stays in memory.

    Raises:
        UserError: as `read_columns`.
    """
    with explaining_damage(path):
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive, archive.open("feature.npy") as file:
                yield from _array_blocks(file, size)
        elif path.suffix == ".npy":
            found = read_features(path)
            yield from (found[start : start + size] for start in range(0, len(found), size))
        else:
            import pyarrow.parquet as pq

            with pq.ParquetFile(path, pre_buffer=False) as file:  # a buffer would hold the whole column
                for batch in file.iter_batches(size, columns=["feature"]):
                    column = batch.column("feature")
                    yield _checked(column.flatten().to_numpy().reshape(len(column), -1))


def _array_blocks(file: IO[bytes], size: int) -> Iterator[Features]:
    np.lib.format.read_magic(file)
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran_order or len(shape) != 2:
        raise ValueError(f"its features are {dtype} {shape}, not float32 (N, D) in C order")
    N, D = shape
    for start in range(0, N, size):
        rows = min(size, N - start)
        yield _checked(np.frombuffer(file.read(rows * D * dtype.itemsize), dtype).reshape(rows, D))


def _checked(features: npt.NDArray[Any]) -> Features:
    if features.ndim != 2 or features.dtype != np.float32:
        raise ValueError(f"its features are {features.dtype} {features.shape}, not float32 (N, D)")
    return features


@contextlib.contextmanager
def explaining_damage(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file, or another one, leads to into one line."""
    try:
        path.stat()
        yield
    except UserError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{error.filename or path}: no such file") from error
    except (
        *(OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, ImportError),
        *(zipfile.BadZipFile, zlib.error),
    ) as error:
        raise UserError(f"{path}: not a file of features of `vitascope embed`: {error}") from error
