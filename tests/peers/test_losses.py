"""Binary cross-entropy against timm's."""

import pytest
import torch

from vitascope.training.tasks.classify import binary_cross_entropy

timm_loss = pytest.importorskip("timm.loss", reason="timm is not installed (vitascope[peers])")

LOGITS = torch.linspace(-3, 4, 20).view(4, 5)
LABELS = torch.tensor([0, 3, 1, 4])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_of_labels_equals_timm(smoothing: float) -> None:
    expected = timm_loss.BinaryCrossEntropy(smoothing=smoothing)(LOGITS, LABELS)
    torch.testing.assert_close(binary_cross_entropy(LOGITS, LABELS, smoothing).mean(), expected)


def test_binary_cross_entropy_of_mixed_targets_equals_timm_with_a_threshold_of_zero() -> None:
    own = torch.nn.functional.one_hot(LABELS, 5)
    mixed = 0.9 * own + 0.1 * own.flip(0)
    expected = timm_loss.BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)(LOGITS, mixed)
    torch.testing.assert_close(binary_cross_entropy(LOGITS, mixed, 0.0).mean(), expected)
