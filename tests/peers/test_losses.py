import torch
from torchvision.ops import sigmoid_focal_loss

from tests.training.tasks.test_losses import LOGITS, PRESENT
from vitascope.training.tasks.losses import binary_focal_loss


def test_the_focal_loss_of_several_classes_is_that_of_torchvision() -> None:
    wanted = sigmoid_focal_loss(LOGITS, PRESENT, alpha=0.25, gamma=2).mean(dim=1)
    torch.testing.assert_close(binary_focal_loss(LOGITS, PRESENT), wanted, rtol=0, atol=1e-9)
