import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from sklearn.covariance import ledoit_wolf
from torch import Tensor

from tests.models import small_model, with_trust
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError
from vitascope.models.trust import PER_CLASS, Familiarity, PredictionSets, Trust, nearest_class, ranked
from vitascope.training.evaluation.calibrate import cross_fitted, trust_of
from vitascope.training.evaluation.calibration import Temperature, class_gaussians, familiarity_of


def answers(count: int, classes: int, seed: int, each: int | None = None) -> tuple[Tensor, Tensor]:
    """Probabilities that are true, and the classes drawn by them; `each` as many of every class."""
    random = torch.Generator().manual_seed(seed)
    draws = count if each is None else 20 * each * classes
    probabilities = (1.5 * torch.randn(draws, classes, generator=random)).softmax(dim=1)
    labels = torch.multinomial(probabilities, 1, generator=random)[:, 0]
    if each is None:
        return probabilities, labels
    rows = torch.cat([(labels == k).nonzero()[:each, 0] for k in range(classes)])
    return probabilities[rows], labels[rows]


@pytest.mark.parametrize("each", [None, PER_CLASS])
def test_sets_hold_the_right_class_at_the_asked_rate(each: int | None) -> None:
    held: dict[float, list[list[Tensor]]] = {0.9: [], 0.95: []}
    for seed in range(200):
        sets = PredictionSets.fitted(*answers(300, 3, 2 * seed, each))
        probabilities, labels = answers(1000, 3, 2 * seed + 1)
        for coverage, shares in held.items():
            hits = sets.contain(probabilities, coverage)[torch.arange(len(labels)), labels].float()
            shares.append([hits[labels == k].mean() for k in range(3)] if each else [hits.mean()])
    for coverage, shares in held.items():
        np.testing.assert_allclose(np.mean(shares, axis=0), coverage, atol=0.01)


def by_definition(masses: list[float], probabilities: list[float], coverage: float) -> set[int]:
    limit = sorted(masses)[int(np.ceil((len(masses) + 1) * coverage)) - 1]
    order = sorted(range(len(probabilities)), key=lambda k: (-probabilities[k], k))
    return {k for place, k in enumerate(order) if sum(probabilities[j] for j in order[:place]) <= limit}


def test_a_set_has_the_classes_whose_mass_before_them_is_below_a_quantile() -> None:
    probabilities, labels = (values[:40] for values in answers(40, 4, 0))
    masses = [
        sum(p for j, p in enumerate(row) if p > row[label])
        for row, label in zip(probabilities.double().tolist(), labels.tolist(), strict=True)
    ]
    sets = PredictionSets.fitted(probabilities, labels)
    fresh, _ = answers(50, 4, 1)
    contained = sets.contain(fresh, 0.8)
    assert contained is not None
    for row, members in zip(fresh.double().tolist(), contained, strict=True):
        assert set(members.nonzero()[:, 0].tolist()) == by_definition(masses, row, 0.8)


def test_the_most_probable_class_is_in_every_set_and_of_equal_ones_the_first() -> None:
    right = torch.eye(2)[torch.zeros(30, dtype=torch.long)]
    sets = PredictionSets.fitted(right, torch.zeros(30, dtype=torch.long))  # every answer is sure and right
    contained = sets.contain(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), 0.9)
    assert contained is not None
    assert contained.tolist() == [[True, False], [False, True]]


def test_too_few_images_have_no_sets_and_their_number_is_the_least_that_has() -> None:
    for coverage in (0.5, 0.8, 0.9, 0.95, 0.99):
        needed = PredictionSets.needed(coverage)
        enough, few = (PredictionSets.fitted(*answers(n, 3, 0)) for n in (needed, needed - 1))
        assert enough.limits(coverage) is not None
        assert few.contain(torch.ones(1, 3) / 3, coverage) is None if needed > 1 else True


@pytest.mark.parametrize("rate", [0.0, 1.0, float("nan"), -1.0])
def test_a_coverage_is_a_share(rate: float) -> None:
    with pytest.raises(UserError, match=r"coverage must be in \(0, 1\)"):
        PredictionSets.fitted(*answers(30, 2, 0)).limits(rate)


def test_masses_that_are_left_out_never_lower_a_limit() -> None:
    probabilities, labels = answers(997, 4, 0)
    every, some = (PredictionSets.fitted(probabilities[:380], labels[:380], most) for most in (10_000, 90))
    for coverage in np.linspace(0.05, 0.98, 30):
        exact, kept = every.limits(coverage), some.limits(coverage)
        assert exact is not None
        assert kept is not None
        assert kept >= exact
        assert (every.masses < kept).float().mean() <= coverage + 2 / 90


@pytest.mark.parametrize("each", [None, PER_CLASS])
def test_sets_are_the_same_after_json_and_after_a_file_of_tensors(each: int | None) -> None:
    sets = PredictionSets.fitted(*answers(300, 3, 0, each))
    trust = Trust(temperature=1.5, sets=sets, familiarity=gaussian_familiarity()[0])
    restored = Trust.of_tensors(trust.tensors(), 3, 5)
    for other in (PredictionSets.of_json(sets.to_json()), restored.sets):
        torch.testing.assert_close(other.limits(0.9), sets.limits(0.9), rtol=0, atol=0)
    pictures = torch.randn(9, 5)
    assert restored.familiarity is not None
    assert trust.familiarity is not None
    assert restored.temperature == 1.5
    assert torch.equal(restored.familiarity(pictures), trust.familiarity(pictures))


