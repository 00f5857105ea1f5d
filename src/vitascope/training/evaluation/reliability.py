"""How far the answers of a classifier can be trusted, measured on labelled images."""

import dataclasses
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from vitascope.data.measures import RiskCoverage, calibration, calibration_interval, wilson_interval
from vitascope.models.trust import COVERAGE, FAMILIAR, PredictionSets


@dataclasses.dataclass(frozen=True)
class SetMeasures:
    """How the sets of classes do, at a coverage.

    Attributes:
        held: of each class, the images whose set holds it, int64 (K,).
        counts: images of each class, int64 (K,).
        size: the mean number of classes in a set.
        ambiguous: the share of sets with several classes.
    """

    coverage: float
    held: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    size: float
    ambiguous: float

    @property
    def measured(self) -> float:
        """The share of images whose set holds their class."""
        return int(self.held.sum()) / int(self.counts.sum())

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95% interval."""
        return wilson_interval(int(self.held.sum()), int(self.counts.sum()))


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Of one class per image.

    Attributes:
        error: the expected calibration error, and its 95% `interval`.
        risk: the answers by their confidence.
        sets: None for a model without sets.
        unfamiliar: the share of images that do not pass as familiar; None if that is not known.
    """

    error: float
    interval: tuple[float, float]
    risk: RiskCoverage
    sets: SetMeasures | None
    unfamiliar: float | None

    @classmethod
    def of(
        cls,
        labels: npt.NDArray[np.int64],
        probabilities: npt.NDArray[np.float32],
        sets: PredictionSets | None = None,
        familiarity: npt.NDArray[np.float32] | None = None,
    ) -> Self:
        """That of images with classes (N,), probabilities (N, K) and familiarity (N,), N at least 1."""
        confidences, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
        contained = None if sets is None else sets.contain(torch.from_numpy(probabilities), COVERAGE)
        enough = sets is not None and int(sets.counts.sum()) >= PredictionSets.needed(FAMILIAR)
        measured = None
        if contained is not None:
            members, K = contained.numpy(), probabilities.shape[1]
            sizes, held = members.sum(axis=1), members[np.arange(len(labels)), labels]
            counts = np.bincount(labels, minlength=K)
            measured = SetMeasures(
                COVERAGE,
                np.bincount(labels[held], minlength=K),
                counts,
                float(sizes.mean()),
                float((sizes > 1).mean()),
            )
        return cls(
            calibration(confidences, right).error,
            calibration_interval(confidences, right),
            RiskCoverage.of(confidences, right),
            measured,
            float((familiarity < 1 - FAMILIAR).mean()) if familiarity is not None and enough else None,
        )

    def summary(self) -> dict[str, Any]:
        """The measures as plain values."""
        values: dict[str, Any] = {
            "calibration_error": self.error,
            "calibration_error_low": self.interval[0],
            "calibration_error_high": self.interval[1],
            "risk_coverage_area": self.risk.area,
        }
        if self.sets is not None:
            low, high = self.sets.interval
            values |= {"set_coverage": self.sets.measured, "set_coverage_low": low, "set_coverage_high": high}
            values |= {"set_size": self.sets.size, "ambiguous": self.sets.ambiguous}
        return values | ({} if self.unfamiliar is None else {"unfamiliar": self.unfamiliar})

    def lines(self) -> list[str]:
        """The measures in words."""
        half = self.risk.risk[(len(self.risk.risk) - 1) // 2]
        lines = [
            "calibration error {:.2%} (95% interval {:.1%} to {:.1%}); ".format(self.error, *self.interval)
            + f"of the surest half of the answers {half:.2%} are wrong"
        ]
        if self.sets is not None:
            low, high = self.sets.interval
            lines.append(
                f"sets of {self.sets.coverage:.0%} hold the right class of {self.sets.measured:.2%} "
                f"({low:.1%} to {high:.1%}), with {self.sets.size:.2f} classes in the mean; "
                f"{self.sets.ambiguous:.1%} have several"
            )
        if self.unfamiliar is not None:
            lines.append(f"unlike the training images: {self.unfamiliar:.1%}")
        return lines
