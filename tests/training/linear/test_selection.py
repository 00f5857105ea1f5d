"""ProbeSelection uses only training images, and says what it measured."""

import numpy as np
import numpy.typing as npt
import pytest

from tests.analysis.probing.digits import DIGITS, PIXELS, PROPERTIES, drawn
from vitascope.data.average_precision import mean_average_precision, paired_difference
from vitascope.data.folds import Division
from vitascope.data.measures import drop_interval, mcnemar
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError
from vitascope.training.linear.classifiers import ClassMeans, LeastSquares, LogisticRegression, Neighbors
from vitascope.training.linear.selection import Candidate, ProbeSelection, out_of_fold, select

ORDER = drawn(0)
TRAIN, TEST = ORDER[:200], ORDER[200:500]
FAST = (Neighbors((1, 5)), LeastSquares((1.0, 100.0)), ClassMeans())


def candidates() -> list[Candidate]:
    return [
        Candidate("digits", "pixels", pooling, PIXELS[TRAIN][:, :D], PIXELS[TEST][:, :D])
        for pooling, D in (("half", 32), ("all", 64))
    ]


def selected(targets: ClassIndices | ClassSets, test: ClassIndices | ClassSets) -> ProbeSelection:
    return select(candidates(), Division.of(targets.take(TRAIN)), test, FAST)


@pytest.mark.parametrize("targets", [DIGITS, PROPERTIES], ids=["exclusive", "several"])
def test_test_labels_choose_nothing(targets: ClassIndices | ClassSets) -> None:
    truth = targets.take(TEST)
    one = selected(targets, truth)
    other = selected(targets, truth.take(np.random.default_rng(1).permutation(len(TEST))))
    for ours, theirs in zip(one.scores, other.scores, strict=True):
        assert ours.candidate.pooling == theirs.candidate.pooling
        assert ours.classifier == theirs.classifier
        assert ours.validated.value_and_limits == theirs.validated.value_and_limits
        assert np.array_equal(ours.probabilities, theirs.probabilities)
    assert one.best.tested.value_and_limits[0] > other.best.tested.value_and_limits[0] + 0.1


def test_the_best_is_first_and_every_candidate_has_every_classifier() -> None:
    found = selected(DIGITS, DIGITS.take(TEST))
    values = [score.validated.value_and_limits[0] for score in found.scores]
    assert values == sorted(values, reverse=True)
    assert found.best.candidate.pooling == "all"
    assert len({(each.candidate.pooling, each.classifier.name) for each in found.scores}) == 6


def test_the_setting_is_the_best_out_of_fold() -> None:
    found = selected(DIGITS, DIGITS.take(TEST))
    truth = DIGITS.take(TRAIN)
    for score in found.scores:
        (kind,) = (each for each in FAST if each.name == score.classifier.name)
        held_out = np.stack(list(out_of_fold(kind, score.candidate.train, truth, found.folds)))
        right = (held_out.argmax(axis=2) == truth.labels).mean(axis=1)
        assert score.classifier.settings[0] == kind.settings[int(right.argmax())]
        assert score.validated.value_and_limits[0] == pytest.approx(right.max())


def test_no_image_is_predicted_by_a_classifier_that_saw_it() -> None:
    """Noise is remembered by the nearest neighbour, but does not help on other images."""
    noise = np.random.default_rng(0).normal(size=(200, 8))
    folds = np.arange(200) % 5
    (held_out,) = out_of_fold(Neighbors((1,)), noise, DIGITS.take(TRAIN), folds)
    assert (held_out.argmax(axis=1) == DIGITS.labels[TRAIN]).mean() < 0.25


def test_differences_are_paired_by_image() -> None:
    found = selected(DIGITS, DIGITS.take(TEST))
    labels = DIGITS.labels[TEST]
    best = found.best.probabilities.argmax(axis=1) == labels
    for score in found.scores[1:]:
        own = score.probabilities.argmax(axis=1) == labels
        lost, won = int((best & ~own).sum()), int((own & ~best).sum())
        difference = found.difference(score)
        low, high = drop_interval(lost, won, len(TEST))
        assert difference.value == pytest.approx((won - lost) / len(TEST))
        assert (difference.low, difference.high) == pytest.approx((-high, -low))
        assert difference.p == mcnemar(lost, won)


def test_a_body_that_was_trained_on_the_training_images_is_doubted() -> None:
    """Its features of these images tell the labels; those of others do not."""
    truth = DIGITS.labels[TRAIN]
    known = np.concatenate([PIXELS[TRAIN], 100 * np.eye(10)[truth]], axis=1)
    unseen = np.concatenate([PIXELS[TEST], np.zeros((len(TEST), 10))], axis=1)
    parts = Division.of(DIGITS.take(TRAIN)), DIGITS.take(TEST)
    found = select([Candidate("body", "", "", known, unseen)], *parts, FAST)
    assert "worse on the test images" in found.doubt
    assert selected(DIGITS, DIGITS.take(TEST)).doubt == ""


def test_several_classes_are_chosen_by_map() -> None:
    found = selected(PROPERTIES, PROPERTIES.take(TEST))
    labels = PROPERTIES.labels[TEST]
    score = found.scores[-1]
    assert score.tested.value_and_limits[0] == pytest.approx(
        mean_average_precision(labels, score.probabilities)
    )
    assert found.difference(score) == paired_difference(labels, score.probabilities, found.best.probabilities)


def test_no_test_image_is_rejected() -> None:
    with pytest.raises(UserError, match="no test images"):
        select(candidates(), Division.of(DIGITS.take(TRAIN)), DIGITS.take(TEST[:0]))


def test_intervals_cover_the_accuracy_on_the_remaining_images() -> None:
    """A small version of benchmarks/results/2026-11-26-probe_coverage.md."""
    covered = []
    for seed in range(12):
        order = drawn(seed)
        train, test, rest = np.split(order, [150, 350])
        candidate = Candidate("digits", "", "", PIXELS[train], PIXELS[test])
        found = select([candidate], Division.of(DIGITS.take(train)), DIGITS.take(test), FAST, seed=seed)
        (probabilities,) = found.best.classifier.fit(PIXELS[train], DIGITS.take(train)).probabilities(
            PIXELS[rest]
        )
        _, low, high = found.best.tested.value_and_limits
        covered.append(low <= (probabilities.argmax(axis=1) == DIGITS.labels[rest]).mean() <= high)
    assert np.mean(covered) > 0.85


def test_settings_after_a_clear_fall_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One neighbour is best, all images are as bad as a constant answer."""
    tried = []
    measure = ClassIndices.quality

    def counted(targets: ClassIndices, probabilities: npt.NDArray[np.floating]) -> float:
        tried.append(measure(targets, probabilities))
        return tried[-1]

    monkeypatch.setattr(ClassIndices, "quality", counted)
    train, test = Division.of(DIGITS.take(TRAIN)), DIGITS.take(TEST)
    found = select(candidates()[1:], train, test, (Neighbors((1, 200, 2), temperature=100),))
    assert len(tried) == 2
    assert tried[1] < tried[0]
    assert found.best.name == "nearest neighbours, k = 1"


def test_regressions_are_selected_with_the_rough_path_and_fitted_exactly() -> None:
    found = select(
        candidates()[1:], Division.of(DIGITS.take(TRAIN)), DIGITS.take(TEST), (LogisticRegression(),)
    )
    assert found.best.classifier.tolerance == LogisticRegression().tolerance
