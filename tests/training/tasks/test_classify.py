import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from tests.data import read_tree
from tests.models import random_images, small_model, with_preprocess
from tests.training import write_folder
from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.training.options.groups import Distillation
from vitascope.training.tasks.classify import Classify, Distill, balanced_weights
from vitascope.training.tasks.losses import LOSSES, Criterion
from vitascope.training.tasks.task import Examples
from vitascope.training.tasks.teachers import Teacher

K = 3
OURS = Preprocess(image_size=(32, 32), mean=(0.2, 0.5, 0.6), std=(0.3, 0.2, 0.4))
THEIRS = Preprocess(image_size=(32, 32), mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3))
LABELS = torch.tensor([0, 2, 1, 0])
MIXED = F.one_hot(LABELS, K) * 0.7 + F.one_hot(LABELS.flip(0), K) * 0.3
SETS = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])


def examples(labels: Tensor = LABELS, targets: Tensor | None = None) -> Examples:
    return Examples(
        images=random_images(len(labels), 3, 32, 32).sigmoid(),
        labels=labels,
        targets=labels if targets is None else targets,
        indices=np.arange(len(labels)),
        seed=0,
        epoch=0,
    )


def logits_of(model: nn.Module, batch: Examples) -> Tensor:
    return model(OURS.normalize(batch.images))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 1.5, 3.0])])
def test_loss_is_smoothed_weighted_cross_entropy_and_the_sums_count_images(
    mixed: bool, weights: Tensor | None
) -> None:
    """An image's weight is that of its targets before smoothing; its own class decides about its accuracy."""
    model, batch = small_model(num_classes=K), examples(targets=MIXED if mixed else LABELS)
    logits = logits_of(model, batch)
    loss, sums = Classify(OURS, Criterion(label_smoothing=0.3), weights).loss(model, batch)
    shares = MIXED if mixed else F.one_hot(LABELS, K).float()
    losses = -((0.7 * shares + 0.1) * logits.log_softmax(dim=1)).sum(dim=1)
    expected = (losses if weights is None else losses * (shares @ weights)).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums["loss"], loss.detach() * 4)
    assert sums["accuracy"] == (logits.argmax(dim=1) == LABELS).sum()
    assert sums["count"] == 4
    assert (loss.requires_grad, sums["loss"].requires_grad) == (True, False)


@pytest.mark.parametrize(("smoothing", "mixed"), [(0.0, True), (0.3, False), (0.3, True)])
def test_binary_cross_entropy_takes_every_class_of_a_mixed_image_as_present(
    smoothing: float, mixed: bool
) -> None:
    model, batch = small_model(num_classes=K), examples(targets=MIXED if mixed else LABELS)
    p = logits_of(model, batch).sigmoid()
    loss, sums = Classify(OURS, Criterion("bce", smoothing)).loss(model, batch)
    present = (MIXED > 0) if mixed else F.one_hot(LABELS, K)
    target = present * (1 - smoothing) + smoothing / K
    torch.testing.assert_close(loss, -(target * p.log() + (1 - target) * (1 - p).log()).mean())
    assert sums["accuracy"] == (p.argmax(dim=1) == LABELS).sum()


def test_balanced_weights_are_those_of_scikit_learn_with_the_mean_one() -> None:
    labels = np.repeat([0, 1, 2, 3], [500, 100, 30, 1])
    weights = balanced_weights(ImageSet("train", range(631), ClassIndices(labels, ("a", "b", "c", "d"))))
    theirs = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    np.testing.assert_allclose(weights, theirs, rtol=1e-6)
    assert float(weights[labels].mean()) == pytest.approx(1, rel=1e-6)


# Distillation


def student(seed: int = 0, **options: Any) -> VisionTransformer:
    return small_model(seed, **{"num_classes": K, "distillation_token": True} | options)


def teacher(preprocess: Preprocess = THEIRS) -> Teacher:
    model = small_model(seed=7, num_classes=K, in_channels=preprocess.channels).requires_grad_(False)
    return Teacher(name="the teacher", model=with_preprocess(model, preprocess))


