"""`ClassSelection`: the classes that are predicted for an image, from the probabilities of all."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.predict.engine import Engine

TOP_K = 5
"""Classes per image by default, where one class applies."""


@dataclasses.dataclass(frozen=True)
class ClassSelection:
    """The predicted classes of an image, most probable first.

    Where one class applies, they are the `top_k` most probable ones. Where any may apply, they are those
    whose probability is at least their threshold; maybe none.

    Raises:
        UserError: `top_k` below 1; a `threshold` that is no probability.
    """

    top_k: int | None = None
    """The most classes per image. None means `TOP_K`, or no limit where any class may apply."""
    threshold: float | None = None
    """The threshold of every class, where any may apply. None means the model's own."""

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, not {self.top_k}")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise UserError(f"threshold is a probability from 0 to 1, not {self.threshold:g}")

    def check(self, engine: Engine) -> None:
        """Reject a threshold for a model that predicts one class per image."""
        if self.threshold is not None and not engine.several:
            raise UserError(
                "a threshold is for models that predict any number of classes per image; this one predicts "
                "one: leave it out, or limit the classes with top_k"
            )

    def limit(self, engine: Engine) -> int | None:
        """The most classes per image; None for no limit."""
        return TOP_K if self.top_k is None and not engine.several else self.top_k

    def thresholds(self, engine: Engine) -> tuple[float, ...]:
        """The threshold of each class; empty where one class applies."""
        return engine.thresholds if self.threshold is None else (self.threshold,) * engine.num_classes

    def of(self, engine: Engine, probabilities: Tensor) -> list[list[tuple[int, float]]]:
        """The predicted classes of each row of (B, K), with their probabilities."""
        K = probabilities.shape[1]
        shown, counts = probabilities, [K] * len(probabilities)
        if engine.several:
            applies = probabilities >= torch.tensor(self.thresholds(engine))  # (B, K)
            shown, counts = probabilities.masked_fill(~applies, -1), applies.sum(dim=1).tolist()
        found = shown.topk(min(self.limit(engine) or K, K), dim=1)  # (B, k)
        rows = zip(found.indices.tolist(), found.values.tolist(), counts, strict=True)
        return [list(zip(indices, values, strict=True))[:count] for indices, values, count in rows]


AUTO = ClassSelection()
"""The default of each model."""
