"""How far two runtimes' answers to the same pictures lie apart, and when that is too far."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from vitascope.data.decoding import ImageSource
from vitascope.errors import UserError

TOLERANCES = {"pixels": 1e-3, "pictures": 1e-2}
"""The largest difference of logits that an exact export may show, as a share of the largest logit.

By what goes in. Sums in another order make some 1e-6; pixels that a resize rounds the other way, some 1e-4.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Answers to the same pictures, a model's own and another runtime's."""

    pictures: int
    """Pictures compared."""
    same: int
    """Those whose most probable class is the same, or one that the model has just as probable."""
    difference: float
    """The largest difference of two logits."""
    scale: float
    """The model's largest logit, to compare with."""
    tolerance: float
    """The share of `scale` that counts as rounding."""

    @property
    def share(self) -> float:
        """`same` as a share of the pictures."""
        return self.same / self.pictures

    @property
    def summary(self) -> str:
        """In words, for people."""
        return (
            f"top-1 the same on {self.same} of {self.pictures} pictures; logits differ by at most "
            f"{self.difference:.2g} (the largest is {self.scale:.3g})"
        )


def agreement(own: Tensor, other: Tensor, tolerance: float = TOLERANCES["pixels"]) -> Agreement:
    """Compare a model's logits (B, K) with another runtime's.

    Args:
        own: the model's.
        other: those that are compared with them.
        tolerance: a share of the largest logit. Two classes whose own logits are no further apart are just as
            probable: which of them comes first is rounding.
    """
    if own.shape != other.shape:
        raise UserError(f"logits {tuple(other.shape)} do not answer the same as {tuple(own.shape)}")
    scale = float(own.abs().max())
    chosen = own.gather(1, other.argmax(dim=1, keepdim=True))[:, 0]  # (B,)
    same = own.max(dim=1).values - chosen <= tolerance * scale  # False where a number is none
    return Agreement(
        pictures=len(own),
        same=int(same.sum()),
        difference=float((own - other).abs().max()),
        scale=scale,
        tolerance=tolerance,
    )


def refuse_other_answers(found: Agreement, name: str) -> None:
    """Refuse an export that does not answer as its model does.

    Raises:
        UserError: another most probable class, or logits further apart than the tolerance.
    """
    limit = found.tolerance * found.scale
    if found.same < found.pictures or not found.difference <= limit:  # so that NaN fails too
        raise UserError(
            f"{name} does not answer as the model does, and is not kept: {found.summary}; allowed are "
            f"differences of {limit:.2g}"
        )


def sample_pictures() -> list[ImageSource]:
    """The two photographs in scikit-learn and parts of them, 16 uint8 (H, W, C) of 8 sizes."""
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images  # a temple and a flower, (427, 640, 3)
    return [part for photograph in photographs for part in parts(photograph)]


def parts(photograph: np.ndarray) -> Iterator[np.ndarray]:
    """The whole, its quarters, its middle, a strip across and a part smaller than most models' input."""
    H, W = photograph.shape[:2]
    yield photograph
    for top in (0, H // 2):
        for left in (0, W // 2):
            yield photograph[top : top + H // 2, left : left + W // 2]
    yield photograph[:, W // 4 : W // 4 + H]
    yield photograph[H // 3 : 2 * H // 3]
    yield photograph[H // 2 : H // 2 + 90, W // 3 : W // 3 + 120]
