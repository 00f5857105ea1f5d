import torch
import torch.nn.functional as F

from tests.model import random_images, small_model
from vitascope.training.classify import Classify


def test_the_loss_is_smoothed_cross_entropy_and_the_sums_count_images() -> None:
    model, images = small_model(num_classes=3), random_images(4, 3, 32, 32)
    labels = torch.tensor([0, 1, 2, 1])
    loss, sums = Classify(label_smoothing=0.3).loss(model, images, labels)
    log_p = F.log_softmax(model(images), dim=1)
    target = F.one_hot(labels, 3) * 0.7 + 0.1
    torch.testing.assert_close(loss, -(target * log_p).sum(dim=1).mean())
    torch.testing.assert_close(sums["loss"], loss.detach() * 4)
    assert sums["correct"] == (log_p.argmax(dim=1) == labels).sum()
    assert sums["count"] == 4
    assert loss.requires_grad
    assert not sums["loss"].requires_grad
