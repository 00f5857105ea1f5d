"""A resumable job: images are mapped to results in parts, by a loop here or by the workers of Ray.

`OUT.parts/` is the state of the job, on a file system that all its processes share:

| file | content |
|---|---|
| `images` | the texts of each image (its path, maybe its label and split) in order, NUL after each |
| `job.json` | where each part begins in `images`, and what the results depend on; written last |
| `00042.part` | a line of JSON about a part, then its rows in their final form; whole or absent |
| `00042.tries` | a line for each process that began the part, until it is reported: its number and node |

So the state of 10^8 images in memory is one number per part, a lost process costs the parts that it was
computing, and a later command continues with the parts that are absent.
"""

import dataclasses
import json
import logging
import os
import secrets
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

from tqdm import tqdm

from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.models.engines.engine import Engine
from vitascope.remote import source_at
from vitascope.serialization import parse_json
from vitascope.storage import explaining_failure, locked, make_folder, replacing, settle, write_json

UNIT_IMAGES = 256
"""The fewest images of a part, raised to a multiple of the batch size: batches are those without parts."""
MOST_DEATHS = 5
"""Of processes at one part, such as for a picture at which memory runs out."""
MOST_PARTS = 10_000
"""Of a job. From `UNIT_IMAGES` times as many images on, parts become larger."""
FORMAT = 2
"""Of the files of parts; a job of another format is not resumed."""
IMAGES, JOB, LOCK = "images", "job.json", "lock"

Images: TypeAlias = Sequence[tuple[str, ...]]
"""The texts of images: the `as_text` of each first."""

log = logging.getLogger(__name__)


