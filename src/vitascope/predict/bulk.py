"""Prediction and embedding in parts: list the images, have processes compute the parts, join the results."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vitascope.data.formats.table import TableImage
from vitascope.data.stored import as_text, from_text
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.model.vision_model import VisionModel
from vitascope.predict.embedding_file import EmbeddingColumns, Part, write_embeddings
from vitascope.predict.engine import Engine, TorchEngine
from vitascope.predict.feature_stream import BLOCK
from vitascope.predict.features import FeatureSpec
from vitascope.predict.fingerprint import Fingerprint
from vitascope.predict.part_worker import EmbedTask, PartDone, PartTask, PartWorker, PredictTask
from vitascope.predict.parts import Parts, job_exists, parts_folder
from vitascope.predict.predictor import check_batch_size, check_workers, find_images
from vitascope.predict.result_file import (
    Tally,
    check_columns,
    check_place,
    fingerprint_file,
    lines_file,
    write_whole,
)
from vitascope.predict.result_formats import Rows
from vitascope.predict.runtimes import open_engine
from vitascope.predict.selection import ClassSelection
from vitascope.storage import check_local, explaining_failure, locked, write_json
from vitascope.weights.loading import save_pretrained

MODEL = "model"
"""The folder, among the parts, of a model that was made in memory."""
LOCK = "lock"
ERROR_KEY = '", "error": "'
"""In the lines of JSON of images that could not be read, and in no others: texts have no plain quotes."""

log = logging.getLogger(__name__)


Compute = Callable[[Parts, PartTask, Sequence[int]], Iterator[PartDone]]
"""Computes some parts of a job, in any order, by `PartWorker.compute`."""


def compute_here(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
    """Compute parts one after the other in this process."""
    return map(PartWorker(parts, task).compute, wanted)


def compute_missing(parts: Parts, task: PartTask, compute: Compute) -> list[int]:
    """Compute the parts that have no file, under a progress bar, and return them.

    Raises:
        UserError: of any process; the parts that are done are kept.
    """
    parts.forgive()
    missing = parts.missing()
    with tqdm(
        total=parts.images,
        initial=parts.images - sum(map(parts.count, missing)),
        unit=" images",
        delay=3,
        leave=False,
        disable=None,
    ) as bar:
        for done in compute(parts, task, missing) if missing else ():
            if done.error:
                raise UserError(done.error)
            if done.died:
                log.warning(
                    "%s at part %d of %d, which was computed again",
                    *(f"{counted(done.died, 'worker')} died", done.part + 1, len(parts)),
                )
            bar.update(parts.count(done.part))
    if left := parts.missing():
        raise UserError(f"{len(left):,} of {len(parts):,} parts are not computed: resume the command")
    return missing


@dataclasses.dataclass(frozen=True)
class Job:
    """What all jobs in parts have: a model, a file, and how processes compute."""

    model: str | VisionModel
    """A MODEL, or a model with its preprocessing."""
    out: Path
    """The file, which is complete or absent; `OUT.parts` beside it has the state of the job."""
    compute: Compute
    """Computes the parts."""
    _: dataclasses.KW_ONLY
    batch_size: int = 64
    workers: int | None = None
    """Processes that read, for each process that computes."""
    precision: str = "auto"
    device: str = "auto"
    """These two as for `Predictor`, in each process that computes."""

    @functools.cached_property
    def engine(self) -> Engine:
        """That of the process that begins the job and computes nothing, on the CPU."""
        if isinstance(self.model, str):
            return open_engine(self.model, precision=self.precision, device="cpu")
        return TorchEngine(self.model, precision=self.precision, device="cpu")

    @contextmanager
    def computed(
        self,
        kind: type[PartTask],
        images: Callable[[], Iterable[Sequence[str]]],
        about: Mapping[str, Any],
        check: Callable[[Parts], None],
        **options: Any,
    ) -> Iterator[tuple[Parts, list[int]]]:
        """All parts, once they are computed, and those that were computed now; they are removed at the end of
        the context, in which they are joined.

        Args:
            kind, options: what is computed of a part, and its options beside those of this job.
            images, about: as for `Parts.create`, of a job that has not begun.
            check: rejects the parts of a job that has begun with other images or options.
        """
        folder = parts_folder(self.out)
        folder.mkdir(exist_ok=True)
        with locked(folder / LOCK):
            if job_exists(self.out):
                parts = Parts.open(folder, kind.suffix)
                check(parts)
            else:
                parts = Parts.create(folder, kind.suffix, images(), batch_size=self.batch_size, about=about)
            runs_on_gpus = isinstance(self.engine, TorchEngine)  # exported models run on CPUs
            task = kind(
                model=reference(self.model, folder),
                digest=self.engine.digest,
                precision=self.precision,
                device=self.device if runs_on_gpus or self.device != "auto" else "cpu",
                batch_size=self.batch_size,
                workers=self.workers,
                **options,
            )
            computed = compute_missing(parts, task, self.compute)
            with explaining_failure(self.out, "the results", "the parts are kept and can be resumed"):
                yield parts, computed
                parts.remove()


def predict_in_parts(
    job: Job,
    places: Sequence[str],
    selection: ClassSelection | None = None,
    *,
    probabilities: bool = False,
    resume: bool = False,
    table: TableOptions = AS_RECOGNIZED,
    kept: Mapping[str, str] | None = None,
) -> tuple[Tally, int]:
    """Predict image files and folders of any size into a result file, in parts, and join them.

    The file is that of one process. The images are listed once, when the job begins.

    Args:
        job: the model, the file and the processes.
        places: image files, and folders of them, also in stores.
        selection, probabilities: as for `ResultFile`.
        resume: continue a job that was begun in parts.
        table: how a table of images is read.
        kept: its columns, to write them too, as `column_digests` has them.

    Returns:
        The counts of all images, and the number of images that were computed now.

    Raises:
        UserError: a file that exists, or cannot be written; a job of other images, options or another model;
            no images; as `PartTask.open`, in any process.
    """
    check_out_in_parts(job.out, resume=resume)
    check_workers(job.workers)
    check_batch_size(job.batch_size)
    selection = selection or ClassSelection()
    job.engine.check_classes()
    check_columns(job.out, job.engine, selection)
    rows = Rows.of(job.engine, probabilities=probabilities, kept=kept)
    fingerprint = Fingerprint.of(job.engine, selection, probabilities=bool(rows.columns), kept=rows.kept)
    with job.computed(
        PredictTask,
        lambda: (
            (as_text(file), *(file.cells if isinstance(file, TableImage) else ()))
            for file in find_images(places, table, keep=bool(kept))
        ),
        {"places": list(places), "fingerprint": dataclasses.asdict(fingerprint)},
        lambda parts: check_same_job(parts, job.engine, selection, rows, places),
        selection=selection,
        probabilities=probabilities,
        kept=rows.kept,
    ) as (parts, computed):
        tally = Tally()
        written = write_json(fingerprint_file(job.out), parts.about["fingerprint"])
        write_whole(job.out, counted_lines(parts, tally), rows, written.read_text(encoding="utf-8"))
        if job.out.suffix == ".parquet":
            written.unlink()
    return tally, sum(map(parts.count, computed))


def check_out_in_parts(out: Path, *, resume: bool) -> None:
    """Reject a file that cannot be written, one that exists, and parts that exist unless they are resumed."""
    check_local(out)
    check_place(out)
    for path in {out, lines_file(out)} if not (resume and job_exists(out)) else ():
        if path.exists():
            raise UserError(
                f"{path} exists: it is complete, or was begun on one machine; resume it there, or choose "
                "another file"
            )
    if job_exists(out) and not resume:
        raise UserError(f"{parts_folder(out)} exists: resume it, or choose another file")


def check_same_job(
    parts: Parts, engine: Engine, selection: ClassSelection, rows: Rows, places: Sequence[str]
) -> None:
    """Reject to resume the parts of other images, another model or other options."""
    try:
        earlier, before = Fingerprint(**parts.about["fingerprint"]), parts.about["places"]
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{parts.folder}: its fingerprint is broken; choose another file") from error
    found = earlier.differences(engine, selection, probabilities=bool(rows.columns), kept=rows.kept)
    if list(places) != before:
        found = [f"the images were {' '.join(map(str, before))}, not {' '.join(places)}"]
    if found:
        raise UserError(
            f"{parts.folder} was made with other options or another model: {'; '.join(found)}; use the same "
            "ones, or choose another file"
        )


def counted_lines(parts: Parts, tally: Tally) -> Iterator[str]:
    """The lines of all parts in order, which are added to the counts."""
    for part in range(len(parts)):
        before, path = tally.images, parts.file(part)
        with open(path, encoding="utf-8", newline="\n") as file:
            for line in file:
                tally.add(json.loads(line)["error"] if ERROR_KEY in line else None)
                yield line
        if (count := tally.images - before) != parts.count(part):
            raise UserError(
                f"{path}: {count:,} results of {parts.count(part):,} images; remove it, and resume"
            )


def reference(model: str | VisionModel, folder: Path) -> str:
    """A MODEL by which any process opens the model; one that was made in memory is saved among the parts."""
    if isinstance(model, str):
        return model
    return os.path.abspath(save_pretrained(model, folder / MODEL))


def embed_in_parts(
    job: Job, spec: FeatureSpec, listed: Callable[[], Iterator[tuple[str, ...]]], made: Mapping[str, Any]
) -> tuple[list[str], int, int]:
    """Write the features of image files to a file, in parts, and join them; a job that exists is continued.

    Args:
        job: the model, the file and the processes.
        spec: the representation, resolved.
        listed: for each image its `as_text`, its label where there are labels, and its split; called twice.
        made: how the features are made, as `Embeddings.made`; the precision is that of the processes.

    Returns:
        The reasons for the images that could not be read, the number of images in the file, and that of the
        images that were computed now.

    Raises:
        UserError: a job of other images or features; no image that can be read; parts in several precisions.
    """
    digest = hashlib.sha256()
    for texts in listed():
        digest.update(repr(texts).encode())
    # The precision that was asked for; that of this process says nothing of the others.
    about = {"made": {**made, "precision": job.precision}, "images": digest.hexdigest()}
    with job.computed(
        *(EmbedTask, listed, about, lambda parts: check_same_features(parts, about)),
        layer=spec.layer,
        pool=spec.pool,
    ) as (parts, computed):
        reasons, found = left_out(parts)
        write_embeddings(job.out, feature_parts(parts), parts.images, {**made, "precision": found})
    unreadable = list(itertools.chain(*reasons))
    now = sum(parts.count(part) - len(reasons[part]) for part in computed)
    return unreadable, parts.images - len(unreadable), now


def check_same_features(parts: Parts, about: Mapping[str, Any]) -> None:
    """Reject to continue the parts of other images or features."""
    if parts.about == json.loads(json.dumps(about)):
        return
    before, now = parts.about.get("made", {}), about["made"]
    found = [f"{name} was {before.get(name)!r}" for name in now if before.get(name) != now[name]]
    raise UserError(
        f"{parts.folder} was made of {'; '.join(found) or 'other images'}: repeat that command, remove the "
        "folder, or choose another file"
    )


def left_out(parts: Parts) -> tuple[list[list[str]], str]:
    """By part the reasons for the images that could not be read, and the precision that all features have."""
    reasons: list[list[str]] = []
    precisions: dict[str, int] = {}
    for part in range(len(parts)):
        arrays = part_arrays(parts, part, "errors", "precision")
        reasons.append(arrays["errors"].tolist())
        precisions.setdefault(str(arrays["precision"]), part)
    if sum(map(len, reasons)) == parts.images:
        raise UserError(
            f"none of {counted(parts.images, 'image')} can be read: {'; '.join(reasons[0][:3])}; the parts "
            f"are in {parts.folder}"
        )
    if len(precisions) > 1:
        places = ", ".join(f"{name} ({parts.file(part)})" for name, part in precisions.items())
        raise UserError(
            f"parts were computed in several precisions, {places}: name one, and choose another file"
        )
    return reasons, next(iter(precisions))


def feature_parts(parts: Parts) -> Iterator[Part]:
    """The features of all parts in order, up to `BLOCK` images at a time as one process writes them."""
    for part in range(len(parts)):
        texts, arrays = parts.texts(part), part_arrays(parts, part, "rows", "features")
        rows, features = arrays["rows"], arrays["features"]
        for start in range(0, len(texts), BLOCK):
            own = (rows >= start) & (rows < start + BLOCK)
            if own.any():
                names, *labels, splits = zip(*(texts[row] for row in rows[own].tolist()), strict=True)
                columns = EmbeddingColumns(
                    images=np.array([str(from_text(name)) for name in names], np.str_),
                    labels=np.array(labels[0], np.str_) if labels else None,
                    splits=np.array(splits, np.str_),
                )
                yield columns, features[own]


def part_arrays(parts: Parts, part: int, *names: str) -> dict[str, Any]:
    """Some arrays of a part's result."""
    path = parts.file(part)
    try:
        with np.load(path, allow_pickle=False) as found:
            return {name: found[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: damaged ({error}); remove it, and repeat the command") from error
