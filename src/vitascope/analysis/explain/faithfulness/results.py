"""The result of a comparison of heatmap methods: scores, intervals, and a ranking."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from vitascope.formatting import aligned, pandas_library
from vitascope.intervals import Interval

MERIT = np.array([-1, 1, 1, -1]) / 4
"""Weights of deletion, insertion, `lerf` and `morf` in the merit."""
RANDOM = "random"
"""The baseline: cells in random order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of one method, one number per image."""

    deletion: tuple[float, ...]
    """Area under the deletion curve, in [0, 1]: lower is better."""
    insertion: tuple[float, ...]
    """Area under the insertion curve, in [0, 1]: higher is better."""
    lerf: tuple[float, ...]
    """Mean probability with the least relevant cells imputed, in [0, 1]: higher is better."""
    morf: tuple[float, ...]
    """Mean probability with the most relevant cells imputed, in [0, 1]: lower is better."""
    seconds: tuple[float, ...]
    """Time per heatmap, one image at a time."""

    @property
    def road(self) -> tuple[float, ...]:
        """ROAD: `lerf` minus `morf`, in [-1, 1]: higher is better."""
        return tuple(least - most for least, most in zip(self.lerf, self.morf, strict=True))

    @property
    def merit(self) -> tuple[float, ...]:
        """The mean of the four curves; those where lower is better count negatively."""
        curves = np.array([self.deletion, self.insertion, self.lerf, self.morf])  # (4, n)
        return tuple((MERIT @ curves).tolist())


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderAgreement:
    """The order of the methods by two imputations of the same cells.

    Areas are on the scale of their own imputation, so only the order of the methods is compared.
    """

    fills: tuple[str, str]
    """The imputations: of zero, of blur, or of the neighbours (ROAD)."""
    removed: str
    """The cells that both remove first: `hottest` or `coldest`."""
    tau: float
    """Kendall's rank correlation, from -1 to 1: the share of pairs of methods in the same order minus that
    of pairs in the opposite one."""
    swapped: tuple[tuple[str, str], ...]
    """Pairs that the two imputations order differently, both beyond the intervals of the differences."""

    @classmethod
    def of(cls, fills: tuple[str, str], removed: str, values: Mapping[str, Any]) -> Self:
        """`values` are (2, n) by method, a row per imputation and a number per image; higher is better."""
        pairs = list(itertools.combinations(values, 2))
        gaps = [[Interval.of(row) for row in np.subtract(values[a], values[b])] for a, b in pairs]
        signs = [np.sign(first.mean * second.mean) for first, second in gaps]
        swapped = (
            pair
            for pair, gap in zip(pairs, gaps, strict=True)
            if {g.verdict for g in gap} == {"better", "worse"}
        )
        return cls(fills=fills, removed=removed, tau=float(np.mean(signs)), swapped=tuple(swapped))

    def __str__(self) -> str:
        pairs = ", ".join(map("/".join, self.swapped))
        change = f", {pairs} change places" if pairs else ""
        return f"{' or '.join(self.fills)}, {self.removed} first: tau {self.tau:+.2f}{change}"


@dataclasses.dataclass(frozen=True)
class Measure:
    """One measure of one method."""

    mean: float
    """Over the images."""
    gain: Interval
    """Over random, paired by image; positive is better."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method's row in the table."""

    method: str
    deletion: Measure
    insertion: Measure
    road: Measure
    gain: Interval
    """Over random, the mean of the four curves: see `Comparison`."""
    seconds: float
    """Median time per heatmap."""

    @property
    def measures(self) -> dict[str, Measure]:
        """The three measures by name."""
        return {"deletion": self.deletion, "insertion": self.insertion, "road": self.road}

    @property
    def verdict(self) -> str:
        """The verdict on the gain over random; `baseline` for random itself."""
        return "baseline" if self.method == RANDOM else self.gain.verdict

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the columns of `Comparison.text`."""
        if self.method == RANDOM:
            return (
                RANDOM,
                *(f"{measure.mean:6.3f}" for measure in self.measures.values()),
                "",
                "",
                self.verdict,
            )
        measures = (f"{measure.mean:6.3f} {measure.gain}" for measure in self.measures.values())
        return (self.method, *measures, str(self.gain), f"{self.seconds:.2g}", self.verdict)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values."""
        measures = {
            name: {"mean": measure.mean, "gain": measure.gain.to_dict(), "verdict": measure.gain.verdict}
            for name, measure in self.measures.items()
        }
        rest = {"gain": self.gain.to_dict(), "seconds": self.seconds, "verdict": self.verdict}
        return {"method": self.method, **measures, **rest}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Every method on the same images, and the random baseline.

    Methods are ranked by their gain over random: the mean, over the four curves (deletion, insertion, and
    ROAD with the least and with the most relevant cells imputed), of how far the mean probability moves in
    the right direction. All four are probabilities, so their mean needs no scale. Unlike a mean rank, the
    gain does not change when another method joins, and it has an interval. ROAD counts as much as the other
    two together, because only its imputed images stay plausible. A method whose interval lies above 0 ranks
    before all others.

    Intervals are 95% Student's t intervals of differences paired by image, without correction for the number
    of methods: one in forty methods that equal random will look better.
    """

    scores: Mapping[str, Scores]
    """By method; "random" is the last."""
    classes: tuple[int, ...]
    """The class that was explained, per image."""
    grid: tuple[int, int]
    """Rows and columns of the cells."""
    steps: int
    """Steps of the deletion and the insertion curve."""
    shares: tuple[float, ...]
    """Shares of the cells that ROAD imputes."""
    seed: int

    @property
    def images(self) -> int:
        """The number of images."""
        return len(self.classes)

    def table(self) -> tuple[Row, ...]:
        """One row per method: those better than random, then the others, by gain; random last."""
        rows = (self._row(method) for method in self.scores if method != RANDOM)
        ranked = sorted(rows, key=lambda row: (row.verdict != "better", -row.gain.mean))
        return (*ranked, self._row(RANDOM))

    @property
    def best(self) -> str:
        """The first method of the table; its row's verdict is whether it is better than random."""
        return self.table()[0].method

    @property
    def rivals(self) -> tuple[str, ...]:
        """The methods that differ from the best by less than the interval of their paired differences."""
        best = np.array(self.scores[self.best].merit)
        others = (row.method for row in self.table()[1:-1])
        return tuple(
            name for name in others if Interval.of(best - self.scores[name].merit).verdict != "better"
        )

    @property
    def agreements(self) -> tuple[OrderAgreement, ...]:
        """The order of the methods by zero and by the neighbours, hottest cells first, and by blur and by the
        neighbours, coldest first; empty for a single method."""
        scores = {name: of for name, of in self.scores.items() if name != RANDOM}
        if len(scores) < 2:
            return ()
        hottest = {name: -np.array([of.deletion, of.morf]) for name, of in scores.items()}  # (2, n)
        coldest = {name: np.array([of.insertion, of.lerf]) for name, of in scores.items()}
        return (
            OrderAgreement.of(("zero", "neighbours"), "hottest", hottest),
            OrderAgreement.of(("blur", "neighbours"), "coldest", coldest),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the settings, the table, and the scores of each image."""
        names = ("images", "classes", "grid", "steps", "shares", "seed", "best", "rivals")
        plain = {name: getattr(self, name) for name in names}
        return {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()},
            "agreements": [dataclasses.asdict(agreement) for agreement in self.agreements],
            "methods": [row.to_dict() for row in self.table()],
            "scores": {
                name: {key: list(values) for key, values in dataclasses.asdict(scores).items()}
                for name, scores in self.scores.items()
            },
        }

    def to_dataframe(self) -> Any:
        """The table as a pandas data frame, indexed by method; UserError without pandas."""
        return pandas_library().json_normalize([row.to_dict() for row in self.table()]).set_index("method")

    def text(self) -> str:
        """The table for a terminal, with a legend."""
        head = ("method", "deletion AUC", "insertion AUC", "ROAD", "gain", "s/image", "verdict")
        lines = [head, *(row.cells() for row in self.table())]
        return "\n".join([*aligned(lines, left=range(len(head))), "", *self._legend()])

    def __repr__(self) -> str:
        methods = len(self.scores) - 1
        return f"Comparison({methods} methods on {self.images} images, best: {self.best})"

    def _legend(self) -> list[str]:
        """Notes for reading the table, and its result in one line."""
        rows, columns = self.grid
        notes = [
            f"{self.images} image{'s' * (self.images > 1)}, {rows}x{columns} cells, {self.steps} steps. "
            "Deletion: lower is better; insertion and ROAD: higher is better.",
            "After each mean: the gain over random, paired by image, with its 95% interval (* excludes 0).",
        ]
        if agreements := "; ".join(map(str, self.agreements)):
            notes.append(f"Order of the methods by the fill of removed cells: {agreements}.")
        best = self.table()[0]
        if self.images == 1:
            return [*notes, f"Largest gain: {best.method}. One image gives no interval: use 20 or more."]
        if best.verdict != "better":
            return [*notes, f"No method is measurably better than random; largest gain: {best.method}."]
        rivals = f"; not significantly different: {', '.join(self.rivals)}" if self.rivals else ""
        return [*notes, f"Best: {best.method}{rivals}."]

    def _row(self, method: str) -> Row:
        mine, baseline = self.scores[method], self.scores[RANDOM]

        def measure(values: tuple[float, ...], random: tuple[float, ...], sign: int) -> Measure:
            return Measure(float(np.mean(values)), Interval.of(sign * (np.array(values) - random)))

        return Row(
            method=method,
            deletion=measure(mine.deletion, baseline.deletion, -1),
            insertion=measure(mine.insertion, baseline.insertion, 1),
            road=measure(mine.road, baseline.road, 1),
            gain=Interval.of(np.array(mine.merit) - baseline.merit),
            seconds=float(np.median(mine.seconds)),
        )
