"""The difference of two tensors."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor | NDArray[Any]) -> float:
    """The largest difference, relative to the largest expected magnitude."""
    expected = torch.as_tensor(expected)
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()
