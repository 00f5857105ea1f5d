"""`vitascope predict`: the classes of images, a few or a folder of a million."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import tyro

from vitascope.cli.cluster import Cluster
from vitascope.cli.exits import exit_if_unreadable, exit_stopped, exiting_if_stopped
from vitascope.cli.parsing import Device, Flag, MaybeFile, MaybeFloat, MaybeInt, Model, Precision, Workers
from vitascope.cli.zero_shot import Classes, Prompts
from vitascope.data.table_options import TableOptions, is_table
from vitascope.errors import UserError, printable
from vitascope.formatting import counted

if TYPE_CHECKING:
    from tqdm import tqdm

    from vitascope.data.stored import ImageFile
    from vitascope.model.vit import VisionTransformer
    from vitascope.predict.predictor import ImageResult, Predictor
    from vitascope.predict.result_file import ResultFile, Tally
    from vitascope.predict.selection import ClassSelection
    from vitascope.remote.outputs import Output

BATCH_SIZE = 64


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
    out: MaybeFile = None
    """Write to FILE.jsonl, one line of JSON per image, to FILE.parquet, or to FILE.csv: image, label, score.
    FILE may be in a store (s3://...). Default: print."""
    resume: Flag = False
    """Resume --out after an interruption, or start it."""
    top_k: MaybeInt = None
    """The most classes per image. Default: 5; of a model of several classes per image all that apply."""
    threshold: MaybeFloat = None
    """Of a model of several classes per image: the probability from which on a class applies.
    Default: the model's own threshold of each class."""
    probabilities: Flag = False
    """With --out and --json: the probability of every class too, as always with several classes per image."""
    batch_size: MaybeInt = None
    """Images per batch. Default: 64; on a GPU as many as keep it busy."""
    workers: Workers = None
    precision: Precision = "auto"
    device: Device = "auto"
    json: Flag = False
    """Print JSON: a list for files, one line per image for folders, the counts with --out."""
    classes: Classes = ()
    """Of a CLIP or SigLIP: the names of the classes to tell apart, such as "a cat" "a dog"."""
    prompts: Prompts = ()
    table: TableOptions = dataclasses.field(default_factory=TableOptions)
    """How a table is read."""
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    """Where predictions are computed."""

    def call(self) -> None:
        """Predict, and print or write."""
        self._check()
        from vitascope.model.hardware import reuse_freed_memory
        from vitascope.predict.predictor import check_workers
        from vitascope.predict.result_file import ResultFile, check_out
        from vitascope.predict.selection import ClassSelection
        from vitascope.remote.outputs import Output
        from vitascope.remote.stores import is_url

        selection = ClassSelection(self.top_k, self.threshold)
        check_workers(self.workers)
        for place in self.images:  # before the model is loaded
            if not is_url(place) and not os.path.exists(place):
                raise UserError(f"{place}: no such file")
        if next(self._found(), None) is None:
            raise UserError(f"{', '.join(self.images)}: no images found")
        if self.cluster.engine == "ray":
            self._on_ray(selection)
            return
        output = None if self.out is None else Output(self.out, resume=self.resume)
        if output is not None:
            with output.named():
                check_out(output.path, resume=self.resume)
        reuse_freed_memory()
        predictor = self._predictor()
        if output is not None:
            with (
                output.named(),
                ResultFile(
                    output.path,
                    predictor.engine,
                    selection,
                    probabilities=self.probabilities,
                    resume=self.resume,
                    kept=self._kept,
                ) as file,
            ):
                self._stream(predictor, file, output)
        elif any(is_url(place) or os.path.isdir(place) or is_table(place) for place in self.images):
            self._stream(predictor, None)
        else:
            self._print_files(predictor)

    def _check(self) -> None:
        """Reject options that need others."""
        if not self.images:
            before = ", before --classes, which takes every word after it" if self.classes else ""
            raise UserError(f"no images given: vitascope predict MODEL IMAGE [IMAGE ...]{before}")
        if self.resume and self.out is None:
            raise UserError("--resume needs the file to resume: --out FILE")
        if self.probabilities and self.out is None and not self.json:
            raise UserError("--probabilities needs --out FILE or --json")
        if self.keep_columns and self.out is None and not self.json:
            raise UserError("--keep-columns needs --out FILE or --json")
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
        self.cluster.check()
        if self.cluster.engine == "ray" and self.out is None:
            raise UserError("--engine ray writes a file: --out FILE")
        from vitascope.predict.predictor import check_batch_size

        check_batch_size(self.batch_size)

    def _predictor(self) -> Predictor:
        """The predictor of the MODEL."""
        from vitascope.predict.predictor import Predictor
        from vitascope.predict.runtimes import as_engine

        engine = as_engine(self._model(), precision=self.precision, device=self.device)
        return Predictor(engine, batch_size=engine.batch_size(self.batch_size, BATCH_SIZE))

    def _model(self) -> str | VisionTransformer:
        """The MODEL, or its classifier of the classes that are named."""
        if not self.classes:
            return self.model
        from vitascope.text.zero_shot import zero_shot

        return zero_shot(self.model, self.classes, prompts=self.prompts or None, device=self.device)

    def _on_ray(self, selection: ClassSelection) -> None:
        """Predict in parts on the workers of Ray, into the file."""
        from vitascope.predict.bulk import Job, check_out_in_parts, predict_in_parts
        from vitascope.predict.on_ray import compute_on_ray, connected

        assert self.out is not None
        out = Path(self.out)
        check_out_in_parts(out, resume=self.resume)
        started = time.monotonic()
        state = "the parts that are done are kept; repeat the command with --resume to continue"
        with exiting_if_stopped(state), connected(self.cluster.ray_address):
            job = Job(
                *(self._model(), out, compute_on_ray),
                batch_size=BATCH_SIZE if self.batch_size is None else self.batch_size,
                workers=self.workers,
                precision=self.precision,
                device=self.device,
            )
            tally, computed = predict_in_parts(
                *(job, self.images, selection),
                probabilities=self.probabilities,
                resume=self.resume,
                table=self.table,
                kept=self._kept,
            )
        self._summarize(tally, computed, time.monotonic() - started)

    def _print_files(self, predictor: Predictor) -> None:
        """Predict image files, and print when all are predicted."""
        from vitascope.predict.result_file import Tally
        from vitascope.predict.result_formats import Rows

        workers = 0 if self.workers is None and len(self.images) <= predictor.batch_size else self.workers
        results = list(self._results(predictor, self.images, workers))
        if self.json:
            rows = Rows.of(predictor.engine, probabilities=self.probabilities)
            print(f"[{', '.join(rows.line(result).rstrip() for result in results)}]")
        else:
            width = max(map(label_width, results))
            for result in results:
                print(in_words(result, width))
        tally = Tally()
        for result in results:
            tally.add(result.error)
        exit_if_unreadable(tally)

    def _stream(self, predictor: Predictor, file: ResultFile | None, output: Output | None = None) -> None:
        """Predict images one after the other, into the file of an output or to standard output."""
        from vitascope.predict.result_file import Tally
        from vitascope.predict.result_formats import Rows
        from vitascope.training.signals import stop_signals, until_stopped

        paths = self._found()
        rows = Rows.of(predictor.engine, probabilities=self.probabilities, kept=self._kept)
        tally, before = (Tally(), 0) if file is None else (file.tally, file.tally.images)
        started = time.monotonic()
        with stop_signals() as stop, self._bar(file) as bar:
            remaining = paths if file is None else file.remaining(paths)
            with contextlib.closing(self._results(predictor, remaining, self.workers)) as results:
                for result in until_stopped(results, stop):
                    if file is not None:
                        file.write(result)
                    else:
                        tally.add(result.error)
                        print(rows.line(result)[:-1] if self.json else in_words(result, label_width(result)))
                    bar.update()
        if stop.signum:
            self._stopped(stop.signum, tally)
        if file is not None and output is not None:
            file.finish()
            output.publish()
        precision = predictor.engine.precision_for(predictor.batch_size)
        self._summarize(tally, tally.images - before, time.monotonic() - started, f", {precision}")

    def _found(self) -> Iterator[ImageFile]:
        """The images to predict."""
        from vitascope.predict.predictor import find_images

        return find_images(self.images, self.table, keep=self.keep_columns)

    @functools.cached_property
    def _kept(self) -> dict[str, str]:
        """The table's columns, if they are kept."""
        from vitascope.data.formats.table import column_digests

        return column_digests(Path(self.images[0])) if self.keep_columns else {}

    def _results(
        self, predictor: Predictor, paths: Iterable[ImageFile], workers: int | None
    ) -> Generator[ImageResult, None, None]:
        return predictor.stream(paths, self.top_k, threshold=self.threshold, workers=workers)

    def _bar(self, file: ResultFile | None) -> tqdm[NoReturn]:
        """A progress bar on a terminal, unless results are printed there; it counts the images first."""
        from tqdm import tqdm

        shown = sys.stderr.isatty() and (file is not None or not sys.stdout.isatty())
        return tqdm(
            total=sum(1 for _ in self._found()) if shown else None,
            initial=0 if file is None else file.tally.images,
            disable=not shown,
            unit=" images",
            dynamic_ncols=True,
            leave=False,
            bar_format="|{bar}| {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left",
        )

    def _stopped(self, signum: int, tally: Tally) -> NoReturn:
        kept = "" if self.out is None else f" in {self.out}; repeat the command with --resume to continue"
        exit_stopped(signum, f"{counted(tally.images, 'image')}{kept}")

    def _summarize(self, tally: Tally, done: int, seconds: float, precision: str = "") -> None:
        """Print the counts; exit with status 1 if images could not be read."""
        if self.out is not None and self.json:
            counts = {"pictures": tally.images, "unreadable": tally.unreadable}
            print(json.dumps({"out": str(self.out), **counts}))
        else:
            now = "" if done == tally.images else f", {done:,} of them now"
            place = "" if self.out is None else f" in {self.out}"
            speed = f", {done / max(seconds, 1e-9):,.0f} images/s" if done else ""
            print(f"{counted(tally.images, 'image')}{place}{now}{speed}{precision}", file=sys.stderr)
        exit_if_unreadable(tally)


def in_words(result: ImageResult, width: int) -> str:
    """An image and its classes, one line each, with labels of this width."""
    from vitascope.predict.predictor import none_of

    lines = [printable(result.image)]
    for guess in result.predictions:
        label = f"{printable(guess.label, 80):<{width}}"
        lines.append(f"  {label} {guess.score:>7.2%}  {'█' * round(24 * guess.score)}".rstrip())
    if result.error is not None:
        lines.append(f"  {printable(result.error.removeprefix(f'{result.image}: '))}")
    elif not result.predictions:
        assert result.best is not None
        lines.append(f"  {none_of(printable(result.best.label, 80), result.best.score)}")
    return "\n".join(lines)


def label_width(result: ImageResult) -> int:
    """The longest label's length; labels may be any text, and are shortened for one line."""
    return max((len(printable(guess.label, 80)) for guess in result.predictions), default=0)
