"""How far two tensors are apart."""

from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest number of what is expected."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()
