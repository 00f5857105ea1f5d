"""Classification of images and of features, and distillation."""

from __future__ import annotations

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
from tests.model import random_images, small_model, with_preprocess
from tests.training import write_folder
from vitascope.data.loading import Loader
from vitascope.data.preprocess import Preprocess
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError
from vitascope.model.resnet import ResNet
from vitascope.model.resnet_config import ResNetConfig
from vitascope.model.vit import VisionTransformer
from vitascope.options.groups import Distillation
from vitascope.training.tasks.classify import Classify, Distill, HeadAlone, balanced_weights
from vitascope.training.tasks.task import Examples
from vitascope.training.tasks.teachers import Teacher
from vitascope.weights.preprocess import default_preprocess


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
    assert sums["accuracy"] == (log_p.argmax(dim=1) == labels).sum()
    assert sums["count"] == 4
    assert loss.requires_grad
    assert not sums["loss"].requires_grad


def test_mixed_targets_are_smoothed_and_accuracy_counts_the_images_own_classes() -> None:
    model, labels = small_model(num_classes=3), torch.tensor([0, 1])
    preprocess = Preprocess(image_size=(32, 32))
    targets = torch.tensor([[0.7, 0.0, 0.3], [0.2, 0.8, 0.0]])
    examples = examples_of(labels, targets)
    images = preprocess.normalize(examples.images)
    loss, sums = Classify(preprocess, label_smoothing=0.3).loss(model, examples)
    logits = model(images)
    smoothed = 0.7 * targets + 0.1
    torch.testing.assert_close(loss, -(smoothed * F.log_softmax(logits, dim=1)).sum(dim=1).mean())
    assert sums["accuracy"] == (logits.argmax(dim=1) == labels).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("mixed", [False, True])
def test_binary_cross_entropy_takes_every_class_of_a_mixed_image_as_present(
    smoothing: float, mixed: bool
) -> None:
    model, labels = small_model(num_classes=3), torch.tensor([0, 1])
    preprocess = Preprocess(image_size=(32, 32))
    targets = torch.tensor([[0.7, 0.0, 0.3], [0.0, 1.0, 0.0]]) if mixed else labels
    present = torch.tensor([[1.0, 0.0, float(mixed)], [0.0, 1.0, 0.0]])
    examples = examples_of(labels, targets)
    p = model(preprocess.normalize(examples.images)).sigmoid()
    task = Classify(preprocess, label_smoothing=smoothing, criterion="bce")
    loss, sums = task.loss(model, examples)
    target = present * (1 - smoothing) + smoothing / 3
    torch.testing.assert_close(loss, -(target * p.log() + (1 - target) * (1 - p).log()).mean())
    assert sums["accuracy"] == (p.argmax(dim=1) == labels).sum()


# Class weights


WEIGHTS = torch.tensor([0.5, 1.5, 3.0])


@pytest.mark.parametrize("mixed", [False, True])
def test_an_images_loss_is_weighted_by_its_targets_before_smoothing(mixed: bool) -> None:
    model, labels = small_model(num_classes=3), torch.tensor([0, 2, 1, 0])
    targets = F.one_hot(labels, 3) * 0.7 + F.one_hot(labels.flip(0), 3) * 0.3 if mixed else labels
    preprocess, batch = Preprocess(image_size=(32, 32)), examples_of(labels, targets)
    log_p = model(preprocess.normalize(batch.images)).log_softmax(dim=1)
    loss, sums = Classify(preprocess, 0.3, class_weights=WEIGHTS).loss(model, batch)
    total = 0.0
    for row in range(4):
        target = targets[row] if mixed else F.one_hot(labels[row], 3)
        weight = sum(float(target[k] * WEIGHTS[k]) for k in range(3))
        total += weight * float(-((target * 0.7 + 0.1) * log_p[row]).sum())
    assert loss.item() == pytest.approx(total / 4, rel=1e-5)
    assert float(sums["loss"]) == pytest.approx(total, rel=1e-5)
    ones = Classify(preprocess, 0.3, class_weights=torch.ones(3))
    even, plain = (
        task.loss(model, examples_of(labels, targets))[0] for task in (ones, Classify(preprocess, 0.3))
    )
    torch.testing.assert_close(even, plain)


