"""The progress of a run: a line per epoch or every few epochs, and a bar on a terminal."""

import math
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import NoReturn

from tqdm import tqdm

from vitascope.formatting import speed

LINES = 20
"""Approximate number of lines for the epochs of a run."""
FIRST_SECONDS, LINE_SECONDS = 3.0, 30.0
"""The time until the first line, and between two lines, without a terminal. After ten minutes, the time
between two lines grows to a twentieth of the time so far, so that the log of a long run stays short."""


class Progress:
    """Counts images; prints the results of epochs to stdout, and a bar to stderr if that is a terminal.

    `done` are the images of the run before this process resumed it. For `uneven` classes, the balanced
    accuracy is printed too. `within_epochs`, results come at any place of an epoch, and the number of epochs
    is an estimate that changes. Prints nothing unless `shown`.
    """

    def __init__(
        self,
        epochs: int,
        images: int,
        done: int = 0,
        *,
        uneven: bool = False,
        within_epochs: bool = False,
        shown: bool = True,
    ) -> None:
        self.epochs, self.total, self.uneven, self.shown = epochs, images, uneven, shown
        self.within_epochs = within_epochs
        self.done = self._done_before = done
        self._started = time.monotonic()
        self._last_line: float | None = None
        self._slowdown = 1.0
        self._ends: float | None = None
        self._named: set[str] = set()
        self._bar: tqdm[NoReturn] | None = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(
                total=self.total,
                initial=done,
                unit=" images",
                unit_scale=True,
                dynamic_ncols=True,
                leave=False,
                bar_format="{desc} |{bar}| {percentage:3.0f}% {rate_fmt}{postfix}",
            )

    def plan(self, epochs: int, images: int, slowdown: float, seconds_left: float | None = None) -> None:
        """Change the epochs and the images of the whole run, and the time estimate.

        `slowdown` is the expected time of the images that are left, over that of as many so far;
        `seconds_left` is the time that a run of given length has left.
        """
        self.epochs, self.total, self._slowdown = epochs, images, slowdown
        self._ends = None if seconds_left is None else time.monotonic() + seconds_left
        if self._bar is not None:  # its percentage becomes that of the time
            self._bar.total = self.done + round((images - self.done) * slowdown)

    @property
    def images_per_second(self) -> float:
        """Mean speed since the start of this process, with validation and checkpoints."""
        return (self.done - self._done_before) / max(1e-9, time.monotonic() - self._started)

    def advance(self, images: int) -> None:
        """Count images; print a line if the last one is long ago."""
        self.done += images
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._left()} left", refresh=False)
            self._bar.update(images)
            return
        now = time.monotonic()
        since, interval = self._last_line, max(LINE_SECONDS, (now - self._started) / LINES)
        if since is None:
            since, interval = self._started, FIRST_SECONDS
        if now - since >= interval:
            self._print(f"{self.done:,} of {self.total:,} images")

    def epoch(self, epoch: float, train_loss: float, val: Mapping[str, float]) -> None:
        """Print the results of an epoch, counted from 1; the last one may be a part of an epoch."""
        measured = f"loss {train_loss:.3f}  val loss {val['loss']:.3f}"
        if "map" in val:
            measured += f", mAP {val['map']:.1%}"
        elif "accuracy" in val:
            measured += f", accuracy {val['accuracy']:.1%}"
        if "balanced_accuracy" in val and self.uneven:
            measured += f", balanced {val['balanced_accuracy']:.1%}"
        if "majority" in val:
            measured += f" (most frequent class {val['majority']:.1%})"
        width = len(str(self.epochs))
        place = f"{epoch:{width}g}/{self.epochs}"
        if self.within_epochs:
            place = f"{epoch:{width + 3}.2f}"
        if self._bar is not None:
            self._bar.set_description(f"epoch {place.strip()}")
        due = epoch in (1, self.epochs) or epoch % math.ceil(self.epochs / LINES) == 0 or epoch % 1
        if due or self.within_epochs:
            self._print(f"epoch {place}  {measured}")

    def note(self, text: str) -> None:
        """Print a line beside the bar."""
        if self.shown:
            tqdm.write(text)

    def left_out(self, reasons: Iterable[str]) -> None:
        """Print the reason for each unreadable image, which names it, once."""
        for reason in reasons:
            if reason not in self._named:
                self.note(f"left out: {reason}")
            self._named.add(reason)

    def _print(self, text: str) -> None:
        if not self.shown:
            return
        now = self._last_line = time.monotonic()
        passed = timedelta(seconds=round(now - self._started))
        tqdm.write(f"{text}  {speed(self.images_per_second)}  {passed}, {self._left()} left")
        sys.stdout.flush()

    def _left(self) -> timedelta:
        """The time until the last step: that of a run of given length, else by the mean speed."""
        seconds = (self.total - self.done) * self._slowdown / max(1e-9, self.images_per_second)
        if self._ends is not None and self.done < self.total:
            seconds = max(0.0, self._ends - time.monotonic())
        return timedelta(seconds=round(seconds))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
