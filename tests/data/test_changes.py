from typing import Any

import numpy as np
import pytest
import torch

from vitascope.data import changes
from vitascope.data.changes import Change, apply_changes, together

ARRAYS = (
    np.arange(5),
    np.array([[True], [False], [True]]),
    np.linspace(0, 1, 7, dtype=np.float32)[::2],
    np.zeros((0, 3), np.float32),
    np.arange(12, dtype=np.uint8).reshape(3, 4).T,
    np.array([2**40, -1]),
)
CPU = torch.device("cpu")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would go to a GPU, where the CPU pretends to be one."""
    sent: list[Any] = []
    monkeypatch.setattr(changes, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(
        changes, "to_device", lambda array, _: [sent.append(array), torch.from_numpy(array)][1]
    )
    return sent


def test_arrays_arrive_in_one_copy_with_their_shapes_dtypes_and_values(copies: list[Any]) -> None:
    found = together(ARRAYS, CPU)
    assert len(copies) == 1
    for tensor, array in zip(found, ARRAYS, strict=True):
        assert tensor.dtype == torch.from_numpy(array.copy()).dtype
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_a_cpu_gets_the_arrays_themselves() -> None:
    assert all(
        np.shares_memory(t.numpy(), a) for t, a in zip(together(ARRAYS, CPU), ARRAYS, strict=True) if a.size
    )


def test_changes_are_applied_in_turn_with_their_own_arrays(copies: list[Any]) -> None:
    plus = Change((np.array([1.0, 2.0]), np.array([10.0])), lambda images, one, two: images + one + two)
    double = Change((), lambda images: images * 2)
    found = apply_changes(torch.zeros(1, 2), [plus, double, Change((np.array([3.0]),), torch.sub)])
    assert found.tolist() == [[19.0, 21.0]]
    assert len(copies) == 1
