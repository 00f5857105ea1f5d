"""The mean of independent values with its interval."""

import dataclasses
from typing import Self

import numpy as np
import numpy.typing as npt
import scipy  # whose parts are imported when they are used

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over images with its 95% interval."""

    mean: float
    half_width: float | None
    """The interval is `mean` plus and minus this; None for one image."""

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Self:
        """Student's t interval of independent values (n,)."""
        numbers = np.asarray(values, dtype=np.float64)
        if len(numbers) < 2:
            return cls(float(numbers.mean()), None)
        error = numbers.std(ddof=1) / len(numbers) ** 0.5
        quantile = scipy.special.stdtrit(len(numbers) - 1, (1 + CONFIDENCE) / 2)
        return cls(float(numbers.mean()), float(quantile * error))

    @property
    def verdict(self) -> str:
        """Read as a gain: `better`, `worse`, `not significant`, or `one image`."""
        if self.half_width is None:
            return "one image"
        if abs(self.mean) <= self.half_width:
            return "not significant"
        return "better" if self.mean > 0 else "worse"

    def to_dict(self) -> dict[str, float | None]:
        """Return `mean`, `low` and `high`; the latter two are None where there is no interval."""
        half = self.half_width
        low, high = (None, None) if half is None else (self.mean - half, self.mean + half)
        return {"mean": self.mean, "low": low, "high": high}

    def __str__(self) -> str:
        """`+0.120±0.031*`, with the star where the interval excludes 0."""
        if self.half_width is None:
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f}±{self.half_width:.3f}" + "*" * (self.verdict != "not significant")
