"""Predictions of any number of images in one file that can be resumed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

from vitascope.data.stored import ImageFile
from vitascope.errors import UserError
from vitascope.predict.engine import Engine
from vitascope.predict.fingerprint import Fingerprint
from vitascope.predict.parts import job_exists, parts_folder
from vitascope.predict.predictor import ImageResult
from vitascope.predict.result_formats import (
    Rows,
    csv_text,
    escaped,
    images_of_csv,
    images_of_parquet,
    read_fingerprint,
)
from vitascope.predict.selection import ClassSelection
from vitascope.storage import explaining_failure, flush, hold, replacing, write_json

FORMATS = (".jsonl", ".parquet", ".csv")
NAMED = 10
"""Unreadable images whose reasons are kept."""


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
    """The file of the JSON lines: `out`, or for the other formats a file beside it until it is complete."""
    return out if out.suffix == ".jsonl" else out.with_name(f"{out.name}.partial.jsonl")


def fingerprint_file(out: Path) -> Path:
    """The file of the fingerprint, for Parquet until the file is complete, which contains it then."""
    keeper = lines_file(out) if out.suffix == ".parquet" else out
    return keeper.with_name(f"{keeper.name}.fingerprint.json")


def write_whole(out: Path, lines: Iterable[str], rows: Rows, fingerprint: str) -> None:
    """Write a result file from all its lines of JSON; it is complete or absent."""
    if out.suffix == ".csv":
        rows.write_csv(lines, out)
    elif out.suffix == ".parquet":
        rows.write_parquet(lines, out, fingerprint)
    else:
        with replacing(out) as aside, open(aside, "w", encoding="utf-8", newline="\n") as to:
            to.writelines(lines)


def check_place(out: Path) -> None:
    """Reject a file of a format or in a folder in which none can be written."""
    if out.suffix not in FORMATS:
        raise UserError(f"{out}: a result file ends in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            "Parquet needs pyarrow: pip install 'vitascope[parquet]'; or choose a .jsonl or .csv file"
        )
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such folder")


def check_columns(out: Path, engine: Engine, selection: ClassSelection) -> None:
    """Reject a selection of classes that a model does not have, or that a CSV file does not show."""
    selection.check(engine)
    if out.suffix == ".csv" and not engine.several and selection.top_k not in (None, 1):
        raise UserError(
            f"{out}: a .csv file has the most probable class of each image: leave out top_k, and "
            "ask for all probabilities to get the other classes"
        )


def check_out(out: Path, *, resume: bool) -> None:
    """Reject a file that cannot be written, and an existing one unless it is resumed."""
    check_place(out)
    if job_exists(out):
        raise UserError(f"{parts_folder(out)} exists: continue it on Ray, remove it, or choose another file")
    for path in (out, lines_file(out)):
        if path.is_dir():
            raise UserError(f"{path} is a folder")
        if path.exists() and not resume:
            raise UserError(f"{path} exists: resume it, or choose another file")


class ResultFile:
    """A result file, written one line per image, with `FILE.fingerprint.json` beside it.

    `finish` makes a Parquet or CSV file from the lines in `FILE.partial.jsonl`; a Parquet file contains the
    fingerprint. When a file is resumed, all complete lines count.

    Args:
        out: the file, of one of `FORMATS`.
        engine: what predicts.
        selection: the classes that are predicted.
        probabilities: whether each class's probability is written too, as it always is with several classes
            per image.
        resume: continue a file that exists.
        kept: the columns of a table that are written too, as `column_digests` has them.

    Raises:
        UserError: as `check_out` and `ClassSelection.check`; a `top_k` for a CSV file of one class per image;
            a file of another job.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        engine: Engine,
        selection: ClassSelection | None = None,
        *,
        probabilities: bool = False,
        resume: bool = False,
        kept: Mapping[str, str] | None = None,
    ) -> None:
        self.out = Path(out)
        check_out(self.out, resume=resume)
        selection = selection or ClassSelection()
        check_columns(self.out, engine, selection)
        self.tally = Tally()
        """Of all images in the file, those of earlier runs included."""
        self._rows = Rows.of(engine, probabilities=probabilities, kept=kept)
        self._lines = lines_file(self.out)
        self._fingerprint_file = fingerprint_file(self.out)
        self._done: Counter[str] = Counter()
        self._finished = self.out != self._lines and self.out.exists() and not self._lines.exists()
        if self._finished:
            is_parquet = self.out.suffix == ".parquet"
            self._check(read_fingerprint(self.out) if is_parquet else self._stored(), engine, selection)
            for image, error in (images_of_parquet if is_parquet else images_of_csv)(self.out):
                self._recall(image, error)
            return
        is_new = not self._lines.exists()
        if is_new:
            fingerprint = Fingerprint.of(
                engine, selection, probabilities=bool(self._rows.columns), kept=self._rows.kept
            )
            with explaining_failure(self.out, "the results", "choose another file"):
                write_json(self._fingerprint_file, dataclasses.asdict(fingerprint))
        with ExitStack() as opened:
            self._file = opened.enter_context(open(self._lines, "a", encoding="utf-8", newline="\n"))
            hold(opened.enter_context(open(self._lines, "rb")), self._lines)
            if not is_new:
                self._check(self._stored(), engine, selection)
                os.truncate(self._lines, self._recall_lines())
            self._opened = opened.pop_all()

    def _stored(self) -> bytes:
        """The content of the fingerprint's file."""
        if not self._fingerprint_file.exists():
            raise UserError(
                f"{self.out} cannot be resumed without {self._fingerprint_file.name}, which is missing; "
                "choose another file"
            )
        return self._fingerprint_file.read_bytes()

    def _check(self, stored: str | bytes, engine: Engine, selection: ClassSelection) -> None:
        try:
            earlier = Fingerprint(**json.loads(stored))
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.out}: its fingerprint is broken; choose another file") from error
        rows = self._rows
        if found := earlier.differences(engine, selection, probabilities=bool(rows.columns), kept=rows.kept):
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
                    self._recall(*self._rows.parse(line))
                except ValueError as error:
                    raise UserError(
                        f"{self._lines}, line {number}: not a prediction; choose another file"
                    ) from error
                end += len(line)
        return end

    def _recall(self, image: str, error: str | None) -> None:
        self._done[image] += 1
        self.tally.add(error)

    def remaining(self, files: Iterable[ImageFile]) -> Iterator[ImageFile]:
        """The `files` that are not in the file yet."""
        for file in files:
            name = escaped(str(file)) if self._finished else str(file)
            name = csv_text(name) if self._finished and self.out.suffix == ".csv" else name
            if self._done[name]:
                self._done[name] -= 1
            else:
                yield file

    def write(self, result: ImageResult) -> None:
        """Append one image's result."""
        if self._finished:
            raise UserError(f"{self.out} is finished, and {result.image} is not in it; choose another file")
        with explaining_failure(self.out, "predictions", "those written are kept and can be resumed"):
            self._file.write(self._rows.line(result))
        self.tally.add(result.error)

    def finish(self) -> None:
        """Flush everything to the disk; make the Parquet or CSV file."""
        if self._finished:
            return
        with explaining_failure(self.out, "predictions", "those written are kept and can be resumed"):
            self._file.flush()
            flush(self._lines)
            if self.out == self._lines:
                return
            fingerprint = self._fingerprint_file.read_text("utf-8")
            with open(self._lines, encoding="utf-8") as lines:
                write_whole(self.out, lines, self._rows, fingerprint)
            self._lines.unlink()
            if self.out.suffix == ".parquet":
                self._fingerprint_file.unlink()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if not self._finished:
            with suppress(OSError) if kind else nullcontext():  # a full disk is reported once
                self._opened.close()
