"""`Agreement`: the difference of two models' outputs on the same images."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeAlias

from torch import Tensor

from vitascope.errors import UserError
from vitascope.models.heads import predicted

TOLERANCE = 1e-3
"""The share of the largest output that counts as rounding; sums in another order make about 1e-6."""

Compared: TypeAlias = Literal["logits", "features", "heatmaps"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Outputs of a model, and of one that was made from it, for the same images."""

    images: int
    """Images compared."""
    same: int | None
    """Images with the same most probable class, or one as probable in the first model; None for features."""
    differences: Mapping[str, float]
    """The largest difference of every compared value, in the order of the pass; the last are `outputs`."""
    scale: float
    """The first model's largest output, to compare with."""
    tolerance: float
    """The share of `scale` that counts as rounding."""
    outputs: Compared = "logits"
    """What the models return."""

    @property
    def difference(self) -> float:
        """The largest difference of two outputs."""
        return self.differences[self.outputs]

    @property
    def is_rounding(self) -> bool:
        """Whether all classes are the same, and no two outputs differ by more than rounding."""
        same_classes = self.same in (None, self.images)
        return same_classes and self.difference <= self.tolerance * self.scale  # False for NaN

    @property
    def first(self) -> str | None:
        """The first value that differs; None if all are bitwise the same."""
        return next((name for name, difference in self.differences.items() if difference != 0), None)

    @property
    def summary(self) -> str:
        """One line for people."""
        same = "" if self.same is None else f"same top-1 class for {self.same} of {self.images} pictures; "
        return (
            f"{same}{self.outputs} differ by at most {self.difference:.2g} (the largest is {self.scale:.3g})"
        )


def agreement(
    own: Tensor, other: Tensor, tolerance: float = TOLERANCE, outputs: Compared = "logits"
) -> Agreement:
    """Compare a model's logits (B, K), or its features (B, D), with another one's."""
    if own.shape != other.shape:
        raise UserError(f"{outputs} {tuple(other.shape)} cannot be compared with {tuple(own.shape)}")
    scale, same = float(own.abs().max()), None
    if outputs == "logits":
        chosen = own.gather(1, predicted(other)[:, None])[:, 0]  # (B,)
        same = int((own.max(dim=1).values - chosen <= tolerance * scale).sum())  # False for NaN
    return Agreement(
        images=len(own),
        same=same,
        differences={outputs: float((own - other).abs().max())},
        scale=scale,
        tolerance=tolerance,
        outputs=outputs,
    )
