"""Deletion, insertion and ROAD on a model that is linear in its image, against closed forms."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models import random_images, small_config, small_model
from vitascope.analysis.explain.faithfulness import perturbation
from vitascope.analysis.explain.faithfulness.compare import RANDOM_MAPS, HeatmapFunction, compare
from vitascope.analysis.explain.faithfulness.perturbation import blur, impute
from vitascope.analysis.explain.faithfulness.results import Comparison, Scores
from vitascope.analysis.explain.heatmaps import cell_of_pixels
from vitascope.analysis.explain.targets import ClassDifference, FeatureCosine, Target
from vitascope.errors import UserError
from vitascope.explain import attention
from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer


class LinearModel(VisionTransformer):
    """The probability of class 1 is 1/2 + sum(w x), that of class 2 is 0: cells contribute independently."""

    def __init__(self, **options: Any) -> None:
        super().__init__(small_config(num_classes=3, **options))
        H, W = self.config.image_hw
        self.w = random_images(3, H, W, seed=7) / (3 * H * W)
        self.head = nn.Identity()
        self.seen: list[Tensor] = []

    def embed(self, images: Tensor) -> Tensor:
        self.seen.append(images)
        p = 0.5 + (images * self.w).sum(dim=(1, 2, 3))
        return torch.stack([1 - p, p, torch.full_like(p, 1e-30)], dim=1).log()

    def evidence(self, image: Tensor) -> np.ndarray:
        """The contribution of each cell of (C, H, W) to the probability of class 1: (N,)."""
        return np.bincount(self.cells().ravel(), (image * self.w).double().sum(dim=0).numpy().ravel())

    def cells(self) -> np.ndarray:
        rows, columns = cell_of_pixels(self.config.grid, self.config.image_hw)
        return (rows[:, None] * self.config.grid[1] + columns).numpy()

    def images(self, count: int, seed: int = 1) -> Tensor:
        strength = random_images(count, 1, *self.config.grid, seed=seed + 1) * 0.8
        cells = torch.from_numpy(self.cells())
        return strength.flatten(2)[:, :, cells] * (
            random_images(count, 3, *self.config.image_hw, seed=seed).abs() * self.w.sign()
        )


def evidence_map(model: VisionModel, images: Tensor, target: Target) -> Tensor:
    """The true contributions of a `LinearModel`, for class 1 or against it."""
    sign = 1 if int(target.classes) == 1 else -1
    return torch.from_numpy(sign * model.evidence(images[0])).reshape(1, *model.config.grid)


def reversed_map(model: VisionModel, images: Tensor, target: Target) -> Tensor:
    return -evidence_map(model, images, target)


def constant_map(model: VisionModel, images: Tensor, target: Target) -> Tensor:
    return torch.ones(1, *model.grid_of(images))


def attended(model: VisionModel, images: Tensor, target: Target) -> Tensor:
    return attention(model, images)


def measured(scores: Scores) -> np.ndarray:
    """All scores without the seconds: (4, n)."""
    return np.array([scores.deletion, scores.insertion, scores.lerf, scores.morf])


QUICK: dict[str, Any] = {"steps": 2, "shares": (0.5,)}

GRIDS: dict[str, dict[str, Any]] = {
    "square": {},
    "oblong": {"image_size": (16, 48)},
    "oblong patches": {"image_size": (24, 32), "patch_size": (12, 4)},
    "overlap": {"stem": "overlap", "stride": (8, 4)},
    "hybrid": {"stem": "resnet", "resnet_layers": (1, 2), "resnet_width": 4},
}


@pytest.mark.parametrize("options", GRIDS.values(), ids=GRIDS)
def test_scores_of_a_linear_model_equal_its_sums(options: dict[str, Any], monkeypatch) -> None:
    monkeypatch.setattr(perturbation, "NOISE", 0.0)
    model = LinearModel(**options)
    images, N = model.images(3), math.prod(model.config.grid)
    shares = (0.2, 0.6)
    found = compare(model, images, {"true": evidence_map}, target=1, steps=N, shares=shares)
    scores = found.scores["true"]
    for index, image in enumerate(images):
        there, in_blur = model.evidence(image), model.evidence(blur(image))
        order = np.argsort(-there)
        deletion = 0.5 + there.sum() - np.concatenate([[0], np.cumsum(there[order])])
        insertion = 0.5 + in_blur.sum() + np.concatenate([[0], np.cumsum((there - in_blur)[order])])
        assert scores.deletion[index] == pytest.approx((deletion[1:] + deletion[:-1]).mean() / 2, abs=1e-6)
        assert scores.insertion[index] == pytest.approx((insertion[1:] + insertion[:-1]).mean() / 2, abs=1e-6)
        for values, cells in ((scores.lerf, order[::-1]), (scores.morf, order)):
            imputed = [
                0.5 + model.evidence(impute(image, torch.from_numpy(np.isin(model.cells(), gone)))).sum()
                for gone in (cells[: round(share * N)] for share in shares)
            ]
            assert values[index] == pytest.approx(np.mean(imputed), abs=1e-6)


def test_truth_is_better_than_random_and_its_reverse_worse() -> None:
    model = LinearModel()
    methods: dict[str, Any] = {"constant": constant_map, "reversed": reversed_map, "true": evidence_map}
    found = compare(model, model.images(12), methods, steps=4, shares=(0.3, 0.7))
    assert found.best == "true"
    rows = {row.method: row for row in found.table()}
    for row, verdict in ((rows["true"], "better"), (rows["reversed"], "worse")):
        gains = (row.deletion.gain, row.insertion.gain, row.road.gain, row.gain)
        assert {gain.verdict for gain in gains} == {verdict}
    assert [row.method for row in found.table()] == ["true", "constant", "reversed", "random"]


def test_ties_are_broken_at_random_by_the_seed() -> None:
    model = LinearModel()
    images = model.images(4)

    def two_levels(model: VisionModel, images: Tensor, target: Target) -> Tensor:
        return evidence_map(model, images, target) > 0.01  # bool: 0 and 1

    methods: dict[str, Any] = {"levels": two_levels, "constant": constant_map, "true": evidence_map}
    first, same, other = (
        compare(model, images, methods, target=1, steps=8, shares=(0.5,), seed=seed) for seed in (0, 0, 1)
    )
    for name in methods:
        assert first.scores[name].deletion == same.scores[name].deletion
        equal = np.equal(first.scores[name].deletion, other.scores[name].deletion)
        assert equal.all() if name == "true" else not equal.any()


def test_random_baseline_is_the_mean_of_random_orders() -> None:
    """The mean over all orders of a linear model's curve is a straight line."""
    model = LinearModel()
    images = model.images(100)
    found = compare(model, images, {"constant": constant_map}, target=1, **QUICK)
    whole = np.array([0.5 + model.evidence(image).sum() for image in images])
    off = np.array(found.scores["random"].deletion) - (whole + 0.5) / 2
    one = np.array(found.scores["constant"].deletion) - (whole + 0.5) / 2  # ties make it one random order
    assert abs(off.mean()) < 4 * off.std() / 100**0.5
    assert off.std() / one.std() == pytest.approx(RANDOM_MAPS**-0.5, rel=0.25)


