"""Answers as a Parquet file: columns `image`, `predictions` and `error`; what made them is its metadata."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vitascope.errors import UserError

ROWS = 10_000
"""In a row group; so many rows are in memory."""
_METADATA = b"vitascope"


def check_parquet() -> None:
    """Refuse to promise a file that cannot be written in the end."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError("Parquet needs pyarrow: pip install 'vitascope[parquet]'; or give --out FILE.jsonl")


def write_parquet(lines: Path, out: Path, origin: Mapping[str, Any]) -> None:
    """Make a Parquet file of JSON lines; it is there whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    prediction = pa.struct([("label", pa.string()), ("index", pa.int32()), ("score", pa.float32())])
    columns = [("image", pa.string()), ("predictions", pa.list_(prediction)), ("error", pa.string())]
    schema = pa.schema(columns, metadata={_METADATA: json.dumps(origin)})
    aside = out.with_name(f"{out.name}.partial")
    try:
        with open(lines, encoding="utf-8") as file, pq.ParquetWriter(aside, schema) as writer:
            while rows := [json.loads(line) for line in itertools.islice(file, ROWS)]:
                for row in rows:  # what is no UTF-8 is a surrogate in JSON, and none in Parquet
                    row["image"] = printable(row["image"])
                    if "error" in row:
                        row["error"] = printable(row["error"])
                    for guess in row.get("predictions", ()):
                        guess["label"] = printable(guess["label"])
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        with open(aside, "rb") as file_aside:
            os.fsync(file_aside.fileno())
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)


def printable(text: str) -> str:
    r"""A path with bytes that are no UTF-8 shown as `\udce9`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_origin(path: Path) -> dict[str, Any]:
    """What made a file of `write_parquet`.

    Raises:
        UserError: it is none.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file") from error
    if _METADATA not in metadata:
        raise UserError(f"{path}: not a file of `vitascope predict`; give another --out")
    return json.loads(metadata[_METADATA])


def read_images(path: Path) -> Iterator[tuple[str, str | None]]:
    """Image and error of each row."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS, columns=["image", "error"]):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
