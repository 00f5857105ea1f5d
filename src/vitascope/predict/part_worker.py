"""What a process computes of a part of a job, and how it has to be like the process that began the job."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from vitascope._version import __version__
from vitascope.data.formats.table import TableImage
from vitascope.data.stored import ImageFile, StoredImage, from_text
from vitascope.errors import UserError
from vitascope.model.hardware import reuse_freed_memory
from vitascope.predict.engine import Engine
from vitascope.predict.feature_stream import FeatureStream
from vitascope.predict.features import FeaturePool, FeatureSpec
from vitascope.predict.parts import MOST_DEATHS, Parts
from vitascope.predict.predictor import Predictor
from vitascope.predict.result_formats import Rows, escaped
from vitascope.predict.runtimes import open_engine
from vitascope.predict.selection import ClassSelection
from vitascope.storage import explaining_failure


def versions() -> dict[str, str]:
    """What the processes of a job have to have in common, without the builds of torch for CPUs and GPUs."""
    return {"vitascope": __version__, "torch": torch.__version__.partition("+")[0]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartTask(ABC):
    """What a process computes of each part, in plain values that travel to it."""

    model: str
    """A MODEL."""
    digest: str
    """SHA-256 of its weights."""
    precision: str
    device: str
    batch_size: int
    workers: int | None
    """Processes that read beside each process that computes; None is for the scheduler to choose."""
    home: str = dataclasses.field(default_factory=os.getcwd)
    """The working folder, from which relative paths begin."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=versions)

    suffix: ClassVar[str]
    """Of the results' files."""

    def open(self) -> Engine:
        """The engine, in a process that has to be like the one that began the job.

        Raises:
            UserError: other versions, another working folder or another model there.
        """
        if (own := versions()) != self.versions:
            ours, theirs = (
                ", ".join(f"{name} {each[name]}" for name in own) for each in (own, self.versions)
            )
            raise UserError(
                f"this worker has {ours}, and the command {theirs}: install the same on all nodes"
            )
        try:
            os.chdir(self.home)
        except OSError as error:
            raise UserError(
                f"{self.home}: no such folder here; start the command in a folder that all nodes share"
            ) from error
        reuse_freed_memory()
        engine = open_engine(self.model, precision=self.precision, device=self.device)
        if engine.digest != self.digest:
            raise UserError(
                f"{self.model} is another model here: SHA-256 {engine.digest[:12]}, not {self.digest[:12]}"
            )
        return engine

    @abstractmethod
    def write(self, engine: Engine, images: Sequence[tuple[str, ...]], path: Path) -> None:
        """Compute the results of a part and write them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictTask(PartTask):
    """Predictions of images, one line of JSON each, as one process writes them."""

    selection: ClassSelection
    probabilities: bool
    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The columns of a table that each line has too, as `column_digests` has them."""

    suffix = ".jsonl"

    def write(self, engine: Engine, images: Sequence[tuple[str, ...]], path: Path) -> None:
        """As `PartTask.write`; `images` have their `as_text`, and the cells of the columns kept."""
        files = files_here(images)
        if self.kept:
            files = [TableImage.of(path, cells) for path, *cells in images]
        predictor = Predictor(engine, batch_size=self.batch_size)
        rows = Rows.of(engine, probabilities=self.probabilities, kept=self.kept)
        results = predictor.stream(
            files,
            self.selection.top_k,
            threshold=self.selection.threshold,
            workers=self.workers,
        )
        with closing(results), open(path, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(map(rows.line, results))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedTask(PartTask):
    """Features of images in an `.npz`: `rows` (n,), the places of the readable images in their part,
    `features` float32 (n, D), `errors`, the reasons for the others, and the `precision`."""

    layer: int | None
    pool: FeaturePool | None

    suffix = ".npz"

    def write(self, engine: Engine, images: Sequence[tuple[str, ...]], path: Path) -> None:
        """As `PartTask.write`; `images` have their `as_text` first."""
        stream = FeatureStream(
            engine,
            [FeatureSpec(self.layer, self.pool)],
            files_here(images),
            batch_size=self.batch_size,
            workers=self.workers,
            cached=False,
        )
        found = list(stream)
        with open(path, "wb") as file:
            np.savez(
                file,
                rows=np.concatenate([np.zeros(0, np.int64), *(each.indices for each in found)]),
                features=np.concatenate([each.features[0] for each in found]) if found else np.zeros((0, 0)),
                errors=np.array([escaped(reason) for reason in stream.unreadable.values()], np.str_),
                precision=np.array(engine.precision_for(stream.batch_size), np.str_),
            )


@dataclasses.dataclass(frozen=True)
class PartDone:
    """The message of a part that was computed, or of a job that cannot go on."""

    part: int
    died: int = 0
    """Workers that died at it before."""
    error: str = ""
    """Why the job cannot go on."""


class PartWorker:
    """Computes parts in one process; the engine is opened for the first."""

    def __init__(self, parts: Parts, task: PartTask) -> None:
        self.parts, self.task = parts, task

    @functools.cached_property
    def engine(self) -> Engine:
        """The engine of the task."""
        return self.task.open()

    def compute(self, part: int) -> PartDone:
        """Compute a part and write its file; nothing to do for one that has a file."""
        path, died = self.parts.file(part), 0
        try:
            if not path.exists():  # computed by a worker that died before it could say so
                images = self.parts.texts(part)
                failing = explaining_failure(path, "the results of a part", "other parts are kept")
                with failing, self.parts.writing(part) as aside:
                    died = self.parts.begin(part)
                    if died >= MOST_DEATHS:
                        raise UserError(
                            f"{died} workers died at the images from {from_text(images[0][0])} to "
                            f"{from_text(images[-1][0])}: "
                            "memory may have run out, or a picture is malformed; use a smaller batch size, "
                            "or find the picture with `vitascope predict` on these; other parts are kept"
                        )
                    self.task.write(self.engine, images, aside)
        except UserError as error:
            return PartDone(part, died, f"{socket.gethostname()}: {error}")
        return PartDone(part, died)


def files_here(images: Sequence[tuple[str, ...]]) -> list[ImageFile]:
    """The files of images. Single ones may have vanished, which is their error; a UserError if this process
    sees none of them."""
    files = [from_text(texts[0]) for texts in images]
    if not any(isinstance(file, StoredImage) or os.path.exists(file) for file in files):
        raise UserError(
            f"none of the images from {files[0]} to {files[-1]} is here: they must be in a folder that all "
            "nodes share; if they were removed, begin again"
        )
    return files
