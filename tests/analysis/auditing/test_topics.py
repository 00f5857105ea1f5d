"""Foreign images are ranked first and listed, usual ones are not."""

import numpy as np
import pytest

from vitascope.analysis.auditing.topics import off_topic, off_topic_scores

RANDOM = np.random.default_rng(0)
CLASSES = RANDOM.normal(size=(600, 32)) + 3 * RANDOM.normal(size=(4, 32)).repeat(150, axis=0)


@pytest.mark.parametrize("count", [1, 8, 30])
def test_images_of_one_other_kind_are_listed(count: int) -> None:
    """Also thirty of one kind, which are near each other."""
    foreign = RANDOM.normal(size=(count, 32)) + 9 * RANDOM.normal(size=32)
    features = np.concatenate([CLASSES, foreign]).astype(np.float32)
    scores = off_topic_scores(features)
    assert scores.shape == (600 + count,)
    assert scores[600:].min() > scores[:600].max()
    findings = off_topic(scores)
    assert {finding.image for finding in findings} == set(np.flatnonzero(scores >= 0.5).tolist())
    assert {finding.image for finding in findings} >= set(range(600, 600 + count))
    assert len(findings) <= count + 3


def test_usual_images_are_not_listed() -> None:
    assert len(off_topic(off_topic_scores(CLASSES))) < 5


def test_fewer_images_than_features_are_equally_usual() -> None:
    """Otherwise those are nearer that the covariance is from."""
    assert len(off_topic(off_topic_scores(RANDOM.normal(size=(60, 300))))) <= 1


def test_equal_features_and_few_images_say_nothing() -> None:
    equal = np.ones((50, 8))
    for features in (equal, CLASSES[:3], CLASSES[:0]):
        assert off_topic_scores(features).tolist() == [0] * len(features)
    assert off_topic(np.zeros(50)) == []
    equal[7] = RANDOM.normal(size=8)
    assert [finding.image for finding in off_topic(off_topic_scores(equal))] == [7]
