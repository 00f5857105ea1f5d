"""`vitascope predict` and `zero-shot`: the classes of images, also of classes that are only named."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitascope.cli.exits import exit_if_unreadable, exiting_if_stopped, exiting_with_parts
from vitascope.cli.features import Cluster
from vitascope.cli.parsing import Device, Flag, Folder, Model, Views
from vitascope.data.table_options import DataOptions, TableOptions, is_table
from vitascope.errors import UserError, printable
from vitascope.formatting import counted
from vitascope.models.engines.compute import Resources
from vitascope.models.options import ClassOutputs

if TYPE_CHECKING:
    from vitascope.data.reading import Faults
    from vitascope.data.stored import ImageFile
    from vitascope.deploy.predict.predictor import ImageResult
    from vitascope.deploy.predict.result_file import PredictTask
    from vitascope.models.engines.engine import Engine
    from vitascope.models.engines.selection import ClassSelection
    from vitascope.models.vit import VisionTransformer

BATCH_SIZE = 64
Classes = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]
Prompts = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="PROMPT ...",
        help="Texts with {} for the name, whose vectors are averaged, or the sets `name`, `photo` (a photo "
        'of a {}.) and `photos`, ten texts. Default: "a photo of {}."',
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict:
    """Predict the classes of images."""

    model: Model
    """A run folder, a model folder or file, a hub id, or an exported model."""
    images: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="IMAGE ...", help_behavior_hint="(required)")]
    ]
    """Image files of any format and size, or folders of them, also in a store (s3://...).
    Of a table (.csv, .jsonl, ...) the images of its rows, in their order."""
    keep_columns: Flag = False
    """With --out and --json: the columns of the table too."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write to FILE.jsonl, one line of JSON per image, to FILE.parquet, or to FILE.csv: image, label, score.
    FILE may be in a store (s3://...). Default: print."""
    resume: Flag = False
    """Resume --out after an interruption, or start it."""
    top_k: int | None = None
    """The most classes per image. Default: 5; of a model of several classes per image all that apply."""
    threshold: float | None = None
    """Of a model of several classes per image: the probability from which on a class applies.
    Default: the model's own threshold of each class."""
    coverage: float | None = None
    """Of a calibrated model: share of images whose set of classes holds the right one. Default: 0.95."""
    familiar: float | None = None
    """Of a calibrated model: share of images like those of the training that pass as familiar.
    Default: 0.99."""
    probabilities: Flag = False
    """With --out and --json: the probability of every class too, as always with several classes per image."""
    views: Views = 1
    json: Flag = False
    """Print JSON: a list for files, one line per image for folders, the counts with --out."""
    classes: Classes = ()
    """Of a CLIP or SigLIP: the names of the classes to tell apart, such as "a cat" "a dog"."""
    prompts: Prompts = ()
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""
    compute: Resources = dataclasses.field(default_factory=Resources)
    """How images are read and predicted."""
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    """Where predictions are computed."""

    def call(self) -> dict[str, object]:
        """Predict, and print or write."""
        self._check()
        from vitascope.deploy.predict.predictor import find_images
        from vitascope.deploy.predict.result_file import PredictTask
        from vitascope.models.engines.selection import ClassSelection

        selection = ClassSelection(self.top_k, self.threshold, self.coverage, self.familiar)
        images = find_images(self.images, self.table, keep=self.keep_columns)
        if (first := next(images, None)) is None:  # before the model is loaded
            raise UserError(f"{', '.join(self.images)}: no images found")
        images = itertools.chain([first], images)
        kept: dict[str, str] = {}
        if self.keep_columns:
            from vitascope.data.formats.table import column_digests

            kept = column_digests(Path(self.images[0]))
        task = PredictTask(
            batch_size=self.compute.batch_size or BATCH_SIZE,
            workers=self.compute.workers,
            selection=selection,
            probabilities=self.probabilities,
            kept=kept,
        )
        if self.out is not None:
            self._write(self.out, task, images)
        else:
            engine = self._engine()
            self._print(engine, self._suited(task, engine), images)
        first = self.images[0]
        return {"picture": first} if os.path.isfile(first) and not is_table(first) else {}

    def _engine(self) -> Engine:
        from vitascope.models.engines.runtimes import as_engine
        from vitascope.models.hardware import reuse_freed_memory

        reuse_freed_memory()
        compute = self.compute
        return as_engine(self._model(), precision=compute.precision, device=compute.device, views=self.views)

    def _suited(self, task: PredictTask, engine: Engine) -> PredictTask:
        """The task with the batch size that keeps a GPU busy, unless one is named."""
        batch_size = engine.batch_size(self.compute.batch_size, BATCH_SIZE)
        return dataclasses.replace(task, batch_size=batch_size)

    def _check(self) -> None:
        """Reject options that need others."""
        if not self.images:
            before = ", before --classes, which takes every word after it" if self.classes else ""
            raise UserError(f"no images given: vitascope predict MODEL IMAGE [IMAGE ...]{before}")
        if self.out is None:
            for option in ("probabilities", "keep_columns") if not self.json else ():
                if getattr(self, option):
                    raise UserError(f"--{option.replace('_', '-')} needs --out FILE or --json")
            if self.resume or self.cluster.ray is not None:
                asked = "--resume" if self.resume else "--engine ray"
                raise UserError(f"{asked} needs a file: --out FILE")
        tables = sum(is_table(place) and not os.path.isdir(place) for place in self.images)
        if (self.table.given and not tables) or (self.keep_columns and (tables, len(self.images)) != (1, 1)):
            asked = "--keep-columns" if self.keep_columns else f"--{self.table.given[0]}"
            raise UserError(
                f"{asked} is about a table: give one, such as labels.csv, instead of other images"
            )
        if {*self.table.given} - {"columns", "images"} or self.table.named.keys() - {"image"}:
            raise UserError(
                "predict reads no labels: of the options of tables it takes --columns image=COLUMN and "
                "--images FOLDER"
            )
        if self.prompts and not self.classes:
            raise UserError("--prompts needs the names that stand in them: --classes NAME NAME")

    def _model(self) -> str | VisionTransformer:
        if not self.classes:
            return self.model
        from vitascope.models.text.zero_shot import zero_shot

        return zero_shot(self.model, self.classes, prompts=self.prompts or None, device=self.compute.device)

    def _write(self, out: str, task: PredictTask, images: Iterator[ImageFile]) -> None:
        """Predict into a file, in parts, in this process or on the workers of Ray."""
        from vitascope.data.rows.on_ray import RayLoop, connected
        from vitascope.data.rows.parts import Loop, loop_of
        from vitascope.deploy.predict.result_file import check_result_file, predict_to_file
        from vitascope.remote.outputs import Output
        from vitascope.storage import check_local

        compute, ray = self.compute, self.cluster.ray
        loop: Loop
        if ray is not None:
            check_local(Path(out))
        output = Output(out, resume=self.resume)
        started = time.monotonic()
        with contextlib.ExitStack() as opened:
            opened.enter_context(output.named())
            check_result_file(output.path, resume=self.resume)
            opened.enter_context(
                exiting_with_parts(output.path, out, "repeat the command with --resume to continue")
            )
            if ray is not None:
                opened.enter_context(connected(ray))
                on_ray = RayLoop(self._model(), compute.precision, compute.device, self.views)
                engine, loop = on_ray.engine, on_ray
            else:
                engine = self._engine()
                task, loop = self._suited(task, engine), loop_of(engine)
            faults, now = predict_to_file(
                output.path, engine, task, loop, self.images, images, resume=self.resume
            )
        output.publish()
        self._note(task.selection, engine)
        if self.json:
            print(json.dumps({"out": out, "pictures": faults.images, "unreadable": faults.count}))
            exit_if_unreadable(faults)
        precision = "" if ray is not None else f", {engine.precision_for(task.batch_size)}"
        self._summarize(faults, now, time.monotonic() - started, precision)

    def _print(self, engine: Engine, task: PredictTask, images: Iterator[ImageFile]) -> None:
        """Print each result as it comes; those of a few image files when all are predicted."""
        from vitascope.data.reading import Faults
        from vitascope.deploy.predict.predictor import Predictor

        few = all(os.path.isfile(place) and not is_table(place) for place in self.images)
        workers = 0 if few and task.workers is None and len(self.images) <= task.batch_size else task.workers
        faults, rows, started = Faults(), task.rows(engine), time.monotonic()
        results = Predictor(engine, batch_size=task.batch_size).stream(
            images, workers=workers, **dataclasses.asdict(task.selection)
        )
        stopping = contextlib.nullcontext() if few else exiting_if_stopped("what was predicted is printed")
        with stopping, contextlib.closing(results):
            found = list(results) if few else results
            if few and self.json:
                print(f"[{', '.join(rows.line(result).rstrip() for result in found)}]")
            width = max(map(label_width, found)) if few else 0
            for result in found:
                faults.tally(result.error)
                if not self.json:
                    print(outcome_in_words(result, width or label_width(result)))
                elif not few:
                    print(rows.line(result)[:-1])
        self._note(task.selection, engine)
        if few:
            exit_if_unreadable(faults)
        else:
            seconds = time.monotonic() - started
            self._summarize(faults, faults.images, seconds, f", {engine.precision_for(task.batch_size)}")

    def _note(self, selection: ClassSelection, engine: Engine) -> None:
        """Print why no picture is called unfamiliar, if that is so."""
        if reason := selection.unchecked(engine):
            print(f"not checked whether pictures are like the training images: {reason}", file=sys.stderr)

    def _summarize(self, faults: Faults, done: int, seconds: float, precision: str) -> None:
        """Print the counts; exit with status 1 if images could not be read."""
        now = "" if done == faults.images else f", {done:,} of them now"
        place = "" if self.out is None else f" in {self.out}"
        speed = f", {done / max(seconds, 1e-9):,.0f} images/s" if done else ""
        print(f"{counted(faults.images, 'image')}{place}{now}{speed}{precision}", file=sys.stderr)
        exit_if_unreadable(faults)


def outcome_in_words(result: ImageResult, width: int) -> str:
    """An image and its classes, one line each, with labels of this width."""
    from vitascope.deploy.predict.predictor import none_of

    lines = [printable(result.image)]
    for guess in result.predictions:
        label = f"{printable(guess.label, 80):<{width}}"
        lines.append(f"  {label} {guess.score:>7.2%}  {'█' * round(24 * guess.score)}".rstrip())
    if result.error is not None:
        lines.append(f"  {printable(result.error.removeprefix(f'{result.image}: '))}")
    elif not result.predictions:
        assert result.best is not None
        lines.append(f"  {none_of(printable(result.best.label, 80), result.best.score)}")
    if result.verdict is not None and (words := result.verdict.in_words()):
        lines.append(f"  {printable(words, 200)}")
    return "\n".join(lines)


def label_width(result: ImageResult) -> int:
    """The longest label's length; labels may be any text, and are shortened for one line."""
    return max((len(printable(guess.label, 80)) for guess in result.predictions), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShot:
    """Write a classifier of classes that are named, without training.

    Needs an extra: pip install 'vitascope[text]'.
    """

    model: Model
    """A CLIP or SigLIP with its text model and tokenizer: a folder, or a hub id."""
    out: Folder
    """The new model folder, which every command takes."""
    classes: Classes
    """The names of the classes, such as "a cat" "a dog"; or a .txt file of names, one per line."""
    prompts: Prompts = ()
    outputs: ClassOutputs | None = None
    """One class applies, or any may. Default: exclusive for CLIP, independent for SigLIP."""
    device: Device = "auto"

    def call(self) -> None:
        """Make the classifier and write it."""
        from vitascope.models.text.zero_shot import zero_shot
        from vitascope.models.weights.loading import save_pretrained

        model = zero_shot(
            self.model, self.classes, prompts=self.prompts or None, outputs=self.outputs, device=self.device
        )
        folder: Path = save_pretrained(model, self.out)
        count = model.config.num_classes
        print(f"{count:,} {'class' if count == 1 else 'classes'}, {model.config.outputs}: {folder}")
