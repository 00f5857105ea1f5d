"""What a comparison of heatmap methods found: numbers, intervals, and which method to believe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

RANDOM = "random"
"""The floor: cells in random order."""
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What was measured of one method, a number for each image."""

    deletion: tuple[float, ...]
    """Area under the deletion curve, in [0, 1]: lower is better."""
    insertion: tuple[float, ...]
    """Area under the insertion curve, in [0, 1]: higher is better."""
    lerf: tuple[float, ...]
    """Mean probability with the least relevant cells imputed, in [0, 1]: higher is better."""
    morf: tuple[float, ...]
    """Mean probability with the most relevant cells imputed, in [0, 1]: lower is better."""
    seconds: tuple[float, ...]
    """What the heatmap took, of one image at a time."""

    @property
    def road(self) -> tuple[float, ...]:
        """ROAD: `lerf` minus `morf`, in [-1, 1]: higher is better."""
        return tuple(least - most for least, most in zip(self.lerf, self.morf, strict=True))

    @property
    def merit(self) -> tuple[float, ...]:
        """The mean of the four curves, those where lower is better taken negative."""
        curves = np.array([self.deletion, self.insertion, self.lerf, self.morf])  # (4, n)
        return tuple((np.array([-1, 1, 1, -1]) @ curves / 4).tolist())


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over images, and the 95% interval of it."""

    mean: float
    half_width: float | None
    """The interval is `mean` plus and minus this; None where one image gives no interval."""

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Interval:
        """Student's t interval of independent values (n,)."""
        numbers = np.asarray(values, dtype=np.float64)
        if len(numbers) < 2:
            return cls(float(numbers.mean()), None)
        error = numbers.std(ddof=1) / len(numbers) ** 0.5
        quantile = stdtrit(len(numbers) - 1, (1 + CONFIDENCE) / 2)
        return cls(float(numbers.mean()), float(quantile * error))

    @property
    def verdict(self) -> str:
        """What a gain of this size says: `better`, `worse`, `not told apart`, or `one image`."""
        if self.half_width is None:
            return "one image"
        if abs(self.mean) <= self.half_width:
            return "not told apart"
        return "better" if self.mean > 0 else "worse"

    def to_dict(self) -> dict[str, float | None]:
        """`mean`, `low`, `high`; the latter two None where there is no interval."""
        half = self.half_width
        return {
            "mean": self.mean,
            "low": None if half is None else self.mean - half,
            "high": None if half is None else self.mean + half,
        }