INF, NAN, whole = torch.full((30,), torch.inf), torch.full((30,), torch.nan), torch.long
BROKEN: dict[str, tuple[Tensor | None, ...]] = {
    "projection": (torch.zeros(4, 5), torch.zeros(5, 5, dtype=torch.float16)),
    "means": (torch.zeros(2, 3), torch.zeros(0, 5), None),
    "center": (NAN[:5], torch.zeros(1, 5)),
    "levels": (
        *(torch.zeros(0), torch.tensor(1.0), torch.zeros(1), torch.zeros(300)),
        *(torch.arange(300.0), torch.arange(300, 0, -1)),
    ),
    "images": (torch.tensor(3.0),),
    "counts": (torch.tensor(0), torch.zeros(7, dtype=whole), torch.tensor(30.0)),
    "masses": (torch.zeros(0), INF, NAN, torch.arange(30, 0, -1.0), None),
    "temperature": (torch.tensor(0.0), torch.ones(2)),
    "more": (torch.ones(2),),
}


@pytest.mark.parametrize("name", BROKEN)
def test_numbers_of_another_model_and_broken_ones_are_rejected(name: str) -> None:
    sets = PredictionSets.fitted(*answers(30, 3, 0))
    tensors = Trust(temperature=1.0, sets=sets, familiarity=gaussian_familiarity()[0]).tensors()
    Trust.of_tensors(tensors, 3, 5)
    others = {key: value for key, value in tensors.items() if key != name}
    for value in BROKEN[name]:
        with pytest.raises(UserError):
            Trust.of_tensors(others if value is None else {**others, name: value}, 3, 5)


def gaussian_pictures(count: int, seed: int) -> tuple[Tensor, np.ndarray]:
    """Features of three classes (N, 5), far from 0 as features are."""
    random = np.random.default_rng(seed)
    labels = random.integers(3, size=count)
    scales = np.array([3.0, 1.0, 0.3, 1.0, 0.1])
    features = 10 + 4 * np.eye(3, 5)[labels] + scales * random.standard_normal((count, 5))
    return torch.from_numpy(features).float(), labels


def gaussian_familiarity(images: int = 300) -> tuple[Familiarity, dict[str, Tensor]]:
    gaussians = class_gaussians(*gaussian_pictures(500, 0))
    held_out, _ = gaussian_pictures(images, 1)
    return familiarity_of(gaussians, nearest_class(held_out, **gaussians)), gaussians


def test_distances_are_those_of_mahalanobis_to_the_nearest_class() -> None:
    features, labels = gaussian_pictures(400, 0)
    wide = features.double().numpy()
    means = np.stack([wide[labels == k].mean(axis=0) for k in range(3)])
    inverse = np.linalg.inv(ledoit_wolf(wide - means[labels], assume_centered=True)[0])
    pictures, _ = gaussian_pictures(20, 2)
    wanted = [min(mahalanobis(x, mean, inverse) ** 2 for mean in means) for x in pictures.double().numpy()]
    found = nearest_class(pictures, **class_gaussians(features, labels))
    torch.testing.assert_close(found, torch.tensor(wanted).float(), rtol=1e-3, atol=1e-3)


def test_as_many_pictures_like_the_training_images_are_unfamiliar_as_are_asked_for() -> None:
    familiarity, _ = gaussian_familiarity(2000)
    shares = familiarity(gaussian_pictures(4000, 3)[0])
    for rate in (0.05, 0.2, 0.5):
        assert float((shares < rate).float().mean()) == pytest.approx(rate, abs=0.03)


def test_features_that_do_not_differ_tell_nothing_about_familiarity() -> None:
    features, labels = torch.ones(150, 5), np.arange(150) % 3
    targets, shares = ClassIndices(labels, ("a", "b", "c")), np.full((150, 3), 1 / 3, np.float32)
    temperature = Temperature.of(targets, np.zeros((150, 3)))
    trust = trust_of(temperature, shares, labels, cross_fitted(features, labels, np.arange(150) % 2))
    assert trust.familiarity is None
    assert trust.lacks() == ["no familiarity: the features of the validation images do not differ"]


def test_familiarity_falls_with_the_distance_and_has_no_steps() -> None:
    familiarity, _ = gaussian_familiarity()
    steps = torch.linspace(0.1, 30, 40_000)[:, None] * torch.eye(5)[4]
    away = 10 + 4 * torch.eye(5)[:1] + steps  # from the mean of a class
    shares = familiarity(away)
    assert (shares.diff() <= 1e-6).all()
    assert shares[-1] == pytest.approx(1 / 301)  # less familiar than all of 300
    assert shares.diff().abs().max() < 0.02
    assert float(familiarity(torch.full((1, 5), 10.0) + 4 * torch.eye(3, 5)[:1])) > 0.95


def test_a_resized_model_knows_nothing_about_its_answers() -> None:
    model = with_trust(small_model())
    assert model.trust is not None
    model.resize(48)
    assert model.trust is None


def test_levels_are_kept_at_even_ranks() -> None:
    values = torch.randperm(10_007).float()
    kept = ranked(values, 100)
    assert len(kept) == 100
    assert kept[-1] == 10_006
    np.testing.assert_allclose(np.diff(kept), 100, atol=1.01)
    assert torch.equal(ranked(values[:50], 100), values[:50].sort().values)
