"""Answers for any number of pictures in one file, JSON lines or Parquet, gone on with wherever it ended."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from io import BufferedReader
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

from vitascope.deploy.predict.engine import Engine
from vitascope.deploy.predict.fingerprint import differences, origin_of
from vitascope.deploy.predict.parquet import check_parquet, printable, read_images, read_origin, write_parquet
from vitascope.deploy.predict.predictor import ImageResult
from vitascope.errors import UserError

FORMATS = (".jsonl", ".parquet")
NAMED = 10
"""Unreadable pictures that are remembered with their reasons."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # some network file systems


def as_row(answer: ImageResult) -> dict[str, Any]:
    """Plain values: `image`, and `predictions` or `error`."""
    if answer.error is not None:
        return {"image": answer.image, "error": answer.error}
    return {"image": answer.image, "predictions": [vars(guess) for guess in answer.predictions]}


def as_line(answer: ImageResult) -> str:
    r"""A line of JSON; what is no UTF-8 in a path is escaped in JSON's way, as `\udce9`."""
    return printable(json.dumps(as_row(answer), ensure_ascii=False)) + "\n"


@dataclasses.dataclass
class Tally:
    """How many pictures were answered."""

    pictures: int = 0
    unreadable: int = 0
    """Of them, how many could not be read."""
    reasons: list[str] = dataclasses.field(default_factory=list)
    """Why, of the first few."""

    def add(self, error: str | None) -> None:
        """One more, and why it could not be read."""
        self.pictures += 1
        if error is not None:
            self.unreadable += 1
            if len(self.reasons) < NAMED:
                self.reasons.append(error)


def working_file(out: Path) -> Path:
    """Where lines are written: the file itself, or for Parquet one beside it, until all are there."""
    return out if out.suffix == ".jsonl" else out.with_name(f"{out.name}.partial.jsonl")


def check_out(out: Path, *, resume: bool) -> None:
    """Refuse a file that cannot be written, or that is there and not to be gone on with.

    Raises:
        UserError: says what to do.
    """
    if out.suffix not in FORMATS:
        raise UserError(f"{out}: a file of answers ends in {' or '.join(FORMATS)}")
    if out.suffix == ".parquet":
        check_parquet()
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such folder")
    for path in (out, working_file(out)):
        if path.is_dir():
            raise UserError(f"{path} is a folder")
        if path.exists() and not resume:
            raise UserError(f"{path} exists: go on with it (--resume), or give another --out")


class ResultFile:
    """A file of answers that is written a line at a time; a context manager that closes it.

    JSON lines are written in place, and `FILE.jsonl.origin.json` beside them says what made them. Parquet
    is made by `finish`, of lines in `FILE.parquet.partial.jsonl`. After any end, SIGKILL included, whatever
    had reached the file counts, but for a line that was cut off.

    Args:
        out: ends in .jsonl or .parquet.
        engine: what answers.
        top_k: classes a picture.
        resume: go on with a file, if there is one.

    Raises:
        UserError: as `check_out`; another engine, preprocessing or `top_k` made it, or another process
                writes it.
    """

    def __init__(self, out: str | os.PathLike[str], engine: Engine, top_k: int = 5, *, resume: bool = False):
        self.out = Path(out)
        check_out(self.out, resume=resume)
        self.tally = Tally()
        """Of all answers in the file, those of earlier runs included."""
        self._lines = working_file(self.out)
        self._origin_file = self._lines.with_name(f"{self._lines.name}.origin.json")
        self._done: Counter[str] = Counter()
        self._finished = self.out != self._lines and self.out.exists() and not self._lines.exists()
        if self._finished:
            self._check(read_origin(self.out), engine, top_k)
            for image, error in read_images(self.out):
                self._recall(image, error)
            return
        is_new = not self._lines.exists()
        if is_new:
            self._origin_file.write_text(json.dumps(origin_of(engine, top_k), indent=1) + "\n", "utf-8")
        with ExitStack() as opened:
            self._file = opened.enter_context(open(self._lines, "a", encoding="utf-8", newline="\n"))
            self._lock = opened.enter_context(open(self._lines, "rb"))
            _lock(self._lock, self._lines)
            if not is_new:
                self._check(self._read_origin(), engine, top_k)
                os.truncate(self._lines, self._recall_lines())
            self._opened = opened.pop_all()

    def _read_origin(self) -> dict[str, Any]:
        if not self._origin_file.exists():
            raise UserError(
                f"{self._origin_file} is gone, which says what made {self._lines}; give another --out"
            )
        return json.loads(self._origin_file.read_text("utf-8"))

    def _check(self, origin: dict[str, Any], engine: Engine, top_k: int) -> None:
        found = differences(origin, engine, top_k)
        if found:
            raise UserError(
                f"{self.out} was made otherwise: {'; '.join(found)}; predict as before, or give another --out"
            )

    def _recall_lines(self) -> int:
        """Take note of the answers there; returns where the last whole line ends, in bytes."""
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
                        f"{self._lines}, line {number}: not an answer; give another --out"
                    ) from error
                end += len(line)
        return end

    def _recall(self, image: str, error: str | None) -> None:
        self._done[image] += 1
        self.tally.add(error)

    def remaining(self, paths: Iterable[str]) -> Iterator[str]:
        """Those of some paths that are not answered yet."""
        for path in paths:
            name = printable(path) if self._finished else path
            if self._done[name]:
                self._done[name] -= 1
            else:
                yield path

    def write(self, answer: ImageResult) -> None:
        """Add an answer.

        Raises:
            UserError: the disk is full, say; a Parquet file was finished before.
        """
        if self._finished:
            raise UserError(f"{self.out} is finished, and {answer.image} is not in it; give another --out")
        with self._explained():
            self._file.write(as_line(answer))
        self.tally.add(answer.error)

    def finish(self) -> None:
        """All answers are there: see that they are on the disk, and make the Parquet file.

        Raises:
            UserError: as `write`.
        """
        if self._finished:
            return
        with self._explained():
            self._file.flush()
            os.fsync(self._file.fileno())
            if self.out != self._lines:
                write_parquet(self._lines, self.out, self._read_origin())
                self._lines.unlink()
                self._origin_file.unlink()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.out} cannot be written: {error.strerror}; the answers there stay, --resume goes on"
            ) from error

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if not self._finished:
            with suppress(OSError) if kind else nullcontext():  # a full disk is said once
                self._opened.close()


def _lock(file: BufferedReader, path: Path) -> None:
    """Refuse a second writer. The kernel lets go when the process ends, however it ends."""
    register_after_fork(file, BufferedReader.close)  # a worker that outlives a killed run must not hold it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{path} is being written by another process") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
