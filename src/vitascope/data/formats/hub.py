"""Hugging Face data sets: `owner/name` on the hub, folders of `save_to_disk`, of parquet or of arrow files.

Pictures stay encoded in the memory-mapped tables of the `datasets` library, and are decoded by
`preprocess.read_image` like all others. The library is an extra, imported when it is needed.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.data.formats.folder import SPLIT_FOLDERS, files_of_splits, has_class_folders, split_of
from vitascope.data.formats.format import DataFormat
from vitascope.data.formats.shards import sets_of_numbers
from vitascope.data.splits import Inventory, LazySources
from vitascope.errors import UserError, nearest_path
from vitascope.formatting import canonical
from vitascope.models.decoding import Encoded
from vitascope.network import misunderstood
from vitascope.remote.paths import AnyPath

TABLES = {".parquet": "parquet", ".arrow": "arrow"}
"""The library's builder for each kind of file."""
LABEL_COLUMNS = ("label", "labels", "fine_label", "class")
"""Names of the column of classes; the only `ClassLabel` may have any name."""


class HubDataset(DataFormat):
    """The id of a data set on the hub, or a folder of `save_to_disk`, of parquet or of arrow files."""

    def matches(self, data: str) -> bool:
        path = Path(data)
        if path.is_dir():
            return _is_saved(path) or (bool(_tables(path)) and not has_class_folders(path))
        # A path with a parent, or with a similar name beside it, is more likely mistyped than on the hub.
        local = bool(nearest_path(data)) or (len(path.parts) > 1 and path.parent.is_dir())
        return looks_like_hub_id(data) and (not local or "@" in data)

    def read(self, data: str) -> Inventory:
        try:
            import datasets as library
        except ModuleNotFoundError as error:
            local = "" if Path(data).expanduser().exists() else "no such folder; "
            raise UserError(
                f'{data}: {local}Hugging Face data sets need an extra: pip install "vitascope[datasets]"'
            ) from error
        with _explaining(data):
            loaded = _load(library, data)
        tables = {split: table.with_format(None) for split, table in _named_splits(loaded, data).items()}
        first = next(iter(tables.values()))
        picture, label = _picture_column(library, first, data), _label_column(library, first, data)
        for split, table in tables.items():
            if table.features != first.features:
                raise UserError(
                    f"{data}: {split} has other columns than {next(iter(tables))}; make them alike"
                )
        values = {split: table[label][:] for split, table in tables.items()}  # [:]: not one by one
        names, found = _class_names(library, first.features[label], values), {}
        for split, given in values.items():
            pictures = tables[split].select_columns([picture])
            if isinstance(first.features[picture], library.Image):  # keep them encoded
                pictures = pictures.cast_column(picture, library.Image(decode=False))
            rows = TableRows(pictures, np.arange(len(given)), f"{data}:{split}")
            found[split] = rows, _numbers(given, names, f"{data}: {split}")
        sets = sets_of_numbers(found, names, data)
        return Inventory(sets, 3, Path(data) if Path(data).is_dir() else None)


@dataclasses.dataclass(frozen=True, slots=True)
class TableRow(Encoded):
    """A picture in a table."""

    table: Any  # a `datasets.Dataset` with one column, not decoded
    index: int
    place: str

    def __str__(self) -> str:
        return f"{self.place}:{self.index}"

    def read_bytes(self) -> bytes:
        """The encoded picture, from the table or from a file named in it."""
        (value,) = self.table[self.index].values()
        if value is None:
            raise EOFError("the row has no picture")
        content = value["bytes"]
        return Path(value["path"]).read_bytes() if content is None else bytes(content)


@dataclasses.dataclass(frozen=True, eq=False)
class TableRows(LazySources):
    """Many pictures in a table."""

    table: Any
    indices: npt.NDArray[np.int64]  # (N,), rows of the table
    place: str

    def __len__(self) -> int:
        return len(self.indices)

    def at(self, index: int) -> TableRow:
        return TableRow(self.table, int(self.indices[index]), self.place)

    def take(self, indices: npt.NDArray[np.int64]) -> "TableRows":
        return TableRows(self.table, self.indices[indices], self.place)


