"""Predictions of any number of images in one file, JSON lines or Parquet, that can be resumed."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from vitascope.errors import UserError
from vitascope.predict.engine import Engine
from vitascope.predict.fingerprint import Fingerprint
from vitascope.predict.predictor import ImageResult
from vitascope.storage import explaining_failure, flush, hold, replacing, write_json

FORMATS = (".jsonl", ".parquet")
NAMED = 10
"""Unreadable images whose reasons are kept."""
PARQUET_ROWS = 10_000
"""Rows per row group, which bounds the memory."""
_METADATA = b"vitascope"


def as_line(result: ImageResult) -> str:
    """One line of JSON: `image`, and `predictions` or `error`."""
    row: dict[str, Any] = {"image": result.image, "error": result.error}
    if result.error is None:
        row = {"image": result.image, "predictions": [vars(guess) for guess in result.predictions]}
    return escaped(json.dumps(row, ensure_ascii=False)) + "\n"


def escaped(text: str) -> str:
    r"""A path with its bytes that are no UTF-8 as `\udce9`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclasses.dataclass
class Tally:
    """Counts of predicted and of unreadable images."""

    images: int = 0
    unreadable: int = 0
    """The `images` that could not be read."""
    reasons: list[str] = dataclasses.field(default_factory=list)
    """The first errors."""

    def add(self, error: str | None) -> None:
        """Count one image; `error` is the reason if it could not be read."""
        self.images += 1
        if error is not None:
            self.unreadable += 1
            if len(self.reasons) < NAMED:
                self.reasons.append(error)


def lines_file(out: Path) -> Path:
    """The file of the JSON lines: `out` itself, or for Parquet a file beside it until it is complete."""
    return out if out.suffix == ".jsonl" else out.with_name(f"{out.name}.partial.jsonl")


def check_out(out: Path, *, resume: bool) -> None:
    """Reject a file that cannot be written, and an existing one unless it is resumed."""
    if out.suffix not in FORMATS:
        raise UserError(f"{out}: a result file ends in {' or '.join(FORMATS)}")
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError("Parquet needs pyarrow: pip install 'vitascope[parquet]'; or choose a .jsonl file")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such folder")
    for path in (out, lines_file(out)):
        if path.is_dir():
            raise UserError(f"{path} is a folder")
        if path.exists() and not resume:
            raise UserError(f"{path} exists: resume it, or choose another file")


class ResultFile:
    """A result file, written one line per image, with `FILE.jsonl.fingerprint.json` beside it.

    `finish` makes a Parquet file from the lines in `FILE.parquet.partial.jsonl`. When a file is resumed, all
    complete lines count.
    """

    def __init__(self, out: str | os.PathLike[str], engine: Engine, top_k: int = 5, *, resume: bool = False):
        self.out = Path(out)
        check_out(self.out, resume=resume)
        self.tally = Tally()
        """Of all images in the file, those of earlier runs included."""
        self._lines = lines_file(self.out)
        self._fingerprint_file = self._lines.with_name(f"{self._lines.name}.fingerprint.json")
        self._done: Counter[str] = Counter()
        self._finished = self.out != self._lines and self.out.exists() and not self._lines.exists()
        if self._finished:
            self._check(read_fingerprint(self.out), engine, top_k)
            for image, error in read_images(self.out):
                self._recall(image, error)
            return
        is_new = not self._lines.exists()
        if is_new:
            fingerprint = dataclasses.asdict(Fingerprint.of(engine, top_k))
            with explaining_failure(self.out, "the results", "choose another file"):
                write_json(self._fingerprint_file, fingerprint)
        with ExitStack() as opened:
            self._file = opened.enter_context(open(self._lines, "a", encoding="utf-8", newline="\n"))
            hold(opened.enter_context(open(self._lines, "rb")), self._lines)
            if not is_new:
                if not self._fingerprint_file.exists():
                    raise UserError(
                        f"{self._lines} cannot be resumed without {self._fingerprint_file.name}, which is "
                        "missing; choose another file"
                    )
                self._check(self._fingerprint_file.read_bytes(), engine, top_k)
                os.truncate(self._lines, self._recall_lines())
            self._opened = opened.pop_all()

    def _check(self, fingerprint: str | bytes, engine: Engine, top_k: int) -> None:
        try:
            earlier = Fingerprint(**json.loads(fingerprint))
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.out}: its fingerprint is broken; choose another file") from error
        if found := earlier.differences(engine, top_k):
            raise UserError(
                f"{self.out} was made with other options or another model: {'; '.join(found)}; "
                "use the same ones, or choose another file"
            )

    def _recall_lines(self) -> int:
        """Count the lines of earlier runs; return where the last complete line ends, in bytes."""
        end = 0
        with open(self._lines, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    self._recall(row["image"], row.get("error"))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise UserError(
                        f"{self._lines}, line {number}: not a prediction; choose another file"
                    ) from error
                end += len(line)
        return end

    def _recall(self, image: str, error: str | None) -> None:
        self._done[image] += 1
        self.tally.add(error)

    def remaining(self, paths: Iterable[str]) -> Iterator[str]:
        """The `paths` that are not in the file yet."""
        for path in paths:
            name = escaped(path) if self._finished else path
            if self._done[name]:
                self._done[name] -= 1
            else:
                yield path

    def write(self, result: ImageResult) -> None:
        """Append one image's result."""
        if self._finished:
            raise UserError(f"{self.out} is finished, and {result.image} is not in it; choose another file")
        with explaining_failure(self.out, "predictions", "those written are kept and can be resumed"):
            self._file.write(as_line(result))
        self.tally.add(result.error)

    def finish(self) -> None:
        """Flush everything to the disk; make the Parquet file."""
        if self._finished:
            return
        with explaining_failure(self.out, "predictions", "those written are kept and can be resumed"):
            self._file.flush()
            flush(self._lines)
            if self.out != self._lines:
                write_parquet(self._lines, self.out, self._fingerprint_file.read_text("utf-8"))
                self._lines.unlink()
                self._fingerprint_file.unlink()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if not self._finished:
            with suppress(OSError) if kind else nullcontext():  # a full disk is reported once
                self._opened.close()


def write_parquet(lines: Path, out: Path, fingerprint: str) -> None:
    """Convert a file of JSON lines; `out` is complete or absent."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prediction = pa.struct([("label", pa.string()), ("index", pa.int32()), ("score", pa.float32())])
    columns = [("image", pa.string()), ("predictions", pa.list_(prediction)), ("error", pa.string())]
    schema = pa.schema(columns, metadata={_METADATA: fingerprint})

    def without_surrogates(row: dict[str, Any]) -> dict[str, Any]:  # which JSON can hold, and Parquet cannot
        return {name: escaped(value) if isinstance(value, str) else value for name, value in row.items()}

    with (
        replacing(out) as aside,
        open(lines, encoding="utf-8") as file,
        pq.ParquetWriter(aside, schema) as to,
    ):
        while group := list(itertools.islice(file, PARQUET_ROWS)):
            rows = [json.loads(line, object_hook=without_surrogates) for line in group]
            to.write_table(pa.Table.from_pylist(rows, schema=schema))


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
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=["image", "error"]):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