@dataclasses.dataclass(frozen=True)
class Measure:
    """One measure of one method."""

    mean: float
    """Over the images."""
    gain: Interval
    """Of the paired differences to random, signed so that more is better."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method, in the order of the table."""

    method: str
    deletion: Measure
    insertion: Measure
    road: Measure
    gain: Interval
    """Over random, the mean of the four curves: `Comparison` says which."""
    seconds: float
    """For one image, the median."""

    @property
    def verdict(self) -> str:
        """Of the gain over random, as `Interval.verdict`; of random itself `the floor`."""
        return "the floor" if self.method == RANDOM else self.gain.verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Every method on the same images, with the random floor.

    The best method has the largest gain over random of those whose interval lies above 0; without any, the
    largest gain of all. The gain is the mean, over the four curves (deletion, insertion, and ROAD's two,
    least and most relevant removed), of how far the mean probability is moved the right way. All four are
    probabilities, so that their mean needs no scale; unlike a mean rank it does not change when
    another method joins, a near tie weighs little, and it has an interval. ROAD weighs as much as the other
    two together, as only its removals leave the image plausible.

    Intervals are Student's t, 95%, of differences paired by image, each for itself: with many methods, one in
    forty that are as good as random looks better.
    """

    scores: Mapping[str, Scores]
    """By method; "random" is the last."""
    classes: tuple[int, ...]
    """The class that was explained in each image."""
    grid: tuple[int, int]
    """Rows and columns of the cells that were removed."""
    steps: int
    """Of the deletion and the insertion curve."""
    shares: tuple[float, ...]
    """Of the cells, that ROAD removed."""
    seed: int

    @property
    def images(self) -> int:
        """How many were compared."""
        return len(self.classes)

    def table(self) -> tuple[Row, ...]:
        """A row for each method: those better than random, the others, each by its gain; random last."""
        rows = (self._row(method) for method in self.scores if method != RANDOM)
        ranked = sorted(rows, key=lambda row: (row.verdict != "better", -row.gain.mean))
        return (*ranked, self._row(RANDOM))

    @property
    def best(self) -> str:
        """The method of the first row; whether it is better than random is that row's verdict."""
        return self.table()[0].method

    @property
    def rivals(self) -> tuple[str, ...]:
        """The methods that cannot be told apart from the best, by differences paired by image."""
        best = np.array(self.scores[self.best].merit)
        others = (row.method for row in self.table()[1:-1])
        return tuple(
            name for name in others if Interval.of(best - self.scores[name].merit).verdict != "better"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the settings, the table, and the numbers of each image."""
        return {
            "images": self.images,
            "classes": list(self.classes),
            "grid": list(self.grid),
            "steps": self.steps,
            "shares": list(self.shares),
            "seed": self.seed,
            "best": self.best,
            "rivals": list(self.rivals),
            "methods": [_plain(row) for row in self.table()],
            "scores": {
                name: {key: list(values) for key, values in dataclasses.asdict(scores).items()}
                for name, scores in self.scores.items()
            },
        }

    def text(self) -> str:
        """The table for a terminal, with what its numbers mean."""
        head = ("method", "deletion AUC", "insertion AUC", "ROAD", "gain", "s/image", "verdict")
        lines = [head, *(_cells(row) for row in self.table())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*table, "", *self._legend()])

    def _legend(self) -> list[str]:
        """What the numbers mean, and what follows from them."""
        rows, columns = self.grid
        notes = [
            f"{self.images} image{'s' * (self.images > 1)}, {rows}x{columns} cells, {self.steps} steps. "
            "Deletion: lower is better; insertion and ROAD: higher.",
            "Behind each: the gain over random, paired by image, with its 95% interval (* it excludes 0).",
        ]
        best = self.table()[0]
        if self.images == 1:
            return [*notes, f"Largest gain: {best.method}. One image gives no intervals: take 20 or more."]
        if best.verdict != "better":
            return [
                *notes,
                f"No method can be told to be better than random; the largest gain: {best.method}.",
            ]
        rivals = f"; not told apart from it: {', '.join(self.rivals)}" if self.rivals else ""
        return [*notes, f"Best: {best.method}{rivals}."]

    def _row(self, method: str) -> Row:
        mine, floor = self.scores[method], self.scores[RANDOM]

        def measure(values: tuple[float, ...], random: tuple[float, ...], sign: int) -> Measure:
            gains = sign * (np.array(values) - random)
            return Measure(float(np.mean(values)), Interval.of(gains))

        return Row(
            method=method,
            deletion=measure(mine.deletion, floor.deletion, -1),
            insertion=measure(mine.insertion, floor.insertion, 1),
            road=measure(mine.road, floor.road, 1),
            gain=Interval.of(np.array(mine.merit) - floor.merit),
            seconds=float(np.median(mine.seconds)),
        )


def _cells(row: Row) -> tuple[str, ...]:
    """A row as texts."""
    floor = row.method == RANDOM
    measures = (
        f"{measure.mean:6.3f}" + ("" if floor else f" {_gain(measure.gain)}")
        for measure in (row.deletion, row.insertion, row.road)
    )
    gain = "" if floor else _gain(row.gain)
    return (row.method, *measures, gain, "" if floor else f"{row.seconds:.2g}", row.verdict)


def _gain(gain: Interval) -> str:
    """`+0.120±0.031*`."""
    if gain.half_width is None:
        return f"{gain.mean:+.3f}"
    return f"{gain.mean:+.3f}±{gain.half_width:.3f}" + "*" * (gain.verdict != "not told apart")


def _plain(row: Row) -> dict[str, Any]:
    """A row as plain values."""
    measures = {
        name: {"mean": measure.mean, "gain": measure.gain.to_dict(), "verdict": measure.gain.verdict}
        for name, measure in (("deletion", row.deletion), ("insertion", row.insertion), ("road", row.road))
    }
    return {
        "method": row.method,
        **measures,
        "gain": row.gain.to_dict(),
        "seconds": row.seconds,
        "verdict": row.verdict,
    }