def test_balanced_weights_are_those_of_scikit_learn_with_the_mean_one() -> None:
    labels = np.repeat([0, 1, 2, 3], [500, 100, 30, 1])
    images = ImageSet("train", range(631), ClassIndices(labels, ("a", "b", "c", "d")))
    weights = balanced_weights(images)
    theirs = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    np.testing.assert_allclose(weights, theirs, rtol=1e-6)
    assert float(weights[labels].mean()) == pytest.approx(1, rel=1e-6)


def test_balanced_weights_need_images_of_every_class() -> None:
    images = ImageSet("train", range(3), ClassIndices(np.array([0, 2, 2]), ("a", "b", "c", "d")))
    with pytest.raises(UserError) as rejected:
        balanced_weights(images)
    assert str(rejected.value) == (
        "2 of 4 classes have no image in train: b, d; class_weights=balanced needs images of every class: "
        "add some, or leave the option out"
    )


# Distillation


K = 5
OURS = Preprocess(image_size=(32, 32), mean=(0.2, 0.5, 0.6), std=(0.3, 0.2, 0.4))
THEIRS = Preprocess(image_size=(32, 32), mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3))


def student(seed: int = 0, **options) -> VisionTransformer:
    return small_model(seed, distillation_token=True, **options)


def teacher(preprocess: Preprocess = THEIRS) -> Teacher:
    model = small_model(seed=7, in_channels=preprocess.channels).requires_grad_(False)
    return Teacher(name="the teacher", model=with_preprocess(model, preprocess))


def distill(label_smoothing: float = 0.0, **options) -> Distill:
    return Distill(
        options=Distillation(**options), preprocess=OURS, teacher=teacher(), label_smoothing=label_smoothing
    )


def examples(count: int = 6, mixed: bool = False) -> Examples:
    labels = torch.arange(count) % K
    targets = F.one_hot(labels, K) * 0.7 + F.one_hot(labels.flip(0), K) * 0.3 if mixed else labels
    return Examples(
        images=random_images(count, 3, 32, 32).sigmoid(),
        labels=labels,
        targets=targets,
        indices=np.arange(count),
        seed=0,
        epoch=0,
    )


@torch.no_grad()
def answers(task: Distill, model: VisionTransformer, batch: Examples) -> tuple[Tensor, Tensor, Tensor]:
    """Class head, distillation head and teacher, each (B, K) in float64, computed one by one."""
    pooled = model.embed(
        (batch.images - torch.tensor(OURS.mean).view(3, 1, 1)) / torch.tensor(OURS.std).view(3, 1, 1)
    )
    class_token, distillation_token = pooled[:, :16], pooled[:, 16:]
    seen = (batch.images - torch.tensor(THEIRS.mean).view(3, 1, 1)) / torch.tensor(THEIRS.std).view(3, 1, 1)
    by_label, by_teacher = model.head.linear(class_token), model.head.distillation(distillation_token)
    return by_label.double(), by_teacher.double(), task.teacher.model(seen).double()


