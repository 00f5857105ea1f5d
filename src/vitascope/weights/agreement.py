"""`Agreement`: the difference of two models' outputs on the same images."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from vitascope.errors import UserError
from vitascope.model.heads import predicted

TOLERANCE = 1e-3
"""The share of the largest logit that counts as rounding; sums in another order make about 1e-6."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Outputs of a model, and of one that was made from it, for the same images."""

    images: int
    """Images compared."""
    same: int
    """Images with the same most probable class, or one that is equally probable in the first model."""
    differences: Mapping[str, float]
    """The largest difference of every compared value, in the order of the pass; the last are the `logits`."""
    scale: float
    """The first model's largest logit, to compare with."""
    tolerance: float
    """The share of `scale` that counts as rounding."""

    @property
    def difference(self) -> float:
        """The largest difference of two logits."""
        return self.differences["logits"]

    @property
    def first(self) -> str | None:
        """The first value that differs; None if all are bitwise the same."""
        return next((name for name, difference in self.differences.items() if difference != 0), None)

    @property
    def summary(self) -> str:
        """One line for people."""
        return (
            f"same top-1 class for {self.same} of {self.images} pictures; logits differ by at most "
            f"{self.difference:.2g} (the largest is {self.scale:.3g})"
        )


def agreement(own: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> Agreement:
    """Compare a model's logits (B, K) with another one's."""
    if own.shape != other.shape:
        raise UserError(f"logits {tuple(other.shape)} cannot be compared with {tuple(own.shape)}")
    scale = float(own.abs().max())
    chosen = own.gather(1, predicted(other)[:, None])[:, 0]  # (B,)
    same = own.max(dim=1).values - chosen <= tolerance * scale  # False for NaN
    return Agreement(
        images=len(own),
        same=int(same.sum()),
        differences={"logits": float((own - other).abs().max())},
        scale=scale,
        tolerance=tolerance,
    )
