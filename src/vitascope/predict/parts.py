"""A job on many images in parts: consecutive images, whose results any process writes as one file.

`OUT.parts/` is the state of the job, on a file system that all its processes share:

| file | content |
|---|---|
| `images` | the texts of each image (its path, maybe its label and split) in order, NUL after each |
| `job.json` | where each part begins in `images`, and what the results depend on; written last |
| `00042.jsonl` | the result of a part, whole or absent |
| `00042.tries` | a line for each process that began the part and has not ended it: its number and node |

So the state of 10^8 images in memory is one number per part, a lost process costs the parts that it was
computing, and a later command continues with the parts that are absent.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import socket
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitascope.arguments import check_value
from vitascope.errors import UserError
from vitascope.serialization import parse_json
from vitascope.storage import explaining_failure, make_folder, replacing, settle, write_json

UNIT_IMAGES = 1024
"""The fewest images of a part, raised to a multiple of the batch size: batches are those of one process."""
MOST_DEATHS = 5
"""Of processes at one part, such as for a picture at which memory runs out."""
MOST_PARTS = 10_000
"""Of a job. From `UNIT_IMAGES` times as many images on, parts become larger."""
IMAGES, JOB = "images", "job.json"


def parts_folder(out: Path) -> Path:
    """The folder of the parts of a file, until it is complete."""
    return out.absolute().with_name(f"{out.name}.parts")


def job_exists(out: Path) -> bool:
    """Whether a file was begun in parts, and all its images are listed."""
    return (parts_folder(out) / JOB).is_file()


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a job."""

    folder: Path
    suffix: str
    """Of the results' files."""
    images: int
    """Of all parts together."""
    part_images: int
    """Of each part but the last."""
    fields: int
    """Texts per image."""
    starts: tuple[int, ...]
    """Where each part begins in the list of the images, and where the last ends, in bytes."""
    about: Mapping[str, Any]
    """What the results depend on."""

    @classmethod
    def create(
        cls,
        folder: Path,
        suffix: str,
        images: Iterable[Sequence[str]],
        *,
        batch_size: int,
        about: Mapping[str, Any],
    ) -> Parts:
        """List the images of a new job, which are read once, in the folder.

        Raises:
            UserError: no images; a text with a NUL; a failure to write.
        """
        unit = batch_size * -(-UNIT_IMAGES // batch_size)
        starts, end, count, fields = array("q"), 0, 0, 0
        with explaining_failure(folder, "the list of images", "choose another file"):
            make_folder(folder)
            for left in folder.glob(f"*{suffix}"):  # of a job whose removal was interrupted
                left.unlink()
            with replacing(folder / IMAGES) as aside, open(aside, "wb") as file:
                for count, texts in enumerate(images, 1):
                    if count % unit == 1 or unit == 1:
                        starts.append(end)
                    data = b"".join(os.fsencode(text) + b"\0" for text in texts)
                    fields = len(texts)
                    if data.count(b"\0") != fields:
                        raise UserError(f"{' '.join(texts)}: a path or label with a NUL cannot be listed")
                    end += file.write(data)
            if not count:
                raise UserError("no images found")
            units = -(-len(starts) // MOST_PARTS)  # of a part
            found = cls(
                *(folder, suffix, count, unit * units, fields, (*starts[::units], end)),
                about=json.loads(json.dumps(about)),  # as it is read again
            )
            write_json(folder / JOB, {name: getattr(found, name) for name in _VALUES})
        return found

    @classmethod
    def open(cls, folder: Path, suffix: str) -> Parts:
        """Open the parts of a job that was begun.

        Raises:
            UserError: a damaged `job.json`, or a list of images that does not belong to it.
        """
        path = folder / JOB
        try:
            values = parse_json(path.read_text(encoding="utf-8"))
            for name, kind in _VALUES.items():
                check_value(name, values[name], kind)
            values["starts"] = tuple(values["starts"])
            found = cls(folder, suffix, **{name: values[name] for name in _VALUES})
            if len(found) != -(-found.images // found.part_images):
                raise ValueError(f"{len(found):,} parts of {found.images:,} images")
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise UserError(f"{path}: damaged ({error}): remove {folder}, and begin again") from error
        listed = folder / IMAGES
        size = listed.stat().st_size if listed.is_file() else 0
        if size != found.starts[-1]:
            raise UserError(
                f"{listed} has {size:,} bytes, not {found.starts[-1]:,}: it was cut short or changed; remove "
                f"{folder}, and begin again"
            )
        return found

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
        found = [os.fsdecode(text) for text in data.split(b"\0")[:-1]]
        if len(data) != end - start or len(found) != self.count(part) * self.fields:
            raise UserError(f"{path}: cut short or changed; remove {self.folder}, and begin again")
        return list(zip(*[iter(found)] * self.fields, strict=True))

    def file(self, part: int) -> Path:
        """The result of a part."""
        return self.folder / f"{part:05}{self.suffix}"

    def tries(self, part: int) -> Path:
        """A file with a line for each process that began a part and has not ended it."""
        return self.folder / f"{part:05}.tries"

    def begin(self, part: int) -> int:
        """Note that this process begins a part; the number of those that died at it."""
        with open(self.tries(part), "a+", encoding="utf-8") as file:
            file.seek(0)
            died = sum(1 for _ in file)
            file.write(f"{os.getpid()} {socket.gethostname()}\n")
        return died

    def forgive(self) -> None:
        """Forget which processes died, for a command that begins or continues the job."""
        for path in self.folder.glob("*.tries"):
            path.unlink()

    def missing(self) -> list[int]:
        """The parts without a result."""
        done = set(os.listdir(self.folder))
        return [part for part in range(len(self)) if self.file(part).name not in done]

    @contextmanager
    def writing(self, part: int) -> Iterator[Path]:
        """Yield a path to write the result of a part to; it gets its name when it is whole."""
        # Processes of several nodes may have one number, and a part may be computed by a process that was
        # taken for dead beside the one that replaced it: names are drawn.
        aside = self.folder / f".{secrets.token_hex(8)}{self.suffix}"
        try:
            yield aside
            settle(aside, self.file(part))
        finally:
            aside.unlink(missing_ok=True)
            self.tries(part).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder, `job.json` first, so that an interrupted removal leaves no job."""
        (self.folder / JOB).unlink(missing_ok=True)
        shutil.rmtree(self.folder)


_VALUES: dict[str, Any] = {
    "images": int,
    "part_images": int,
    "fields": int,
    "starts": tuple[int, ...],
    "about": Mapping,
}
"""Those of `job.json`, with their types."""
