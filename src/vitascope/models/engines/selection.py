"""`ClassSelection`: the classes that are predicted for an image, from the probabilities of all."""

import dataclasses
from typing import Annotated, Literal

import torch
from torch import Tensor

from vitascope.arguments import CheckedFields, Range
from vitascope.errors import UserError
from vitascope.formatting import listed
from vitascope.models.engines.engine import Engine
from vitascope.models.trust import COVERAGE, FAMILIAR, PredictionSets

TOP_K = 5
"""Classes per image by default, where one class applies."""


Unknown = Literal["ambiguous", "unfamiliar", "unchecked"]
REASONS: dict[Unknown | None, str] = {
    "ambiguous": "several classes are likely",
    "unfamiliar": "unlike the training images",
}
"""Why a model does not know the class of a picture."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a model knows the class of a picture.

    Attributes:
        unknown: None if it does; `unfamiliar` if the picture is less like the training images than those that
            were to pass; `ambiguous` if the set has several classes; else `unchecked` if the validation
            images were too few to tell which pictures are unfamiliar.
        set: names of the classes that hold the right one at the asked rate, the most probable first; None
            without enough validation images.
        familiarity: see `Familiarity`; None for a model that does not know it.
    """

    unknown: Unknown | None
    set: tuple[str, ...] | None
    familiarity: float | None

    def in_words(self) -> str:
        """The reason with its numbers; empty for a class that is known, or unchecked as all are."""
        if self.unknown not in REASONS:
            return ""
        if self.unknown == "ambiguous":
            return f"unknown: {REASONS[self.unknown]}: {listed(self.set or ())}"
        share = f"{self.familiarity:.2%} of the validation images are less like them"
        return f"unknown: {REASONS[self.unknown]}: {share}"


@dataclasses.dataclass(frozen=True)
class ClassSelection(CheckedFields):
    """The predicted classes of an image, most probable first.

    Where one class applies, they are the `top_k` most probable ones. Where any may apply, they are those
    whose probability is at least their threshold; maybe none.

    Raises:
        UserError: `top_k` below 1; a `threshold` that is no probability.
    """

    top_k: Annotated[int | None, Range(ge=1)] = None
    """The most classes per image. None means `TOP_K`, or no limit where any class may apply."""
    threshold: Annotated[float | None, Range(ge=0, le=1)] = None
    """The threshold of every class, where any may apply. None means the model's own."""
    coverage: Annotated[float | None, Range(gt=0, lt=1)] = None
    """Share of pictures whose set of classes holds the right one. None means `COVERAGE`."""
    familiar: Annotated[float | None, Range(gt=0, lt=1)] = None
    """Share of pictures such as those of the training that pass as familiar. None means `FAMILIAR`."""

    def check(self, engine: Engine) -> None:
        """Reject a threshold where one class is predicted, and rates for a model without calibration."""
        if engine.sets is None:
            if self.coverage is not None or self.familiar is not None:
                reason = "was not calibrated" if engine.views == 1 else "is calibrated on one view at most"
                raise UserError(
                    f"{engine.name or 'the model'} {reason}, so it has no sets of classes and no "
                    f"familiarity: leave out coverage and familiar{', or views' * (engine.views > 1)}"
                )
        elif self.coverage is not None and engine.sets.limits(self.coverage) is None:
            of_class, images = " of each class" * engine.sets.counts.ndim, int(engine.sets.counts.min())
            raise UserError(
                f"sets of {100 * self.coverage:.4g}% need {PredictionSets.needed(self.coverage):,} "
                f"validation images{of_class}, and the model was calibrated on {images:,}"
            )
        elif self.familiar is not None and (reason := self.unchecked(engine)):
            raise UserError(reason)
        if self.threshold is not None and not engine.thresholds:
            raise UserError(
                "a threshold is for models that predict any number of classes per image; this one predicts "
                "one: leave it out, or limit the classes with top_k"
            )

    def unchecked(self, engine: Engine) -> str:
        """The reason why a calibrated model cannot tell which pictures are unfamiliar; empty if it can."""
        rate = self.familiar or FAMILIAR
        needed, images = PredictionSets.needed(rate), engine.familiar_images
        if engine.sets is None or images >= needed:
            return ""
        if not images:
            return "the model has no familiarity: the features of its validation images did not differ"
        alarms = f"unfamiliar pictures at {100 * (1 - rate):.4g}% false alarms"
        return f"{alarms} need {needed:,} validation images, and the model was calibrated on {images:,}"

    def limit(self, engine: Engine) -> int | None:
        """The most classes per image; None for no limit."""
        return TOP_K if self.top_k is None and not engine.thresholds else self.top_k

    def thresholds(self, engine: Engine) -> tuple[float, ...]:
        """The threshold of each class; empty where one class applies."""
        return engine.thresholds if self.threshold is None else (self.threshold,) * engine.num_classes

    def of(self, engine: Engine, probabilities: Tensor) -> list[list[tuple[int, float]]]:
        """The predicted classes of each row of (B, K), with their probabilities."""
        K = probabilities.shape[1]
        shown, counts = probabilities, [K] * len(probabilities)
        if engine.thresholds:
            applies = probabilities >= torch.tensor(self.thresholds(engine))  # (B, K)
            shown, counts = probabilities.masked_fill(~applies, -1), applies.sum(dim=1).tolist()
        top = shown.topk(min(self.limit(engine) or K, K), dim=1)  # (B, k)
        rows = zip(top.indices.tolist(), top.values.tolist(), counts, strict=True)
        return [list(zip(indices, values, strict=True))[:count] for indices, values, count in rows]

    def judged(self, engine: Engine, probabilities: Tensor, familiarity: Tensor | None) -> list[Verdict]:
        """The verdict on each picture, from probabilities (B, K) and familiarity (B,) on the CPU."""
        sets: list[tuple[str, ...] | None] = [None] * len(probabilities)
        contained = (
            None if engine.sets is None else engine.sets.contain(probabilities, self.coverage or COVERAGE)
        )
        if contained is not None:
            order = probabilities.argsort(dim=1, descending=True, stable=True)  # (B, K)
            rows, places = contained.gather(1, order).nonzero(as_tuple=True)
            parts = order[rows, places].split(contained.sum(dim=1).tolist())
            sets = [tuple(map(engine.label, part.tolist())) for part in parts]
        known = [None] * len(sets) if familiarity is None else familiarity.tolist()
        otherwise: Unknown | None = "unchecked" if engine.sets is None or self.unchecked(engine) else None
        return [
            Verdict(self._reason(classes, share) or otherwise, classes, share)
            for classes, share in zip(sets, known, strict=True)
        ]

    def _reason(self, classes: tuple[str, ...] | None, familiarity: float | None) -> Unknown | None:
        rate = 1 - (self.familiar or FAMILIAR) + 1e-6  # so that the fewest images suffice in float32 too
        if familiarity is not None and familiarity < rate:
            return "unfamiliar"
        return "ambiguous" if classes is not None and len(classes) > 1 else None


AUTO = ClassSelection()
"""The default of each model."""