def distill(label_smoothing: float = 0.0, **options: Any) -> Distill:
    return Distill(
        OURS, Criterion(label_smoothing=label_smoothing), options=Distillation(**options), teacher=teacher()
    )


@torch.no_grad()
def answers(task: Distill, model: VisionTransformer, batch: Examples) -> tuple[Tensor, Tensor, Tensor]:
    """Class head, distillation head and teacher, each (B, K) in float64, computed one by one."""
    pooled = model.embed(OURS.normalize(batch.images))
    by_label, by_teacher = model.head.linear(pooled[:, :16]), model.head.distillation(pooled[:, 16:])
    return by_label.double(), by_teacher.double(), task.teacher.model(THEIRS.normalize(batch.images)).double()


@pytest.mark.parametrize("mixed", [False, True])
def test_hard_distillation_is_equation_3(mixed: bool) -> None:
    task, model = distill(distill="hard", label_smoothing=0.2), student()
    batch = examples(targets=MIXED if mixed else LABELS)
    loss, sums = task.loss(task.module(model), batch)
    by_label, by_teacher, taught = answers(task, model, batch)
    shares = MIXED if mixed else F.one_hot(LABELS, K)
    from_label = -((shares * 0.8 + 0.2 / K) * by_label.log_softmax(1)).sum(1)
    from_teacher = F.cross_entropy(by_teacher, taught.argmax(1), reduction="none")  # never smoothed
    assert loss.item() == pytest.approx(float((0.5 * from_label + 0.5 * from_teacher).mean()), rel=1e-5)
    assert sums.keys() == {"loss", "accuracy", "count", "agree"}
    assert sums["accuracy"] == (logits_of(model, batch).argmax(1) == LABELS).sum()
    assert sums["agree"] == (by_teacher.argmax(1) == taught.argmax(1)).sum()


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_soft_distillation_is_equation_2(tau: float) -> None:
    task, model = distill(distill="soft", temperature=tau, distill_weight=0.1), student()
    batch = examples()
    loss, _ = task.loss(task.module(model), batch)
    by_label, by_teacher, taught = answers(task, model, batch)
    p, q = (taught / tau).softmax(1), (by_teacher / tau).softmax(1)
    divergence = (p * (p / q).log()).sum(1)
    total = 0.9 * F.cross_entropy(by_label, LABELS) + 0.1 * tau**2 * divergence.mean()
    assert loss.item() == pytest.approx(float(total), rel=1e-5)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_class_weights_weigh_both_terms_of_distillation(kind: str) -> None:
    """The same as drawing each image as often as its weight states."""
    model, batch, weights = student(), examples(), torch.tensor([1.0, 2.0, 0.0])
    task = distill(distill=kind, label_smoothing=0.1)
    weighted, _ = dataclasses.replace(task, class_weights=weights).loss(task.module(model), batch)
    total = 0.0
    for row, label in enumerate(LABELS.tolist()):
        names = ("images", "labels", "targets", "indices")
        alone = dataclasses.replace(batch, **{name: getattr(batch, name)[row : row + 1] for name in names})
        total += float(weights[label] * task.loss(task.module(model), alone)[0])
    assert weighted.item() == pytest.approx(total / 4, rel=1e-5)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_teacher_of_weight_one_makes_labels_irrelevant_and_does_not_learn(kind: str) -> None:
    model, task = student(), distill(distill=kind, distill_weight=1.0)
    task.loss(task.module(model), examples())[0].backward()
    assert not model.head.linear.weight.grad.any()
    assert model.head.distillation.weight.grad.any()
    assert all(parameter.grad is None for parameter in task.teacher.model.parameters())
    assert not task.teacher.model.training


