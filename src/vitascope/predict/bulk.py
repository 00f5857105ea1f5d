"""Prediction and embedding in parts: list the images, have processes compute the parts, join the results."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vitascope.data.stored import as_text, from_text
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
from vitascope.weights.saving import save_pretrained

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


def predict_in_parts(
    model: str | VisionModel,
    places: Sequence[str],
    out: Path,
    compute: Compute,
    *,
    selection: ClassSelection | None = None,
    probabilities: bool = False,
    batch_size: int = 64,
    workers: int | None = None,
    precision: str = "auto",
    device: str = "auto",
    resume: bool = False,
) -> tuple[Tally, int]:
    """Predict image files and folders of any size into a result file, in parts, and join them.

    The file is that of one process. The images are listed once, when the job begins.

    Args:
        model: a MODEL, or a model with its preprocessing.
        places: image files, and folders of them, also in stores.
        out: the file, which is complete or absent; `OUT.parts` beside it has the state of the job.
        compute: computes the parts.
        selection, probabilities: as for `ResultFile`.
        batch_size: images per batch.
        workers: processes that read, for each process that computes.
        precision, device: as for `Predictor`, in each process that computes.
        resume: continue a job that was begun in parts.

    Returns:
        The counts of all images, and the number of images that were computed now.

    Raises:
        UserError: a file that exists, or cannot be written; a job of other images, options or another model;
            no images; as `PartTask.open`, in any process.
    """
    check_out_in_parts(out, resume=resume)
    check_workers(workers)
    check_batch_size(batch_size)
    selection = selection or ClassSelection()
    folder = parts_folder(out)
    with ExitStack() as opened:
        engine = open_engine_of_job(model, precision)
        engine.check_classes()
        check_columns(out, engine, selection)
        rows = Rows.of(engine, probabilities=probabilities)
        if not (resume and job_exists(out)):
            folder.mkdir(exist_ok=True)
        opened.enter_context(locked(folder / LOCK))
        if resume and job_exists(out):
            parts = Parts.open(folder, PredictTask.suffix)
            check_same_job(parts, engine, selection, rows, places)
        else:
            fingerprint = Fingerprint.of(engine, selection, probabilities=bool(rows.columns))
            about = {"places": list(places), "fingerprint": dataclasses.asdict(fingerprint)}
            parts = Parts.create(
                folder,
                PredictTask.suffix,
                ((as_text(file),) for file in find_images(places)),
                batch_size=batch_size,
                about=about,
            )
        task = PredictTask(
            model=reference(model, folder),
            digest=engine.digest,
            precision=precision,
            device=place_of(engine, device),
            batch_size=batch_size,
            workers=workers,
            selection=selection,
            probabilities=probabilities,
        )
        computed = compute_missing(parts, task, compute)
        tally = Tally()
        with explaining_failure(out, "the predictions", "the parts are kept and can be resumed"):
            values = parts.about["fingerprint"]
            kept = write_json(fingerprint_file(out), values)
            write_whole(out, counted_lines(parts, tally), rows, kept.read_text(encoding="utf-8"))
            if out.suffix == ".parquet":
                kept.unlink()
            parts.remove()
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
    found = earlier.differences(engine, selection, probabilities=bool(rows.columns))
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


def open_engine_of_job(model: str | VisionModel, precision: str) -> Engine:
    """The engine of the process that begins a job and computes nothing, on the CPU."""
    if isinstance(model, str):
        return open_engine(model, precision=precision, device="cpu")
    return TorchEngine(model, precision=precision, device="cpu")


def reference(model: str | VisionModel, folder: Path) -> str:
    """A MODEL by which any process opens the model; one that was made in memory is saved among the parts."""
    if isinstance(model, str):
        return model
    return os.path.abspath(save_pretrained(model, folder / MODEL))


def place_of(engine: Engine, device: str) -> str:
    """The device of each process that computes: exported models run on CPUs."""
    return device if isinstance(engine, TorchEngine) or device != "auto" else "cpu"


def embed_in_parts(
    model: str | VisionModel,
    engine: Engine,
    spec: FeatureSpec,
    listed: Callable[[], Iterator[tuple[str, ...]]],
    out: Path,
    compute: Compute,
    *,
    made: Mapping[str, Any],
    batch_size: int,
    workers: int | None,
    precision: str,
    device: str,
) -> tuple[list[str], int, int]:
    """Write the features of image files to a file, in parts, and join them; a job that exists is continued.

    Args:
        model: a MODEL, or a model with its preprocessing.
        engine: its engine on the CPU, which computes nothing.
        spec: the representation, resolved.
        listed: for each image its `as_text`, its label where there are labels, and its split; called twice.
        out: the file, which is complete or absent; `OUT.parts` beside it has the state of the job.
        compute: computes the parts.
        made: how the features are made, as `Embeddings.made`; the precision is that of the processes.
        batch_size, workers, precision, device: as for `predict_in_parts`.

    Returns:
        The reasons for the images that could not be read, the number of images in the file, and that of the
        images that were computed now.

    Raises:
        UserError: a job of other images or features; no image that can be read; parts in several precisions.
    """
    folder, digest = parts_folder(out), hashlib.sha256()
    for texts in listed():
        digest.update(repr(texts).encode())
    # The precision that was asked for; that of this process says nothing of the others.
    about = {"made": {**made, "precision": precision}, "images": digest.hexdigest()}
    folder.mkdir(exist_ok=True)
    with locked(folder / LOCK):
        if job_exists(out):
            parts = Parts.open(folder, EmbedTask.suffix)
            check_same_features(parts, about)
        else:
            parts = Parts.create(folder, EmbedTask.suffix, listed(), batch_size=batch_size, about=about)
        task = EmbedTask(
            model=reference(model, folder),
            digest=engine.digest,
            precision=precision,
            device=place_of(engine, device),
            batch_size=batch_size,
            workers=workers,
            layer=spec.layer,
            pool=spec.pool,
        )
        computed = compute_missing(parts, task, compute)
        reasons, found = left_out(parts)
        with explaining_failure(out, "the features", "the parts are kept: repeat the command"):
            write_embeddings(out, feature_parts(parts), parts.images, {**made, "precision": found})
            parts.remove()
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
