"""The difference of two tensors."""

from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected magnitude."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()