def test_validation_measures_the_mean_of_both_heads_and_restores_the_mode(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data", per_class=5, side=32)
    loader = Loader(read_tree(root), default_preprocess(student().config), batch_size=3)
    task, model = distill(), student(num_classes=2)
    module = task.module(model).train()
    found = task.validate(module, loader, torch.float32)
    assert found == Classify(OURS).validate(model, loader, torch.float32)
    assert module.training
    assert model.training
    task.validate(module.eval(), loader, torch.float32)
    assert not model.training


# Several classes per image


def several(**options: Any) -> Classify:
    return Classify(OURS, Criterion("bce"), kind=LOSSES[ClassSets], **options)


def test_the_loss_of_several_classes_is_binary_and_an_image_is_right_with_all_of_them() -> None:
    model, batch = small_model(num_classes=K), examples(SETS)
    logits = logits_of(model, batch)
    loss, sums = several().loss(model, batch)
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits, SETS.float()))
    assert sums["accuracy"] == ((logits > 0) == SETS).all(dim=1).sum()


def test_balanced_weights_of_several_classes_are_those_of_the_positives() -> None:
    labels = np.zeros((10, 2), np.bool_)
    labels[:2, 0] = labels[:5, 1] = True
    images = ImageSet("train", [Path(str(n)) for n in range(10)], ClassSets(labels, ("a", "b")))
    weights = balanced_weights(images)
    assert weights.tolist() == [4.0, 1.0]
    logits, targets = torch.randn(6, 2), torch.from_numpy(labels[:6])
    task = several(class_weights=weights)
    wanted = F.binary_cross_entropy_with_logits(logits, targets.float(), pos_weight=weights)
    torch.testing.assert_close(task.weighted_mean(task.label_losses(logits, targets), targets), wanted)


@pytest.mark.parametrize("criterion", ["bce", "focal", "asymmetric"])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_minimum_for_an_absent_class_does_not_depend_on_its_weight(criterion: Any, mixed: bool) -> None:
    """On a grid of logits; with smoothing, the minimum of binary cross-entropy is at p = smoothing / K."""
    logits = torch.linspace(-8, 4, 1201)
    targets = torch.tensor([[0.3 if mixed else 1.0, 0.0]]).expand(len(logits), 2)
    lowest = set()
    for weight in (0.1, 1.0, 24.0):
        task = Classify(OURS, Criterion(criterion, 0.1), torch.tensor([3.0, weight]), kind=LOSSES[ClassSets])
        losses = task.label_losses(torch.stack([torch.zeros_like(logits), logits], dim=1), targets)
        lowest.add(float(logits[losses.argmin()].sigmoid()))
    assert len(lowest) == 1
    assert criterion != "bce" or lowest.pop() == pytest.approx(0.1 / 2, abs=1e-3)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_teacher_of_several_classes_teaches_each_of_them(kind: str) -> None:
    class Taught(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return taught

    taught = torch.tensor([[2.0, -1.0, 0.5], [-3.0, 0.1, 4.0], [1.0, 1.0, -1.0]])
    teacher = Teacher(name="the teacher", model=with_preprocess(Taught(), OURS))
    options = Distillation(distill=kind, distill_weight=1.0, temperature=2.0)
    task = Distill(OURS, Criterion("bce", 0.1), None, LOSSES[ClassSets], options=options, teacher=teacher)
    module, batch = task.module(student()), examples(SETS)
    loss, sums = task.loss(module, batch)
    _, by_teacher = module(OURS.normalize(batch.images))
    if kind == "hard":
        wanted = F.binary_cross_entropy_with_logits(by_teacher, (taught > 0).float())
    else:
        p, q = (taught / 2).sigmoid(), (by_teacher / 2).sigmoid()
        wanted = 4 * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    torch.testing.assert_close(loss, wanted)
    assert sums["agree"] == ((by_teacher > 0) == (taught > 0)).all(dim=1).sum()


def test_the_best_weights_have_the_highest_map_or_the_lowest_loss() -> None:
    assert several().monitor.better(0.5, 0.4)
    assert not several().monitor.better(float("nan"), several().monitor.worst)
    assert Classify(OURS).monitor.better(0.4, 0.5)