@pytest.mark.parametrize("mixed", [False, True])
def test_hard_distillation_is_equation_3(mixed: bool) -> None:
    task, model, batch = distill(distill="hard", label_smoothing=0.2), student(), examples(mixed=mixed)
    loss, _ = task.loss(task.module(model), batch)
    by_label, by_teacher, taught = answers(task, model, batch)
    total = 0.0
    for row in range(6):
        targets = F.one_hot(batch.targets, K)[row] if not mixed else batch.targets[row]
        smoothed = targets.double() * 0.8 + 0.2 / K
        decision = int(taught[row].argmax())  # never smoothed
        from_label = -(smoothed * by_label[row].log_softmax(0)).sum()
        from_teacher = -by_teacher[row].log_softmax(0)[decision]
        total += float(0.5 * from_label + 0.5 * from_teacher) / 6
    assert loss.item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_class_weights_weigh_both_terms_of_distillation(kind: str) -> None:
    """The same as drawing each image as often as its weight states."""
    model, batch = student(), examples()
    weights = torch.tensor([1.0, 2.0, 0.0, 3.0, 1.0])
    task = distill(distill=kind, label_smoothing=0.1)
    weighted, _ = dataclasses.replace(task, class_weights=weights).loss(task.module(model), batch)
    total = 0.0
    for row, label in enumerate(batch.labels.tolist()):
        names = ("images", "labels", "targets", "indices")
        alone = dataclasses.replace(batch, **{name: getattr(batch, name)[row : row + 1] for name in names})
        total += float(weights[label] * task.loss(task.module(model), alone)[0])
    assert weighted.item() == pytest.approx(total / 6, rel=1e-5)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_soft_distillation_is_equation_2(tau: float) -> None:
    task, model, batch = distill(distill="soft", temperature=tau, distill_weight=0.1), student(), examples()
    loss, _ = task.loss(task.module(model), batch)
    by_label, by_teacher, taught = answers(task, model, batch)
    total = 0.0
    for row in range(6):
        p = [float(value) for value in (taught[row] / tau).softmax(0)]
        q = [float(value) for value in (by_teacher[row] / tau).softmax(0)]
        divergence = sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))
        from_label = -float(by_label[row].log_softmax(0)[batch.labels[row]])
        total += (0.9 * from_label + 0.1 * tau**2 * divergence) / 6
    assert loss.item() == pytest.approx(total, rel=1e-5)


def test_teacher_of_weight_one_makes_labels_irrelevant() -> None:
    model, batch = student(), examples()
    for kind in ("hard", "soft"):
        task = distill(distill=kind, distill_weight=1.0)
        model.zero_grad()
        task.loss(task.module(model), batch)[0].backward()
        assert not model.head.linear.weight.grad.any()
        assert model.head.distillation.weight.grad.any()


def test_sums_count_correct_mean_predictions_and_agreement_with_the_teacher() -> None:
    task, model, batch = distill(), student(), examples()
    loss, sums = task.loss(task.module(model), batch)
    _, by_teacher, taught = answers(task, model, batch)
    assert sums.keys() == {"loss", "accuracy", "count", "agree"}
    torch.testing.assert_close(sums["loss"], loss.detach() * 6)
    predictions = model(OURS.normalize(batch.images)).argmax(1)
    assert sums["accuracy"] == (predictions == batch.labels).sum()
    assert sums["agree"] == (by_teacher.argmax(1) == taught.argmax(1)).sum()
    assert sums["count"] == 6
    assert not any(value.requires_grad for value in sums.values())


def test_accuracy_is_of_the_mean_of_both_heads() -> None:
    """Each head alone prefers another class."""

    class Torn(nn.Module):
        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            right, *wrong = (F.one_hot((batch.labels + step) % K, K) for step in range(3))
            return 2.0 * right + 3.0 * wrong[0], 2.0 * right + 3.0 * wrong[1]

    batch = examples()
    assert distill().loss(Torn(), batch)[1]["accuracy"] == 6


def test_losses_are_computed_in_float32_under_autocast() -> None:
    task, model, batch = distill(distill="soft"), student(), examples()
    exact, _ = task.loss(task.module(model), batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, sums = task.loss(task.module(model), batch)
    assert rounded.dtype == sums["loss"].dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)


def test_student_without_a_distillation_token_is_rejected() -> None:
    with pytest.raises(UserError, match="needs a distillation token"):
        distill().module(small_model())
    with pytest.raises(UserError, match="needs a distillation token"):
        distill().module(small_model(distillation_token=True, head="none"))


def test_teacher_with_other_channels_is_rejected() -> None:
    colour, grey = THEIRS, Preprocess(image_size=(32, 32), channels=1, mean=(0.5,), std=(0.5,))
    for theirs, ours, message in (
        (grey, colour, r"1 channel \(grey\), the student of 3 channels \(colour\)"),
        (colour, grey, r"3 channels \(colour\), the student of 1 channel \(grey\)"),
    ):
        with pytest.raises(UserError, match=f"teacher the teacher takes images of {message}"):
            Distill(options=Distillation(), preprocess=ours, teacher=teacher(theirs))