def looks_like_hub_id(data: str) -> bool:
    """Whether the data are `owner/name` or `owner/name@revision`, and no existing path."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    name, at, revision = data.partition("@")
    if name.count("/") != 1 or bool(at) != bool(revision) or Path(data).exists():
        return False
    with contextlib.suppress(HFValidationError):
        validate_repo_id(name)
        return True
    return False


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _tables(path: Path) -> dict[str, list[AnyPath]]:
    """Parquet or arrow files of each split; the hub keeps them in a folder `data/`."""
    for folder in (path, path / "data"):
        if found := files_of_splits(folder, tuple(TABLES)):
            return found
    return {}


def _load(library: ModuleType, data: str) -> Any:
    """A `Dataset`, or a dictionary of them."""
    path = Path(data).expanduser()
    if not path.is_dir():
        name, _, revision = data.partition("@")
        return library.load_dataset(name, revision=revision or None)
    if _is_saved(path):
        return library.load_from_disk(str(path))
    files = _tables(path)
    kinds = {TABLES[file.suffix] for paths in files.values() for file in paths}
    if len(kinds) != 1:
        raise UserError(f"{data}: parquet and arrow files beside each other; keep one of them")
    named = {  # "all" is reserved by the library
        "train" if split == "all" else split: [str(file) for file in paths] for split, paths in files.items()
    }
    return library.load_dataset(kinds.pop(), data_files=named)


def _named_splits(loaded: Any, data: str) -> dict[str, Any]:
    """The tables by `train`, `val` and `test`; a single table is `all`."""
    if not isinstance(loaded, Mapping):
        return {"all": loaded}
    if len(loaded) == 1:  # the hub calls a set without splits "train"
        return {"all": next(iter(loaded.values()))}
    found = {}
    for name in loaded:
        split = split_of(str(name))
        if split in found:
            listed = ", ".join(map(str, loaded))
            raise UserError(f"{data}: two {split} splits among {listed}; keep one of them")
        if split is not None:
            found[split] = loaded[name]
    found = {split: found[split] for split in SPLIT_FOLDERS if split in found}
    if not found:
        raise UserError(f"{data}: no train, validation or test split among {', '.join(map(str, loaded))}")
    return found


def _picture_column(library: ModuleType, table: Any, data: str) -> str:
    """The column of pictures: of type `Image`, or a mapping with an `Image`'s keys."""
    found = [
        name
        for name, feature in table.features.items()
        if isinstance(feature, library.Image)
        or (isinstance(feature, Mapping) and set(feature) == {"bytes", "path"})
    ]
    return _only(found, "columns of pictures", table, data)


def _label_column(library: ModuleType, table: Any, data: str) -> str:
    """The column of classes: the only `ClassLabel`, or integers or strings under a usual name."""
    found = [name for name, feature in table.features.items() if isinstance(feature, library.ClassLabel)]
    if len(found) != 1:
        for name in LABEL_COLUMNS:
            if hasattr(table.features.get(name), "feature"):  # of the elements of a list
                raise UserError(
                    f"{data}: the column {name} has a list of classes per image, which is read from a table "
                    "only: save the images as files, and give a .jsonl or .parquet of their paths and lists"
                )
        kinds = {name: str(getattr(feature, "dtype", "")) for name, feature in table.features.items()}
        plain = [name for name, kind in kinds.items() if re.match("u?int|.*string", kind)]
        found = [name for name in found or plain if name in LABEL_COLUMNS] or found
    return _only(found, f"columns of classes (a ClassLabel, or {', '.join(LABEL_COLUMNS)})", table, data)


def _only(found: list[str], what: str, table: Any, data: str) -> str:
    if len(found) == 1:
        return found[0]
    listed = f": {', '.join(found)}" if found else f", but {', '.join(table.column_names)}"
    raise UserError(
        f"{data}: {len(found)} {what}{listed}; keep one with the library, `save_to_disk`, and give "
        "that folder"
    )


def _class_names(
    library: ModuleType, feature: Any, values: Mapping[str, list[Any]]
) -> tuple[str, ...] | None:
    """The names of the classes; None where they are known by number only."""
    if isinstance(feature, library.ClassLabel):
        return tuple(feature.names)
    if "string" in feature.dtype:
        return tuple(sorted({canonical(name) for name in next(iter(values.values())) if name}))
    return None


def _numbers(values: list[Any], names: tuple[str, ...] | None, place: str) -> npt.NDArray[np.int64]:
    """Labels as indices into the names of the classes, or as they are; -1 for none, (N,)."""
    if names is None:
        return np.array([-1 if value is None else value for value in values], dtype=np.int64)
    known: dict[Any, int] = {None: -1, "": -1} | {number: number for number in range(-1, len(names))}
    known |= {canonical(name): number for number, name in enumerate(names)}
    values = [canonical(value) if isinstance(value, str) else value for value in values]
    for value in set(values):
        if value not in known:
            raise UserError(f"{place}: label {value!r} is none of the {len(names)} classes")
    return np.array([known[value] for value in values], dtype=np.int64)


@contextlib.contextmanager
def _explaining(data: str) -> Iterator[None]:
    """Turn the library's errors into one line."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except UserError:
        raise
    except DatasetNotFoundError as error:
        raise UserError(
            f"{data}: no such folder, nor a data set on the hub; a private or gated one needs `hf auth login`"
        ) from error
    except (LookupError, TypeError, AttributeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{data}: cannot be opened: {misunderstood(error)}") from error
    except (DatasetsError, HTTPError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"{data}: cannot be opened: {reason}") from error
