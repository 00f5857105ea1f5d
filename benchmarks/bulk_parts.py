"""Simulate the reading and writing of a bulk prediction in parts, with stubbed pictures and dying workers.

The list of images, the parts, their files and the joined file are those of `vitascope predict --engine ray`.
Only the pictures and the model are missing: a worker writes a line per image. In every so many parts, it is
killed by SIGKILL when it has written half of it. In the middle the driver stops and begins again, as with
--resume. The memory is the largest that the driver had so far.

    python benchmarks/bulk_parts.py --scratch /tmp --out                         # 10^8 images, 1,000 deaths
    python benchmarks/bulk_parts.py --scratch /tmp --workers ray --deaths 250    # the workers of Ray

`--workers processes` (the default) are two forked ones, which start at once, so that 1,000 of them can die.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import logging
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from conditions import Conditions
from contest import positive
from reports import command_line, markdown_table, note, publish
from vitascope.predict import parts as parts_module
from vitascope.predict.bulk import Compute, compute_missing, counted_lines
from vitascope.predict.on_ray import compute_on_ray, connected
from vitascope.predict.part_worker import PartDone, PartTask, PartWorker
from vitascope.predict.parts import Parts
from vitascope.predict.result_file import Tally, write_whole
from vitascope.predict.result_formats import Rows

WORKERS = 2
UNREADABLE = 1_000_003
"""One in so many images has an error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StubTask(PartTask):
    """Writes a line per image. A part in `doomed` kills the first worker that has written half of it."""

    part_images: int
    every: int
    folder: str

    suffix = ".jsonl"

    def open(self) -> Any:
        """No engine."""
        return None

    def write(self, engine: Any, images: Sequence[tuple[str, ...]], path: Path) -> None:
        """As `PartTask.write`."""
        part = number_of(images[0][0]) // self.part_images
        dies = bool(self.every) and part % self.every == 0 and is_first(Path(self.folder) / f"died-{part}")
        with open(path, "w", encoding="utf-8") as file:
            half = len(images) // 2
            file.writelines(map(stub_line, images[:half]))
            if dies:
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            file.writelines(map(stub_line, images[half:]))


def name_of(number: int) -> str:
    return f"images/{number // 10_000:05}/{number:09}.jpg"


def number_of(name: str) -> int:
    return int(name[-13:-4])


def stub_line(image: tuple[str, ...]) -> str:
    """The line of an image, as `Rows.line` writes it."""
    (name,) = image
    if number_of(name) % UNREADABLE == UNREADABLE - 1:
        return f'{{"image": "{name}", "error": "{name}: not a picture that Pillow can read"}}\n'
    return f'{{"image": "{name}", "predictions": [{{"label": "ant", "index": 0, "score": 0.5}}]}}\n'


def is_first(mark: Path) -> bool:
    """Whether this is the first call for a mark, in any process."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        return True
    return False


def compute_in_processes(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
    """Compute parts in forked processes; one that dies is replaced, and its part is computed again."""
    left = deque(wanted)
    working: dict[Connection[Any, Any], int] = {}

    def begin() -> None:
        near, far = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=serve, args=(far, [near, *working], PartWorker(parts, task)), daemon=True
        )
        process.start()
        far.close()
        give(near)

    def give(connection: Connection[Any, Any]) -> None:
        if left:
            working[connection] = left.popleft()
            connection.send(working[connection])
        else:
            connection.close()

    for _ in range(min(WORKERS, len(left))):
        begin()
    while working:
        for connection in wait(list(working)):
            assert isinstance(connection, Connection)
            part = working.pop(connection)
            try:
                done = connection.recv()
            except (EOFError, ConnectionError):
                left.appendleft(part)
                begin()
            else:
                yield done
                give(connection)
    multiprocessing.active_children()  # reaps them


def serve(
    connection: Connection[Any, Any], inherited: Sequence[Connection[Any, Any]], worker: PartWorker
) -> None:
    """The main function of a process."""
    for near_end in inherited:  # which would keep the processes at their other ends waiting
        near_end.close()
    with contextlib.suppress(EOFError):
        while True:
            connection.send(worker.compute(connection.recv()))


def peak_mb() -> float:
    """The driver's largest memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclasses.dataclass(frozen=True)
