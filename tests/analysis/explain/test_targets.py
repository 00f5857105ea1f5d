"""Targets of an explanation: classes, differences and similarity, and invalid targets."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import random_images, small_config, small_model, small_resnet
from vitascope.analysis.explain.inputs import pooled_and_logits
from vitascope.analysis.explain.targets import (
    ClassDifference,
    ClassScore,
    FeatureCosine,
    Target,
    TargetLike,
    as_target,
    class_index,
)
from vitascope.errors import UserError

NAMES = ("cat", "dog", "tiger", "horse", "bird")
NAMED = small_config(class_names=NAMES)
PLAIN = small_config()
POOLED = random_images(3, 16, seed=3)
LOGITS = torch.tensor([[0.0, 1, 2, 3, 9], [5, 4, 8, 2, 1], [7, 6, 5, 4, 3]])
"""Predicted: 4, 2, 0."""


def scores(target: TargetLike) -> list[float]:
    return as_target(target, NAMED, LOGITS).score(POOLED, LOGITS).tolist()


ONE, EACH = [1, 4, 6], [0, 4, 5]


@pytest.mark.parametrize(
    ("expected", "targets"),
    [
        ([9, 8, 7], [None]),
        (ONE, [1, "dog", [1], torch.tensor(1), torch.tensor([1]), np.int64(1)]),
        (ONE, [ClassScore(torch.tensor([1], dtype=dtype)) for dtype in (torch.int64, torch.int32)]),
        ([3, 2, 4], ["3"]),
        (EACH, [[0, 1, 2], ["cat", "dog", "tiger"], ("cat", 1, "tiger"), np.array([0, 1, 2]), range(3)]),
        (EACH, [torch.tensor([0, 1, 2], dtype=dtype) for dtype in (torch.int64, torch.uint8)]),
        (EACH, [ClassScore(torch.tensor([0, 1, 2]))]),
        ([9, -4, -4], [ClassDifference(torch.tensor([4]), torch.tensor([0]))]),
        ([8, 4, 1], [ClassDifference(torch.tensor([4, 2, 0]), torch.tensor([1]))]),
        ([-8, -4, -1], [ClassDifference(torch.tensor([1]), torch.tensor([4, 2, 0]))]),
    ],
)
def test_score_is_of_the_requested_classes(expected: list[float], targets: list[Any]) -> None:
    for target in targets:
        assert scores(target) == expected


def test_cosine_is_of_the_representations() -> None:
    features = random_images(3, 16, seed=4)
    pooled, others = POOLED.double().numpy(), features.double().numpy()
    lengths = np.linalg.norm(pooled, axis=1) * np.linalg.norm(others, axis=1)
    np.testing.assert_allclose(
        scores(FeatureCosine(features)), (pooled * others).sum(axis=1) / lengths, atol=1e-6
    )
    one = pooled @ others[0] / (np.linalg.norm(pooled, axis=1) * np.linalg.norm(others[0]))
    np.testing.assert_allclose(scores(FeatureCosine(features[:1])), one, atol=1e-6)


TARGETS: dict[str, Target] = {
    "class": ClassScore(torch.tensor([3])),
    "classes": ClassScore(torch.tensor([3, 1, 0])),
    "difference": ClassDifference(torch.tensor([3]), torch.tensor([1, 0, 2])),
    "differences": ClassDifference(torch.tensor([3, 1, 0]), torch.tensor([1, 0, 2])),
    "cosine": FeatureCosine(random_images(1, 16, seed=5)),
    "cosines": FeatureCosine(random_images(3, 16, seed=5)),
}
of_every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@of_every_target
@pytest.mark.parametrize("variants", [1, 4])
def test_target_of_one_image_scores_any_number_of_variants(target: Target, variants: int) -> None:
    together = target.score(POOLED, LOGITS)
    for image in range(3):
        rows = torch.full((variants,), image)
        alone = target.select(image).score(POOLED[rows], LOGITS[rows])
        torch.testing.assert_close(alone, together[image].expand(variants))


@of_every_target
def test_gradients_flow_to_the_inputs_of_the_score(target: Target) -> None:
    pooled, logits = POOLED.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    score = as_target(target, PLAIN, logits).score(pooled, logits)
    assert score.shape == (3,)
    read = torch.autograd.grad(score.sum(), pooled if isinstance(target, FeatureCosine) else logits)[0]
    assert (read.abs().sum(dim=1) > 0).all()  # in each image


@pytest.mark.parametrize("index", [5, -1, "5", 99])
def test_class_number_out_of_range_is_rejected_with_the_range(index: int | str) -> None:
    for target in (index, [0, index, 1]):
        with pytest.raises(UserError, match=rf"no class {index!r}; the model has 5, 0 to 4$"):
            as_target(target, PLAIN, LOGITS)
    with pytest.raises(UserError, match=r"the model has 5, 0 to 4: cat, dog, tiger, horse, bird$"):
        as_target(index, NAMED, LOGITS)
    valid, both = torch.tensor([0]), torch.tensor([0, int(index), 1])
    for target in (ClassScore(both), ClassDifference(both, valid), ClassDifference(valid, both)):
        with pytest.raises(UserError, match=rf"no class {int(index)}; the model has 5, 0 to 4"):
            as_target(target, PLAIN, LOGITS)


def test_unknown_class_name_is_rejected_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match="no class 'tigger'; nearest: tiger; the model has 5, 0 to 4: cat, dog"
    ):
        as_target("tigger", NAMED, LOGITS)
    with pytest.raises(UserError, match=r"no class 'cat'; the model has 5, 0 to 4$"):
        as_target("cat", PLAIN, LOGITS)


@pytest.mark.parametrize("known", ["caf\u00e9", "cafe\u0301"])
def test_class_name_is_found_in_either_unicode_form(known: str) -> None:
    config = small_config(num_classes=2, class_names=["dog", known])
    assert [class_index(name, config) for name in ("caf\u00e9", "cafe\u0301")] == [1, 1]


def test_many_names_are_not_all_listed() -> None:
    config = small_config(num_classes=12, class_names=[f"n{index}" for index in range(12)])
    with pytest.raises(UserError, match=r"0 to 11: n0, n1, .*, n9, \.\.\.$"):
        class_index("?", config)


def test_numeric_class_names_take_precedence_over_class_numbers() -> None:
    config = small_config(class_names=["4", "3", "2", "1", "0"])
    assert class_index("4", config) == 0
    assert class_index(4, config) == 4


def test_class_of_another_type_is_rejected() -> None:
    numbers = torch.tensor([0.0, 1.0, 2.0])
    for target in (*([label] for label in (1.5, True, None, [1], np.float32(2))), [[[0], [1], [2]]], numbers):
        with pytest.raises(UserError, match="a class is a whole number or a name, not "):
            as_target(target, PLAIN, LOGITS)
    with pytest.raises(UserError, match="a class is a whole number or a name, not "):
        as_target(ClassScore(numbers), PLAIN, LOGITS)


def test_number_and_shape_of_targets_must_be_those_of_the_images() -> None:
    cases: list[tuple[TargetLike, str]] = [
        ([0, 1], "2 classes for 3 images"),
        ([], "0 classes for 3 images"),
        (ClassScore(torch.tensor([0, 1])), "2 classes for 3 images"),
        (ClassDifference(torch.tensor([0, 1, 2]), torch.tensor([0, 1])), "2 versus for 3 images"),
        (FeatureCosine(torch.ones(2, 16)), "2 features for 3 images"),
        *((FeatureCosine(torch.ones(shape)), r"features \(B, 16\)") for shape in ((16,), (1, 9))),
    ]
    for target, message in cases:
        with pytest.raises(UserError, match=message):
            as_target(target, PLAIN, LOGITS)


def test_classes_of_a_model_without_a_head_are_rejected() -> None:
    targets = (None, 1, "cat", [0, 1, 2], TARGETS["class"], TARGETS["differences"])
    for head, target in itertools.product(("none", "pre_logits"), targets):
        with pytest.raises(UserError, match=r"explain a `FeatureCosine`"):
            as_target(target, small_config(head=head), LOGITS)


@pytest.mark.parametrize(
    "model", [small_model(dropout=0.5, drop_path=0.5), small_resnet()], ids=["vit", "resnet"]
)
def test_outputs_are_computed_in_evaluation_mode_without_gradients(model: Any) -> None:
    images = random_images(2, 3, 32, 32)
    expected = model.embed(images), model(images)
    model.train()
    for answer, wanted in zip(pooled_and_logits(model, images), expected, strict=True):
        torch.testing.assert_close(answer, wanted)
        assert not answer.requires_grad
    assert model.training


def test_long_class_number_is_rejected_in_a_short_line() -> None:
    for digits in (400, 5000):
        with pytest.raises(UserError, match="no class '999") as rejected:
            class_index("9" * digits, small_config())
        assert len(str(rejected.value)) < 400
