"""How far a run is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NoReturn

from tqdm import tqdm

LINE_SECONDS = 10.0
"""Without a terminal: an epoch is a line if the last line is this old, and within an epoch, three times."""


class Progress:
    """Counts images and says how fast and how long still.

    Args:
        epochs: of the whole run.
        images_per_epoch: training images.
        done: images of the run that were done before, when it is resumed.
        shown: whether to say it.
    """

    def __init__(self, epochs: int, images_per_epoch: int, done: int = 0, *, shown: bool = True) -> None:
        self.shown = shown
        self._named: set[str] = set()
        self.epochs = epochs
        self.total = epochs * images_per_epoch
        self.done = done
        self._started = time.monotonic()
        self._done_before = done
        self._last_line = self._started
        self._bar: tqdm[NoReturn] | None = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(
                total=self.total,
                initial=done,
                unit=" images",
                unit_scale=True,
                dynamic_ncols=True,
                leave=False,
                bar_format="{desc} |{bar}| {percentage:3.0f}% {rate_fmt}, {remaining} left",
            )

    @property
    def images_per_second(self) -> float:
        """Since the start of this process, all included."""
        return (self.done - self._done_before) / max(1e-9, time.monotonic() - self._started)

    def advance(self, images: int) -> None:
        """Some images more."""
        self.done += images
        if self._bar is not None:
            self._bar.update(images)
        elif time.monotonic() - self._last_line >= 3 * LINE_SECONDS:  # within a long epoch
            self._print(f"{self.done:,} of {self.total:,} images")

    def epoch(self, epoch: int, train_loss: float, val: Mapping[str, float]) -> None:
        """An epoch (counted from 1) has ended; `val` has the validation's `loss`, and may have `accuracy`."""
        said = f"{val['accuracy']:.1%}" if "accuracy" in val else f"loss {val['loss']:.3f}"
        text = f"epoch {epoch}/{self.epochs}  loss {train_loss:.3f}  val {said}"
        if self._bar is not None:
            self._bar.set_description(text)
            return
        late = time.monotonic() - self._last_line >= LINE_SECONDS
        if epoch == 1 or epoch == self.epochs or late:
            self._print(text)

    def left_out(self, unreadable: Mapping[str, str]) -> None:
        """Name the images that cannot be read, each once; path and reason."""
        for path, reason in unreadable.items():
            if path not in self._named and self.shown:
                tqdm.write(f"left out: {reason if path in reason else f'{path}: {reason}'}")
            self._named.add(path)

    def _print(self, text: str) -> None:
        if not self.shown:
            return
        self._last_line = time.monotonic()
        left = timedelta(seconds=round((self.total - self.done) / max(1e-9, self.images_per_second)))
        print(f"{text}  {self.images_per_second:,.0f} images/s  {left} left", flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