@pytest.fixture
def loader(tmp_path: Path) -> Loader:
    root = write_folder(tmp_path / "data", per_class=5, side=32)
    (root / "dark" / "000.png").unlink()  # four of one class, five of the other
    return Loader(read_tree(root), default_preprocess(student().config), batch_size=3)


def test_validation_measures_the_mean_of_both_heads_and_restores_the_mode(loader: Loader) -> None:
    task, model = distill(), student(num_classes=2)
    module = task.module(model).train()
    assert task.validate(module, loader, torch.float32) == Classify(OURS).validate(
        model, loader, torch.float32
    )
    assert module.training
    assert model.training
    task.validate(module.eval(), loader, torch.float32)
    assert not model.training


# Several classes per image


SETS = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])


def several(**options: object) -> Classify:
    return Classify(Preprocess(image_size=(32, 32)), criterion="bce", several=True, **options)


def test_the_loss_of_several_classes_is_binary_and_an_image_is_right_with_all_of_them() -> None:
    model = small_model(num_classes=3)
    examples = examples_of(SETS, SETS)
    images = Preprocess(image_size=(32, 32)).normalize(examples.images)
    loss, sums = several().loss(model, examples)
    logits = model(images)
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


@pytest.mark.parametrize("distill", ["hard", "soft"])
def test_a_teacher_of_several_classes_teaches_each_of_them(distill: str) -> None:
    class Taught(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return taught

    student = small_model(num_classes=3, distillation_token=True)
    taught = torch.tensor([[2.0, -1.0, 0.5], [-3.0, 0.1, 4.0], [1.0, 1.0, -1.0]])
    preprocess = Preprocess(image_size=(32, 32))
    teacher = Teacher(name="the teacher", model=with_preprocess(Taught(), preprocess))
    options = Distillation(distill=distill, distill_weight=1.0, temperature=2.0)
    task = Distill(preprocess, 0.1, "bce", None, True, options=options, teacher=teacher)
    module = task.module(student)
    examples = examples_of(SETS, SETS)
    loss, sums = task.loss(module, examples)
    _, by_teacher = module(preprocess.normalize(examples.images))
    if distill == "hard":
        wanted = F.binary_cross_entropy_with_logits(by_teacher, (taught > 0).float())
    else:
        p, q = (taught / 2).sigmoid(), (by_teacher / 2).sigmoid()
        wanted = 4 * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    torch.testing.assert_close(loss, wanted)
    assert sums["agree"] == ((by_teacher > 0) == (taught > 0)).all(dim=1).sum()


def test_the_best_weights_have_the_highest_map_or_the_lowest_loss() -> None:
    assert several().monitor.better(0.5, 0.4)
    assert not several().monitor.better(float("nan"), several().monitor.worst)
    assert Classify(Preprocess(image_size=(32, 32))).monitor.better(0.4, 0.5)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"pool": "mean", "num_registers": 2},
    {"pool": "cls_mean", "head": "mlp"},
    {"pool": "map"},
    {"pool": "mean", "pool_norm": "after"},
    {"pool": "cls", "distillation_token": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_head_alone_has_the_names_and_the_logits_of_the_model(options: dict[str, Any]) -> None:
    model = small_model(**options).eval()
    module, size = HeadAlone(model).eval(), model.config.image_hw
    assert list(module.state_dict()) == list(model.state_dict())
    assert all(mine is theirs for mine, theirs in zip(module.parameters(), model.parameters(), strict=True))
    images = torch.rand(3, model.config.in_channels, *size)
    with torch.no_grad():
        torch.testing.assert_close(module(model.embed(images)), model(images))


def test_head_alone_has_the_names_and_the_logits_of_a_resnet() -> None:
    model = ResNet(ResNetConfig(image_size=16, layers=(1, 1), width=8, num_classes=3)).eval()
    torch.nn.init.normal_(model.head.weight)
    module, images = HeadAlone(model), torch.rand(2, 3, 16, 16)
    assert list(module.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(module(model.embed(images)), model(images))
