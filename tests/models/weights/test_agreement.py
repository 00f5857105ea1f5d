import pytest
import torch

from vitascope.errors import UserError
from vitascope.models.weights.agreement import agreement

OWN = torch.tensor([[1.0, 2.0, 3.0], [4.0, 1.0, 0.0]])


def test_same_logits_agree_entirely() -> None:
    found = agreement(OWN, OWN)
    assert (found.images, found.same, found.difference, found.scale) == (2, 2, 0, 4)
    assert found.first is None


def test_different_number_of_classes_is_rejected() -> None:
    with pytest.raises(UserError, match=r"\(2, 2\)"):
        agreement(OWN, OWN[:, :2])


@pytest.mark.parametrize(
    ("change", "is_rounding"), [(0.0, True), (3e-3, True), (5e-3, False), (float("nan"), False)]
)
def test_features_agree_up_to_rounding_whichever_number_is_the_largest(
    change: float, is_rounding: bool
) -> None:
    found = agreement(torch.cat([OWN, OWN]), torch.cat([OWN, OWN + change]), outputs="features")
    assert (found.same, found.is_rounding) == (None, is_rounding)
    assert found.summary.startswith("features differ by at most")


def test_another_class_is_no_rounding_however_close_the_logits() -> None:
    other = torch.tensor([[1.0, 2.6, 2.4], [4.0, 1.0, 0.0]])
    found = agreement(OWN, other, tolerance=0.2)
    assert found.difference <= found.tolerance * found.scale
    assert (found.same, found.is_rounding) == (1, False)
    assert agreement(OWN, OWN).is_rounding
