from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError
from vitascope.training.options.groups import Balance
from vitascope.training.tasks.classify import class_weights_of
from vitascope.training.tasks.losses import asymmetric_loss, binary_focal_loss, focal_loss

B, K = 16, 5
LOGITS = 4 * torch.randn(B, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PRESENT = (torch.rand(B, K, generator=torch.Generator().manual_seed(1)) < 0.3).double()
CLASSES = torch.arange(B) % K
IMAGES = ImageSet("train", [b""] * 4, ClassIndices(np.array([0, 1, 1, 1]), ("cat", "dog")))


def test_the_focal_loss_of_one_class_weakens_what_is_easy() -> None:
    """Equation 4 of Lin et al. (2017) with p of the softmax."""
    shares = F.one_hot(CLASSES, K).double()
    p = LOGITS.softmax(dim=1)[torch.arange(B), CLASSES]
    torch.testing.assert_close(focal_loss(LOGITS, shares), -((1 - p) ** 2) * p.log())


def reference(logits: Tensor, present: Tensor) -> Tensor:
    """Ridnik et al. (2021), equations 4 to 7, with gamma- = 4, gamma+ = 1 and m = 0.05."""
    p = torch.sigmoid(logits)
    shifted = (p - 0.05).clamp(min=0)
    return torch.where(present > 0, -(1 - p) * p.log(), -(shifted**4) * (1 - shifted).log())


def test_the_asymmetric_loss_is_that_of_the_paper() -> None:
    wanted = reference(LOGITS, PRESENT).mean(dim=1)
    torch.testing.assert_close(asymmetric_loss(LOGITS, PRESENT), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_sure_answers_have_finite_losses_and_gradients(scale: float) -> None:
    logits = torch.full((B, K), scale, dtype=torch.float32, requires_grad=True)
    targets = PRESENT.float()
    loss = binary_focal_loss(logits, targets).sum() + asymmetric_loss(logits, targets).sum()
    loss = loss + focal_loss(logits, F.one_hot(CLASSES, K).float()).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_weights_multiply_the_classes_that_apply() -> None:
    weights = torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0], dtype=torch.float64)
    only_second = torch.zeros(1, K, dtype=torch.float64)
    only_second[0, 1] = 1
    nothing = torch.zeros_like(only_second)
    for loss in (asymmetric_loss, binary_focal_loss):
        logits = LOGITS[:1]
        for weight in (None, weights):
            torch.testing.assert_close(loss(logits, nothing, weight), loss(logits, nothing))
        without_present = logits.clone()
        without_present[0, 1] = 50  # whose loss is 0 where the class applies
        gain = loss(logits, only_second, weights) - loss(without_present, only_second, weights)
        plain = loss(logits, only_second) - loss(without_present, only_second)
        torch.testing.assert_close(gain, 2 * plain)


def test_named_weights_are_taken_as_they_are_and_others_are_1() -> None:
    for weights in (("dog=3.5",), {"dog": 3.5}):
        found = class_weights_of(Balance(class_weights=weights), IMAGES)
        assert found is not None
        assert found.tolist() == [1, 3.5]
    assert class_weights_of(Balance(class_weights="none"), IMAGES) is None
    balanced = class_weights_of(Balance(class_weights="balanced"), IMAGES)
    assert balanced is not None
    assert balanced.tolist() == pytest.approx([2, 2 / 3])


def test_impossible_weights_are_rejected() -> None:
    wrong: list[Any] = [("dog=0",), ("dog=-1",), ("dog=inf",), ("dog=nan",), ("dog",), ("balanced", "dog=2")]
    for weights in (*wrong, ("dog=2", "dog=3"), 5, None):
        with pytest.raises(UserError):
            Balance(class_weights=weights)