class PartRows(NamedTuple):
    """The results of a part's images."""

    rows: bytes
    """As the complete file has them."""
    faults: Mapping[int, str]
    """The reason for each image that could not be read, by its place in the part."""
    precision: str = ""
    """In which they were computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartTask(ABC):
    """What is computed of images; it travels to other processes."""

    batch_size: int
    workers: int | None = None
    """Processes that read, beside each process that computes; None is for the loop to choose."""

    @abstractmethod
    def results(self, engine: Engine, parts: Iterator[Images]) -> Generator[PartRows, None, None]:
        """The results of each part; parts may be taken ahead."""


class PartDone(NamedTuple):
    """A part that was computed."""

    part: int
    deaths: int = 0
    """Workers that died at it before."""


Loop: TypeAlias = Callable[["Parts", PartTask, Sequence[int]], Iterator[PartDone]]
"""Computes some parts of a job, in any order."""


def parts_folder(out: Path) -> Path:
    """The folder of the parts of a file, until it is complete."""
    return out.absolute().with_name(f"{out.name}.parts")


def job_exists(out: Path) -> bool:
    """Whether a file was begun in parts, and all its images are listed."""
    return (parts_folder(out) / JOB).is_file()


def kept_parts(out: Path, name: str, advice: str) -> str:
    """The finished parts of a file in words, with the way to continue, if it was begun."""
    if not job_exists(out):
        return "nothing is kept"
    done = sum(not path.name.startswith(".") for path in parts_folder(out).glob("*.part"))
    return f"kept: {counted(done, 'finished part')} of {name}; {advice}"


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a job."""

    folder: Path
    images: int
    """Of all parts together."""
    part_images: int
    """Of each part but the last."""
    fields: int
    """Texts per image."""
    starts: list[int]
    """Where each part begins in the list of the images, and where the last ends, in bytes."""
    about: Mapping[str, Any]
    """What the results depend on, as values of JSON."""
    format: int = FORMAT

    @classmethod
    def create(
        cls, folder: Path, images: Iterable[Sequence[str]], *, batch_size: int, about: Mapping[str, Any]
    ) -> Self:
        """List the images of a new job, which are read once, in the folder.

        Raises:
            UserError: no images; a text with a NUL; a failure to write.
        """
        unit = batch_size * -(-UNIT_IMAGES // batch_size)
        starts, end, count, fields = list[int](), 0, 0, 0
        with explaining_failure(folder, "the list of images", "choose another file"):
            make_folder(folder)
            for left in folder.glob("*.part"):  # of a job whose removal was interrupted
                left.unlink()
            with replacing(folder / IMAGES) as aside, open(aside, "wb") as file:
                for count, texts in enumerate(images, 1):
                    if count % unit == 1 or unit == 1:
                        starts.append(end)
                    fields = len(texts)
                    end += file.write(_listed(texts))
            if not count:
                raise UserError("no images found")
            units = -(-len(starts) // MOST_PARTS)  # of a part
            parts = cls(folder, count, unit * units, fields, [*starts[::units], end], about)
            values = {field.name: getattr(parts, field.name) for field in dataclasses.fields(cls)[1:]}
            write_json(folder / JOB, values)
        return parts

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the parts of a job that was begun.

        Raises:
            UserError: a damaged `job.json`, or one of another version; a list of images that is not its own.
        """
        try:
            parts = cls(folder, **{"format": 1, **parse_json((folder / JOB).read_text(encoding="utf-8"))})
            size = (folder / IMAGES).stat().st_size
            if parts.format != FORMAT:
                raise ValueError(f"of another version of vitascope: format {parts.format!r}, not {FORMAT}")
            if len(parts) != -(-parts.images // parts.part_images) or size != parts.starts[-1]:
                raise ValueError(f"{len(parts):,} parts of {parts.images!r} images in {size:,} bytes")
        except (OSError, ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise UserError(f"{folder} cannot be resumed ({error}): remove it, and begin again") from error
        return parts

    def __len__(self) -> int:
        """The number of parts."""
        return len(self.starts) - 1

    def count(self, part: int) -> int:
        """The number of a part's images."""
        return min(self.part_images, self.images - part * self.part_images)

    def texts(self, part: int) -> list[tuple[str, ...]]:
        """The texts of each image of a part.

        Raises:
            UserError: this process does not see the list that the job was begun with.
        """
        path, start, end = self.folder / IMAGES, self.starts[part], self.starts[part + 1]
        try:
            with open(path, "rb") as file:
                file.seek(start)
                data = file.read(end - start)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read: {error.strerror}; --out must be in a folder that all nodes share"
            ) from error
        found = [text.decode("utf-8", "surrogatepass") for text in data.split(b"\0")[:-1]]
        if len(data) != end - start or len(found) != self.count(part) * self.fields:
            raise UserError(f"{path}: cut short or changed; remove {self.folder}, and begin again")
        return list(zip(*[iter(found)] * self.fields, strict=True))

    def file(self, part: int) -> Path:
        """The results of a part."""
        return self.folder / f"{part:05}.part"

    def tries(self, part: int) -> Path:
        """A file with a line for each process that began a part, until it is reported."""
        return self.folder / f"{part:05}.tries"

    def deaths(self, part: int) -> int:
        """How many processes have begun a part, where none is at work on it."""
        try:
            return len(self.tries(part).read_text(encoding="utf-8").splitlines())
        except FileNotFoundError:
            return 0

    def begin(self, part: int) -> int:
        """Note that this process begins a part; the number of those that died at it.

        Raises:
            UserError: too many died.
        """
        deaths = self.deaths(part)
        with (
            explaining_failure(self.file(part), "the results of a part", "other parts are kept"),
            open(self.tries(part), "a", encoding="utf-8") as file,
        ):
            file.write(f"{os.getpid()} {socket.gethostname()}\n")
        if deaths >= MOST_DEATHS:
            first, *_, last = (str(source_at(image[0])) for image in self.texts(part) * 2)
            raise UserError(
                f"{deaths} workers died at the images from {first} to {last}: memory may have run out, or a "
                "picture is malformed; use a smaller batch size, or find the picture with `vitascope "
                "predict` on these; other parts are kept"
            )
        return deaths

    def missing(self) -> list[int]:
        """The parts without results."""
        done = set(os.listdir(self.folder))
        return [part for part in range(len(self)) if self.file(part).name not in done]

    def write(self, part: int, results: PartRows) -> None:
        """Write the results of a part; the file is whole or absent."""
        # Not `replacing`: processes of several nodes may have one number, and a part may be computed by a
        # process that was taken for dead beside the one that replaced it.
        aside = self.folder / f".{secrets.token_hex(8)}.part"
        try:
            with explaining_failure(self.file(part), "the results of a part", "other parts are kept"):
                with open(aside, "wb") as file:
                    note = {**results._asdict(), "rows": len(results.rows)}
                    file.writelines([json.dumps(note).encode(), b"\n", results.rows])
                settle(aside, self.file(part))
        finally:
            aside.unlink(missing_ok=True)

    def read(self, part: int, *, rows: bool = True) -> PartRows:
        """The results of a part, or without `rows` what is known of it.

        Raises:
            UserError: a damaged file.
        """
        path = self.file(part)
        try:
            with open(path, "rb") as file:
                note = parse_json(file.readline().decode())
                content = file.read() if rows else b""
            if rows and len(content) != note["rows"]:
                raise ValueError(f"{len(content):,} bytes of {note['rows']!r}")
            faults = {int(place): reason for place, reason in note["faults"].items()}
            return PartRows(content, faults, note["precision"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged ({error}); remove it, and resume") from error

    def compute(self, task: PartTask, engine: Engine, wanted: Sequence[int]) -> Iterator[PartDone]:
        """Compute parts one after the other in this process."""
        deaths = []

        def begun() -> Iterator[Images]:
            for part in wanted:
                deaths.append(self.begin(part))
                yield self.texts(part)

        with closing(task.results(engine, begun())) as results:
            for number, (part, rows) in enumerate(zip(wanted, results, strict=True)):
                self.write(part, rows)
                yield PartDone(part, deaths[number])

    def remove_attempts(self) -> None:
        """Remove what processes that ended in the middle of a part have left."""
        for path in (*self.folder.glob("*.tries"), *self.folder.glob(".*.part")):
            path.unlink(missing_ok=True)

    def compute_missing(self, task: PartTask, loop: Loop) -> list[int]:
        """Compute the parts that have no file, under a progress bar, and return them.

        Raises:
            UserError: of any process; the parts that are done are kept.
        """
        self.remove_attempts()  # of an earlier command
        missing = self.missing()
        with tqdm(
            total=self.images,
            initial=self.images - sum(map(self.count, missing)),
            unit=" images",
            delay=3,
            leave=False,
            disable=None,
        ) as bar:
            try:
                for part, deaths in loop(self, task, missing) if missing else ():
                    self.tries(part).unlink(missing_ok=True)
                    if deaths:
                        log.warning(
                            "%s died at part %d of %d, and another has taken over",
                            *(counted(deaths, "worker"), part + 1, len(self)),
                        )
                    bar.update(self.count(part))
            finally:
                self.remove_attempts()
        if left := self.missing():
            raise UserError(f"{len(left):,} of {len(self):,} parts are not computed: resume the command")
        return missing


def are_listed(out: Path, images: Iterable[Sequence[str]]) -> bool:
    """Whether a file that was begun in parts is of these images."""
    with open(parts_folder(out) / IMAGES, "rb") as file:
        return all(file.read(len(data)) == data for data in map(_listed, images)) and not file.read(1)


def _listed(texts: Sequence[str]) -> bytes:
    """The texts of an image in the list."""
    return b"".join(text.encode("utf-8", "surrogatepass") + b"\0" for text in texts)


def loop_of(engine: Engine) -> Loop:
    """Computes parts in this process."""
    return lambda parts, task, wanted: parts.compute(task, engine, wanted)


@contextmanager
def computed(
    out: Path,
    task: PartTask,
    loop: Loop,
    images: Iterable[Sequence[str]],
    about: Mapping[str, Any],
    differences: Callable[[Mapping[str, Any]], Sequence[str]],
) -> Iterator[tuple[Parts, list[int]]]:
    """All parts of a job, once they are computed, and those that were computed now; they are removed at the
    end of the context, in which they are joined to `out`.

    Args:
        images, about: as for `Parts.create`; not taken of a job that has begun.
        differences: lists what differs in the `about` of a job that has begun.

    Raises:
        UserError: a job of other images or options; another process works on it; as `compute_missing`.
    """
    folder = parts_folder(out)
    make_folder(folder)
    with locked(folder / LOCK):
        if job_exists(out):
            parts = Parts.open(folder)
            check_same(folder, parts.about, differences)
        else:
            parts = Parts.create(folder, images, batch_size=task.batch_size, about=about)
        now = parts.compute_missing(task, loop)
        with explaining_failure(out, "the results", "the parts are kept and can be resumed"):
            yield parts, now
            (folder / JOB).unlink()  # first, so that an interrupted removal leaves no job
            shutil.rmtree(folder)


def check_same(
    place: Path, about: Mapping[str, Any], differences: Callable[[Mapping[str, Any]], Sequence[str]]
) -> None:
    """Reject results of other images, another model or other options."""
    try:
        found = differences(about)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{place}: its fingerprint is broken, or of another version; choose another file"
        ) from error
    if found:
        raise UserError(
            f"{place} was made with other options or another model: {'; '.join(found)}; use the same ones, "
            "or choose another file"
        )
