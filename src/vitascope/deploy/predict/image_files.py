"""Pictures by the million: found as they are needed, read by other processes while the model computes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from vitascope.data.decoding import ImageError
from vitascope.data.formats.folder import IMAGE_SUFFIXES
from vitascope.data.preprocess import Pixels
from vitascope.data.reading import StreamingPool
from vitascope.deploy.predict.engine import Engine
from vitascope.errors import UserError

Answered = tuple[Sequence[str], Tensor, dict[int, str]]
"""Paths; probabilities (b, K) of those that could be read; by place in the paths, why one could not."""


def find_images(places: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Iterator[str]:
    """Picture files, and those below folders: what is named like a picture and not hidden.

    A folder's own files come first, then its folders, each sorted by name; only the names of one folder and
    of those above it are in memory. Links to folders are not followed.

    Raises:
        UserError: a place that is not there, or a folder that cannot be listed, once it is its turn.
    """
    several = [places] if isinstance(places, str | os.PathLike) else places
    for place in (os.fspath(place) for place in several):
        if os.path.isdir(place):
            yield from _below(place)
        elif os.path.exists(place):
            yield place
        else:
            raise UserError(f"{place}: no such file")


def _below(folder: str) -> Iterator[str]:
    files, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES and entry.is_file():
                    files.append(entry.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed: {error.strerror}") from error
    for name in sorted(files):
        yield os.path.join(folder, name)
    del files
    for name in sorted(folders):
        yield from _below(os.path.join(folder, name))


def answer_all(
    engine: Engine, paths: Iterable[str], batch_size: int, workers: int | None
) -> Iterator[Answered]:
    """Probabilities of picture files, a batch at a time, in their order; a few batches are read ahead.

    Args:
        engine: what answers. One that makes pixels in its own way makes them in this process.
        paths: taken as they are needed.
        batch_size: pictures at a time.
        workers: processes that read; 0 reads in this one, None takes one a core.

    Raises:
        UserError: a process that reads was killed.
    """
    batches = _batches(iter(paths), batch_size)
    workers = (os.cpu_count() or 1) if workers is None else workers
    if not workers or engine.own_pixels:
        yield from (_answer_here(engine, batch) for batch in batches)
        return
    pool = StreamingPool(engine.preprocess, batch_size, workers)
    try:
        for batch, pixels, faults in pool.read(batches):
            good = [row for row in range(len(batch)) if row not in faults]
            readable = torch.from_numpy(pixels[good] if faults else pixels)  # (b, C, H, W)
            yield batch, engine.probabilities(readable) if good else _nothing(engine), faults
    finally:
        pool.close()


def _batches(paths: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(itertools.islice(paths, size)):
        yield batch


def _answer_here(engine: Engine, paths: Sequence[str]) -> Answered:
    """A batch read in this process, where pictures may differ in size."""
    pictures: list[Pixels] = []
    faults: dict[int, str] = {}
    for place, path in enumerate(paths):
        try:
            pictures.append(engine.pixels(path))
        except ImageError as error:
            faults[place] = str(error)
    return paths, engine.predict(pictures) if pictures else _nothing(engine), faults


def _nothing(engine: Engine) -> Tensor:
    return torch.empty(0, engine.num_classes)
