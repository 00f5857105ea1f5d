"""Predictions of any number of images in one file: a job in parts, whose rows are joined at its end.

`OUT.fingerprint.json` beside the file has everything that the predictions depend on. It is compared before a
job is resumed.
"""

import dataclasses
import functools
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vitascope.data.reading import Faults
from vitascope.data.rows.cells import check_output
from vitascope.data.rows.parts import (
    Images,
    Loop,
    PartRows,
    Parts,
    PartTask,
    check_same,
    computed,
    job_exists,
    parts_folder,
)
from vitascope.data.stored import ImageFile, TableImage
from vitascope.deploy.predict.predictor import Predictor
from vitascope.deploy.predict.result_formats import FORMATS, Rows
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.models.engines.engine import Engine
from vitascope.models.engines.selection import AUTO, ClassSelection
from vitascope.remote import source_at
from vitascope.serialization import parse_json
from vitascope.storage import replacing, write_json

FULL_BATCH = 64
"""Images of a batch whose precision is named."""
TEST_IMAGES = 16
LISTED = 3
"""Changes of class names, and of thresholds, that are listed."""
TOLERANCE = 0.01
"""The largest difference of a test image's probability: bf16 differs by this much between processors."""

_PER_CLASS = {"class_names": ("class", "class names"), "thresholds": ("threshold", "thresholds")}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictTask(PartTask):
    """Predictions of images, a row each."""

    format: str = ".jsonl"
    """The suffix of the complete file, one of `FORMATS`."""
    selection: ClassSelection = AUTO
    probabilities: bool = False
    """Whether each row has the probability of every class, as always with several classes per image."""
    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The columns of a table that each row has too, as `column_digests` has them."""

    def rows(self, engine: Engine) -> Rows:
        """The form of the results."""
        return Rows.of(engine, probabilities=self.probabilities, kept=self.kept)

    def results(self, engine: Engine, parts: Iterator[Images]) -> Generator[PartRows, None, None]:
        """As `PartTask.results`; an image has its path and its cells of `kept`."""
        rows, counts = self.rows(engine), deque[int]()

        def files() -> Iterator[ImageFile]:
            for images in parts:
                counts.append(len(images))
                for path, *cells in images:
                    yield TableImage.of(path, cells) if cells else source_at(path)

        results = Predictor(engine, batch_size=self.batch_size).stream(
            files(), workers=self.workers, **dataclasses.asdict(self.selection)
        )
        with closing(results):
            for first in results:
                part = [first, *itertools.islice(results, counts.popleft() - 1)]
                faults = {
                    place: result.error for place, result in enumerate(part) if result.error is not None
                }
                yield PartRows(rows.encoded(part, self.format), faults)

    def options(self, engine: Engine) -> dict[str, Any]:
        """Everything that the predictions depend on beside the images and the weights, as values of JSON."""
        rows = self.rows(engine)
        return {
            "top_k": self.selection.limit(engine),
            "probabilities": bool(rows.columns),
            "columns kept": list(self.kept),
            "cells": dict(self.kept),
            "num_classes": engine.num_classes,
            "preprocess": engine.preprocess.to_dict(),
            "class_names": list(engine.class_names),
            "thresholds": list(self.selection.thresholds(engine)),
            "coverage": self.selection.coverage,
            "familiar": self.selection.familiar,
            "views": engine.views,
        }


def fingerprint(engine: Engine, task: PredictTask, places: Sequence[str]) -> dict[str, Any]:
    """What identifies the predictions of a task, as values of JSON; the weights are recognized by the most
    probable class of each of `TEST_IMAGES` synthetic images, and its probability."""
    scores, indices = _probabilities_of_waves(engine).max(dim=1)
    automatic = f"auto precision ({engine.precision_for(FULL_BATCH)})"
    return {
        "places": list(places),
        **task.options(engine),
        "engine": engine.description.replace("auto precision", automatic),  # for people
        "test_answers": [list(pair) for pair in zip(indices.tolist(), scores.tolist(), strict=True)],
    }


def differences(
    before: Mapping[str, Any], engine: Engine, task: PredictTask, places: Sequence[str]
) -> list[str]:
    """List the differences from a fingerprint, such as `top_k was 5, not 3`; empty if there are none."""
    now = {"places": list(places), **task.options(engine)}
    changes = [change for name in now for change in _changes(name, before[name], now[name])]
    if changes:
        return changes
    rows = _probabilities_of_waves(engine).tolist()
    for row, (index, score) in zip(rows, before["test_answers"], strict=True):
        if abs(row[index] - score) > TOLERANCE:
            label = engine.label(index)
            return [f"its model gave class {label} {score:.1%} on a test image, not {row[index]:.1%}"]
    return []


def _changes(name: str, before: Any, now: Any) -> Iterator[str]:
    if name == "places" and before != now:
        yield f"the images were {' '.join(before)}, not {' '.join(now)}"
    elif name == "cells":
        others = [key for key in now if before.get(key, now[key]) != now[key]]
        yield from (f"the column {key} had other cells" for key in others)
    elif isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _changes(key, before.get(key), now.get(key))
    elif name in _PER_CLASS:
        one, many = _PER_CLASS[name]
        by_class = ({f"{one} {k}": value for k, value in enumerate(values)} for values in (before, now))
        changes = list(_changes("", *by_class))
        yield from changes[:LISTED]
        if len(changes) > LISTED:
            yield f"{len(changes) - LISTED:,} more {many} differ"
    elif before != now:
        yield f"{name} was {before!r}, not {now!r}"


def _probabilities_of_waves(engine: Engine) -> Tensor:
    return engine.predict([engine.pixels(waves(number)) for number in range(TEST_IMAGES)]).probabilities


def waves(number: int) -> npt.NDArray[np.uint8]:
    """An image of coloured waves, different for each number, uint8 (64, 64, 3)."""
    y, x = np.mgrid[:64, :64] / 64
    planes = [
        np.sin(2 * math.pi * ((number % 4 + channel) * x + (number // 4 + 1) * y) + number * (channel + 1))
        for channel in range(3)
    ]
    return np.rint(127.5 + 127.5 * np.stack(planes, axis=2)).astype(np.uint8)


def fingerprint_file(out: Path) -> Path:
    """The file beside a complete result file with its fingerprint and its counts."""
    return out.with_name(f"{out.name}.fingerprint.json")


def check_result_file(out: Path, *, resume: bool) -> None:
    """Reject a file that cannot be written, and an existing one or its parts unless they are resumed."""
    check_output(out, FORMATS, "a result file")
    begun = parts_folder(out) if job_exists(out) else out
    if begun.exists() and not resume:
        raise UserError(f"{begun} exists: continue it with --resume, or choose another file")


def predict_to_file(
    out: Path,
    engine: Engine,
    task: PredictTask,
    loop: Loop,
    places: Sequence[str],
    images: Iterable[ImageFile],
    *,
    resume: bool = False,
) -> tuple[Faults, int]:
    """Predict any number of images into a result file, in parts that are joined at the end.

    The images are those that were listed when the job began; resuming it warns of another number of images.

    Args:
        out: the file, of one of `FORMATS`, complete or absent.
        engine: the model, which need not be the one that computes in other processes.
        loop: `Parts.compute` of this process, or the workers of Ray.
        places: image files, folders and tables of them, also in stores, which the fingerprint has.
        images: the images there, from `find_images`; taken once.
        resume: continue a job that was begun, or begin it.

    Returns:
        The record of all images and the unreadable ones, and the number of images that were computed now.

    Raises:
        UserError: as `check_out` and `ClassSelection.check`; a `top_k` for a CSV file of one class per image;
            a job of other images, options or another model; no images.
    """
    check_result_file(out, resume=resume)
    engine.check_classes()
    selection = task.selection
    selection.check(engine)
    if out.suffix == ".csv" and not engine.thresholds and selection.top_k not in (None, 1):
        raise UserError(
            f"{out}: a .csv file has the most probable class of each image: leave out top_k, and "
            "ask for all probabilities to get the other classes"
        )
    task = dataclasses.replace(task, format=out.suffix)
    changes = functools.partial(differences, engine=engine, task=task, places=places)
    if out.exists() and not job_exists(out):
        faults = _faults_of(out, changes)
        _warn_of_others(out, faults.images, images)
        return faults, 0
    begun = job_exists(out)
    about = {} if begun else fingerprint(engine, task, places)
    texts = (
        (
            image if isinstance(image, str) else image.as_text(),
            *(image.cells if isinstance(image, TableImage) else ()),
        )
        for image in images
    )
    with computed(out, task, loop, texts, about, changes) as (parts, now):
        faults = Faults()
        with replacing(out) as aside:
            task.rows(engine).write(_joined(parts, faults), aside)
            write_json(fingerprint_file(out), {**parts.about, "tally": dataclasses.asdict(faults)})
    if begun:
        _warn_of_others(out, faults.images, images)
    return faults, sum(map(parts.count, now))


def _faults_of(out: Path, changes: Callable[[Mapping[str, Any]], Sequence[str]]) -> Faults:
    """The counts of a complete file, which must be one of the same job."""
    path = fingerprint_file(out)
    try:
        about = parse_json(path.read_text(encoding="utf-8"))
        faults = Faults(**about["tally"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{out}: its fingerprint is broken or missing; choose another file") from error
    check_same(out, about, changes)
    return faults


def _warn_of_others(out: Path, images: int, files: Iterable[ImageFile]) -> None:
    if (count := sum(1 for _ in files)) != images:
        log.warning(
            "%s has the %s that were listed when it was begun, and there are %s now: predict the others into "
            "another file",
            *(out, counted(images, "image"), f"{count:,}"),
        )


def _joined(parts: Parts, faults: Faults) -> Iterator[bytes]:
    """The rows of all parts in order, whose images are added to the counts."""
    for part in range(len(parts)):
        results = parts.read(part)
        for place in range(parts.count(part)):
            faults.tally(results.faults.get(place))
        yield results.rows