class Stage:
    """A step of the driver."""

    name: str
    seconds: float
    peak: float
    """MB."""


def simulate(arguments: argparse.Namespace, folder: Path, compute: Compute) -> tuple[list[Stage], str]:
    """The stages of the job, and what it came to."""
    stages: list[Stage] = []

    def done(name: str, start: float) -> None:
        stages.append(Stage(name, time.perf_counter() - start, peak_mb()))
        note(f"{name}: {stages[-1].seconds:,.0f} s, peak {stages[-1].peak:,.0f} MB")

    start = time.perf_counter()
    images = ((name_of(number),) for number in range(arguments.images))
    place = folder / "out.jsonl.parts"
    parts = Parts.create(place, StubTask.suffix, images, batch_size=64, about={})
    done("list the images", start)
    task = StubTask(
        model="",
        digest="",
        precision="auto",
        device="cpu",
        batch_size=64,
        workers=0,
        part_images=parts.part_images,
        every=len(parts) // arguments.deaths if arguments.deaths else 0,
        folder=str(folder),
    )
    start = time.perf_counter()
    half = parts.missing()[: len(parts) // 2]
    deque(compute(parts, task, half), maxlen=0)
    done("compute half of the parts", start)
    start = time.perf_counter()
    parts = Parts.open(place, StubTask.suffix)
    computed = compute_missing(parts, task, compute)
    assert len(computed) == len(parts) - len(half)
    done("open the job again and compute the others", start)
    deaths = len(list(folder.glob("died-*")))
    tally, out = Tally(), folder / "out.jsonl"
    start = time.perf_counter()
    write_whole(out, counted_lines(parts, tally), Rows(), "")
    done("join the parts", start)
    assert (tally.images, tally.unreadable) == (arguments.images, arguments.images // UNREADABLE)
    with open(out, encoding="utf-8") as file:
        for number, line in enumerate(itertools.islice(file, 0, None, 9_973)):  # a sample, in order
            assert line == stub_line((name_of(number * 9_973),))
    size = out.stat().st_size / 1e9
    parts.remove()
    found = (
        f"{arguments.images:,} images in {len(parts):,} parts of {parts.part_images:,}; {deaths:,} workers "
        f"killed; {tally.unreadable:,} unreadable images; a file of {size:,.1f} GB"
    )
    return stages, found


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--images", type=positive, default=10**8, help="images (default 10^8)")
    parser.add_argument("--deaths", type=int, default=1000, help="workers that are killed (default 1000)")
    parser.add_argument(
        "--unit", type=positive, default=parts_module.UNIT_IMAGES, help="images per part, at least"
    )
    parser.add_argument("--workers", choices=("processes", "ray"), default="processes")
    parser.add_argument("--scratch", type=Path, help="folder with room: 300 bytes per image")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    conditions = Conditions.now()
    logging.getLogger("vitascope").setLevel(logging.ERROR)  # not a line per death
    parts_module.UNIT_IMAGES = arguments.unit
    on_ray = arguments.workers == "ray"
    before = peak_mb()
    with (
        tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch,
        connected(None) if on_ray else contextlib.nullcontext(),
    ):
        found = simulate(arguments, Path(scratch), compute_on_ray if on_ray else compute_in_processes)
    rows = [
        (stage.name, f"{stage.seconds:,.0f}", f"{stage.peak:,.0f}", f"{stage.peak - before:,.0f}")
        for stage in found[0]
    ]
    table = markdown_table(("stage", "seconds", "peak MB", "of these since the start"), rows)
    head = conditions.heading(
        "Bulk work in parts, with stubbed pictures", workers=arguments.workers, job=found[1]
    )
    publish(f"bulk_parts-{arguments.workers}", f"{head}\n\n{table}", arguments)


if __name__ == "__main__":
    main()
