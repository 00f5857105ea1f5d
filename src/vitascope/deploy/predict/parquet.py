"""Parquet result files: columns `image`, `predictions` and `error`, with the fingerprint as metadata."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitascope.errors import UserError
from vitascope.storage import replacing

ROWS = 10_000
"""Rows per row group, which bounds the memory."""
_METADATA = b"vitascope"


def check_parquet() -> None:
    """Reject Parquet before any prediction if pyarrow is missing."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError("Parquet needs pyarrow: pip install 'vitascope[parquet]'; or choose a .jsonl file")


def write_parquet(lines: Path, out: Path, fingerprint: str) -> None:
    """Convert a file of JSON lines; `out` is complete or absent."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prediction = pa.struct([("label", pa.string()), ("index", pa.int32()), ("score", pa.float32())])
    columns = [("image", pa.string()), ("predictions", pa.list_(prediction)), ("error", pa.string())]
    schema = pa.schema(columns, metadata={_METADATA: fingerprint})
    with (
        replacing(out) as aside,
        open(lines, encoding="utf-8") as file,
        pq.ParquetWriter(aside, schema) as to,
    ):
        while group := list(itertools.islice(file, ROWS)):
            rows = [json.loads(line, object_hook=_in_utf8) for line in group]
            to.write_table(pa.Table.from_pylist(rows, schema=schema))


def _in_utf8(row: dict[str, Any]) -> dict[str, Any]:
    """Texts with surrogates escaped: JSON can hold them, Parquet cannot."""
    return {name: escaped(value) if isinstance(value, str) else value for name, value in row.items()}


def escaped(text: str) -> str:
    r"""A path with its bytes that are no UTF-8 as `\udce9`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_fingerprint(path: Path) -> str:
    """The fingerprint's JSON in a file of `write_parquet`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file") from error
    if _METADATA not in metadata:
        raise UserError(f"{path}: not written by `vitascope predict`; choose another file")
    return str(metadata[_METADATA], "utf-8")


def read_images(path: Path) -> Iterator[tuple[str, str | None]]:
    """Image and error of each row."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS, columns=["image", "error"]):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
