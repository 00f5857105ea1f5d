import numpy as np
import torch
import torch.nn.functional as F

from tests.model import random_images, small_model
from vitascope.data.preprocess import Preprocess
from vitascope.training.tasks.classify import Classify
from vitascope.training.tasks.task import Examples


def examples_of(labels: torch.Tensor, targets: torch.Tensor) -> Examples:
    images = random_images(len(labels), 3, 32, 32).sigmoid()
    indices = np.arange(len(labels))
    return Examples(images=images, labels=labels, targets=targets, indices=indices, seed=0, epoch=0)


def test_the_loss_is_smoothed_cross_entropy_and_the_sums_count_images() -> None:
    model, labels = small_model(num_classes=3), torch.tensor([0, 1, 2, 1])
    preprocess = Preprocess(image_size=(32, 32), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    examples = examples_of(labels, labels)
    images = preprocess.normalize(examples.images)
    loss, sums = Classify(preprocess, label_smoothing=0.3).loss(model, examples)
    log_p = F.log_softmax(model(images), dim=1)
    target = F.one_hot(labels, 3) * 0.7 + 0.1
    torch.testing.assert_close(loss, -(target * log_p).sum(dim=1).mean())
    torch.testing.assert_close(sums["loss"], loss.detach() * 4)
    assert sums["correct"] == (log_p.argmax(dim=1) == labels).sum()
    assert sums["count"] == 4
    assert loss.requires_grad
    assert not sums["loss"].requires_grad


def test_mixed_targets_are_learned_as_they_are_and_counted_by_the_images_own_classes() -> None:
    model, labels = small_model(num_classes=3), torch.tensor([0, 1])
    preprocess = Preprocess(image_size=(32, 32))
    targets = torch.tensor([[0.7, 0.0, 0.3], [0.2, 0.8, 0.0]])
    examples = examples_of(labels, targets)
    images = preprocess.normalize(examples.images)
    loss, sums = Classify(preprocess, label_smoothing=0.3).loss(model, examples)
    logits = model(images)
    smoothed = 0.7 * targets + 0.1
    torch.testing.assert_close(loss, -(smoothed * F.log_softmax(logits, dim=1)).sum(dim=1).mean())
    assert sums["correct"] == (logits.argmax(dim=1) == labels).sum()
