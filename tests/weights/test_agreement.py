"""The comparison of two models' logits."""

import pytest
import torch

from vitascope.errors import UserError
from vitascope.weights.agreement import agreement

OWN = torch.tensor([[1.0, 2.0, 3.0], [4.0, 1.0, 0.0]])


def test_same_logits_agree_entirely() -> None:
    found = agreement(OWN, OWN)
    assert (found.images, found.same, found.difference, found.scale) == (2, 2, 0, 4)
    assert found.first is None


def test_different_number_of_classes_is_rejected() -> None:
    with pytest.raises(UserError, match=r"\(2, 2\)"):
        agreement(OWN, OWN[:, :2])
