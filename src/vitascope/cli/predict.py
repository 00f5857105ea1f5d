"""`vitascope predict`: what is in pictures, a few or a folder of a million."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import tyro

from vitascope.cli.parsing import MaybePath, Model
from vitascope.errors import UserError, printable
from vitascope.report.wording import counted
from vitascope.training.options import MaybeInt

if TYPE_CHECKING:
    from tqdm import tqdm

    from vitascope.deploy.predict.predictor import ImageResult, Predictor
    from vitascope.deploy.predict.result_file import ResultFile, Tally


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict:
    """Say what is in pictures."""

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    images: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="PICTURE ...", help_behavior_hint="(required)")]
    ]
    """Picture files of any kind and size, or folders of them."""
    out: MaybePath = None
    """Write to a file: FILE.jsonl, a line of JSON a picture, or FILE.parquet.
    Default: print."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on with the file of --out where a run ended, however it ended; begin it if it is not there."""
    top_k: int = 5
    """Classes a picture."""
    batch_size: int = 64
    """Pictures at a time."""
    workers: MaybeInt = None
    """Processes that read the pictures of folders and files while the model computes; 0 reads without.
    Default: one a core."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto` takes bf16 where this machine is faster with it."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `mps`."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON: a list for files; one line per image for folders; the counts with --out."""

    def call(self) -> None:
        """Predict, and print or write."""
        if not self.images:
            raise UserError("no pictures given: vitascope predict MODEL PICTURE [PICTURE ...]")
        if self.resume and self.out is None:
            raise UserError("--resume goes on with a file: name it with --out")
        from vitascope.deploy.predict.predictor import Predictor, check_top_k, check_workers
        from vitascope.model.hardware import reuse_freed_memory

        check_top_k(self.top_k)
        check_workers(self.workers)
        streamed = self.out is not None or any(map(os.path.isdir, self.images))
        self._check_places()
        reuse_freed_memory()
        predictor = Predictor.from_pretrained(
            self.model, precision=self.precision, device=self.device, batch_size=self.batch_size
        )
        if not streamed:
            self._print_all(predictor)
        elif self.out is None:
            self._stream(predictor, None)
        else:
            from vitascope.deploy.predict.result_file import ResultFile

            with ResultFile(self.out, predictor.engine, self.top_k, resume=self.resume) as file:
                self._stream(predictor, file)

    def _check_places(self) -> None:
        """Reject what would fail later, before the model is loaded."""
        from vitascope.deploy.predict.image_files import find_images
        from vitascope.deploy.predict.result_file import check_out

        for place in self.images:
            if not os.path.exists(place):
                raise UserError(f"{place}: no such file")
        if next(find_images(self.images), None) is None:
            raise UserError(f"{', '.join(self.images)}: no pictures there")
        if self.out is not None:
            check_out(self.out, resume=self.resume)

    def _print_all(self, predictor: Predictor) -> None:
        """Answer picture files, and print when all are answered."""
        from vitascope.deploy.predict.result_file import Tally, as_line

        workers = 0 if self.workers is None and len(self.images) <= self.batch_size else self.workers
        answers = list(predictor.stream(self.images, self.top_k, workers=workers))
        if self.json:
            print(f"[{', '.join(as_line(answer).rstrip() for answer in answers)}]")
        else:
            labels = [shown(guess.label) for answer in answers for guess in answer.predictions]
            width = max(map(len, labels), default=0)
            for answer in answers:
                print(in_words(answer, width))
        tally = Tally()
        for answer in answers:
            tally.add(answer.error)
        exit_if_unreadable(tally)

    def _stream(self, predictor: Predictor, file: ResultFile | None) -> None:
        """Answer pictures one after the other, into the file or on standard output."""
        from vitascope.deploy.predict.image_files import find_images
        from vitascope.deploy.predict.result_file import Tally
        from vitascope.training.signals import stop_signals

        paths = find_images(self.images)
        tally, before = (Tally(), 0) if file is None else (file.tally, file.tally.pictures)
        started = time.monotonic()
        with stop_signals() as stop, self._bar(file) as bar:
            remaining = paths if file is None else file.remaining(paths)
            stream = predictor.stream(remaining, self.top_k, workers=self.workers)
            with contextlib.closing(stream) as answers:
                for answer in answers:
                    if file is not None:
                        file.write(answer)
                    else:
                        tally.add(answer.error)
                        self._print(answer)
                    bar.update()
                    if stop.signum:
                        break
        if stop.signum:
            self._stopped(stop.signum, tally)
        if file is not None:
            file.finish()
        self._summarize(tally, tally.pictures - before, time.monotonic() - started)

    def _bar(self, file: ResultFile | None) -> tqdm[NoReturn]:
        """A bar on a terminal, unless answers are printed there; the pictures are counted for it first."""
        from tqdm import tqdm

        from vitascope.deploy.predict.image_files import find_images

        shown = sys.stderr.isatty() and (file is not None or not sys.stdout.isatty())
        return tqdm(
            total=sum(1 for _ in find_images(self.images)) if shown else None,
            initial=0 if file is None else file.tally.pictures,
            disable=not shown,
            unit=" pictures",
            dynamic_ncols=True,
            leave=False,
            bar_format="|{bar}| {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left",
        )

    def _print(self, answer: ImageResult) -> None:
        from vitascope.deploy.predict.result_file import as_line

        if self.json:
            sys.stdout.write(as_line(answer))
        else:
            width = max((len(shown(guess.label)) for guess in answer.predictions), default=0)
            print(in_words(answer, width))

    def _stopped(self, signum: int, tally: Tally) -> NoReturn:
        kept = "" if self.out is None else f" are in {self.out}: go on with the same command and --resume"
        name = signal.Signals(signum).name
        print(f"vitascope: stopped by {name}; {counted(tally.pictures, 'picture')}{kept}", file=sys.stderr)
        sys.exit(128 + signum)

    def _summarize(self, tally: Tally, done: int, seconds: float) -> None:
        """Print the counts; where pictures could not be read, name them and exit with status 1."""
        counts = {"pictures": tally.pictures, "unreadable": tally.unreadable}
        if self.out is not None and self.json:
            print(json.dumps({"out": str(self.out), **counts}))
        else:
            now = "" if done == tally.pictures else f", {done:,} of them now"
            place = "" if self.out is None else f" in {self.out}"
            speed = f", {done / max(seconds, 1e-9):,.0f} a second" if done else ""
            print(f"{counted(tally.pictures, 'picture')}{place}{now}{speed}", file=sys.stderr)
        exit_if_unreadable(tally)


def exit_if_unreadable(tally: Tally) -> None:
    """Name pictures that could not be read, on standard error, and exit with status 1; return without any."""
    if not tally.unreadable:
        return
    print(f"{tally.unreadable:,} of {counted(tally.pictures, 'picture')} could not be read:", file=sys.stderr)
    for reason in tally.reasons:
        print(f"  {reason}", file=sys.stderr)
    if tally.unreadable > len(tally.reasons):
        print(f"  and {tally.unreadable - len(tally.reasons):,} more", file=sys.stderr)
    sys.exit(1)


def in_words(answer: ImageResult, width: int) -> str:
    """A picture and its classes, a line each, the labels that wide."""
    lines = [
        f"  {shown(guess.label):<{width}} {guess.score:>7.2%}  {'█' * round(24 * guess.score)}".rstrip()
        for guess in answer.predictions
    ]
    error = [f"  {printable(answer.error)}"] if answer.error is not None else []
    return "\n".join([printable(answer.image), *lines, *error])


def shown(label: str) -> str:
    """A class name, which a checkpoint may have made of anything, in one short piece of a line."""
    return printable(label, 80)