def test_numbers_depend_on_the_seed_alone() -> None:
    model = small_model()
    images = random_images(3, 3, 32, 32)

    def run(methods: dict[str, HeatmapFunction], **options: Any) -> Comparison:
        return compare(model, images, methods, **QUICK, **options)

    first = run({"attention": attended})
    same, wider = run({"attention": attended}), run({"constant": constant_map, "attention": attended})
    batches = [run({"attention": attended}, batch_size=size) for size in (1, 7)]
    for name in ("attention", "random"):
        assert np.array_equal(measured(same.scores[name]), measured(first.scores[name]))
        for other in (wider, *batches):
            np.testing.assert_allclose(measured(other.scores[name]), measured(first.scores[name]), atol=1e-5)
    other_seed = run({"attention": attended}, seed=1)
    assert not np.allclose(measured(other_seed.scores["random"]), measured(first.scores["random"]))
    noisy = measured(other_seed.scores["attention"]) - measured(first.scores["attention"])
    assert np.abs(noisy[:2]).max() < 1e-5  # no noise in deletion and insertion
    assert np.abs(noisy[2:]).min() > 0


def test_class_is_predicted_from_the_original_image() -> None:
    model = LinearModel()
    images = model.images(6)
    asked = []

    def method(model: VisionModel, images: Tensor, target: Target) -> Tensor:
        assert images.shape == (1, 3, 32, 32)
        asked.append(target.classes.tolist())
        return evidence_map(model, images, target)

    found = compare(model, images, {"method": method}, **QUICK)
    predicted = [int(model.evidence(image).sum() > 0) for image in images]
    assert asked == [[label] for label in predicted]
    assert list(found.classes) == predicted
    assert set(predicted) == {0, 1}
    of_one, of_zero = (
        compare(model, images, {"true": evidence_map}, target=label, **QUICK) for label in (1, 0)
    )
    for index, label in enumerate(predicted):
        expected = (of_one if label else of_zero).scores["true"].deletion[index]
        assert found.scores["method"].deletion[index] == pytest.approx(expected)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_no_more_variants_at_once_than_the_batch_size(size: int) -> None:
    model = LinearModel()
    images, calls = model.images(2), []
    compare(
        model,
        images,
        {"constant": constant_map},
        steps=4,
        shares=(0.5,),
        batch_size=size,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert max(len(batch) for batch in model.seen) <= size
    total = 2 * (3 + (1 + RANDOM_MAPS) * (2 * 3 + 2))
    assert sum(len(batch) for batch in model.seen) == total + 2  # each original image, for its class
    assert {of for _, of in calls} == {total}
    counts = [done for done, _ in calls]
    assert counts == sorted(set(counts))
    assert counts[-1] == total


@pytest.mark.parametrize("training", [False, True])
def test_model_is_measured_in_evaluation_mode_and_restored(training: bool) -> None:
    model = small_model(dropout=0.5, drop_path=0.5).train(training)
    images = random_images(2, 3, 32, 32)

    def method(model: VisionModel, images: Tensor, target: Target) -> Tensor:
        assert not model.training
        return attention(model, images)

    found = compare(model, images, {"attention": method}, **QUICK)
    assert all(part.training is training for part in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    again = compare(model.eval(), images, {"attention": method}, **QUICK)
    assert np.array_equal(measured(found.scores["attention"]), measured(again.scores["attention"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(0, 3, 32, 32)}, "no images"),
        ({"images": torch.zeros(1, 3, 32, 32, dtype=torch.uint8)}, "normalized floats"),
        ({"images": torch.full((1, 3, 32, 32), torch.nan)}, "logits are not finite"),
        ({"methods": {"random": constant_map}}, "names the baseline"),
        ({"methods": {"odd": lambda *_: torch.ones(1, 4, 5)}}, r"odd: .*\(1, 4, 4\), .* \(1, 4, 5\)"),
        ({"methods": {"odd": lambda *_: torch.ones(4, 4)}}, r"odd: .* \(4, 4\)"),
        ({"methods": {"odd": lambda *_: torch.full((1, 4, 4), torch.nan)}}, "odd: .* 16 values not finite"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"shares": (0.5, 1.0)}, r"shares must be in \(0, 1\)"),
        ({"seed": -1}, "at least 0, not -1"),
        ({"target": 5}, "no class 5"),
        ({"target": ClassDifference(torch.tensor([0]), torch.tensor([1]))}, "not a ClassDifference"),
        ({"target": FeatureCosine(torch.ones(1, 16))}, "not a FeatureCosine"),
        ({"model": small_model(head="none")}, "no head"),
        ({"model": small_model(patch_size=32)}, "32x32 images have one cell"),
    ],
)
def test_invalid_comparison_is_rejected(change: dict[str, Any], message: str) -> None:
    given = {"model": small_model(), "images": random_images(2, 3, 32, 32), "methods": {"flat": constant_map}}
    with pytest.raises(UserError, match=message):
        compare(**given | change)
