"""`order`: laws of the order in which pictures are offered for labels."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from tests.models import law
from vitascope.analysis.labelling import order as module
from vitascope.analysis.labelling.order import NextPicture, Opinion, next_pictures, typical

Array = npt.NDArray[Any]


def features_of(count: int, seed: int = 0, width: int = 8) -> Array:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def separated(counts: list[int], seed: int = 0) -> tuple[Array, Array]:
    """Clusters of these sizes around orthogonal directions, mixed, and the cluster of each picture."""
    generator = np.random.default_rng(seed)
    clusters = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    noise = generator.normal(scale=0.02, size=(len(clusters), len(counts) + 2))
    return (10 * np.eye(len(counts), len(counts) + 2)[clusters] + noise).astype(np.float32), clusters


def opinion_of(probabilities: Array, **options: Any) -> Opinion:
    return Opinion(probabilities, [f"class{k}" for k in range(probabilities.shape[1])], **options)


def indices(pictures: list[NextPicture]) -> list[int]:
    return [picture.index for picture in pictures]


def drawn_opinion(count: int, seed: int) -> Opinion:
    return opinion_of(np.random.default_rng(seed).dirichlet(np.ones(3), size=count))


@given(
    st.sampled_from([0, 1, 2, 16, 40]),
    st.integers(0, 50),
    st.integers(0, 99),
    st.booleans(),
    st.sampled_from([1, 3, 40]),
)
@law
def test_each_group_without_a_label_is_offered_once(
    count: int, wanted: int, seed: int, judged: bool, of_groups: int
) -> None:
    generator = np.random.default_rng(seed)
    groups, labelled = generator.integers(0, of_groups, count), generator.random(count) < 0.1
    found = next_pictures(
        features_of(count, seed),
        wanted,
        labelled=labelled,
        opinion=drawn_opinion(count, seed) if judged else None,
        groups=groups,
    )
    left = set(groups.tolist()) - set(groups[labelled].tolist())
    assert len(found) == min(wanted, len(left))  # all that is left where more are wanted
    chosen = groups[indices(found)].tolist()
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= left
    for picture in found:
        alike = np.flatnonzero(groups == groups[picture.index]).tolist()
        assert sorted([picture.index, *picture.copies]) == alike


@given(st.integers(1, 60), st.integers(0, 99), st.booleans())
@law
def test_order_of_the_rows_does_not_matter(count: int, seed: int, judged: bool) -> None:
    features, opinion = features_of(count, seed), drawn_opinion(count, seed)
    mixed = np.random.default_rng(seed + 1).permutation(count)
    other = opinion_of(opinion.probabilities[mixed])
    first = next_pictures(features, 7, opinion=opinion if judged else None)
    second = next_pictures(features[mixed], 7, opinion=other if judged else None)
    assert indices(first) == mixed[indices(second)].tolist()
    assert [picture.reason for picture in first] == [picture.reason for picture in second]


@pytest.mark.parametrize("centres", [5, 256])  # several rounds of k-means, and one
def test_typical_pictures_begin_a_longer_order(centres: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CENTRES", centres)
    features = features_of(40)
    longest = indices(next_pictures(features, 40))
    assert sorted(longest) == list(range(40))
    for count in (0, 1, 7, 16):
        assert indices(next_pictures(features, count)) == longest[:count]


@pytest.mark.parametrize("centres", [12, 256])
def test_separated_clusters_give_a_picture_each_the_largest_first(
    centres: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CENTRES", centres)
    features, clusters = separated([30, 20, 12, 6, 3])
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    by_hand = KMeans(5, n_init=10, random_state=0).fit_predict(unit)
    found = next_pictures(features, 5)
    assert clusters[indices(found)].tolist() == [0, 1, 2, 3, 4]
    assert sorted(by_hand[indices(found)].tolist()) == [0, 1, 2, 3, 4]
    reasons = [f"typical of {size} pictures" for size in (30, 20, 12, 6, 3)]
    assert [picture.reason for picture in found] == reasons
    seen = clusters == 0
    seen[np.flatnonzero(seen)[1:]] = False  # one picture of the largest cluster has a label
    more = next_pictures(features, 4, labelled=seen)
    assert clusters[indices(more)].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("judged", [False, True])
def test_equal_pictures_are_all_offered_and_copies_once(judged: bool) -> None:
    features = np.ones((16, 4), np.float32)
    opinion = opinion_of(np.full((16, 2), 0.5)) if judged else None
    assert sorted(indices(next_pictures(features, 20, opinion=opinion))) == list(range(16))
    assert len(next_pictures(features, 3, opinion=opinion)) == 3
    (only,) = next_pictures(features, 20, opinion=opinion, groups=np.zeros(16, np.int64))
    assert len(only.copies) == 15
    assert indices(next_pictures(features, 4, seed=0)) == indices(next_pictures(features, 4, seed=0))


def test_zeros_are_pictures_too() -> None:
    assert sorted(typical(np.zeros((3, 4), np.float32), 5).tolist()) == [0, 1, 2]


def test_unsure_pictures_come_first_and_are_not_all_alike() -> None:
    features, clusters = separated([4, 20, 20])
    sure = np.tile([0.98, 0.01, 0.01], (44, 1))
    sure[17] = [0.5, 0.5, 0.0]
    found = next_pictures(features, 3, opinion=opinion_of(sure))
    assert (found[0].index, found[0].reason) == (17, "class0 or class1, 50% to 50%")
    # The four of one cluster are the least sure, but a batch of two has one of them.
    for k, largest in enumerate((0.5, 0.6, 0.7)):
        sure[clusters == k] = [largest, 1 - largest, 0.0]
    found = next_pictures(features, 2, opinion=opinion_of(sure))
    assert clusters[indices(found)].tolist() == [0, 1]


def test_unfamiliar_pictures_are_as_worthwhile_as_undecided_ones() -> None:
    sure = np.tile([0.9, 0.1], (9, 1))
    opinion = opinion_of(sure, unfamiliar=np.arange(9) == 4)
    first = next_pictures(features_of(9), 2, opinion=opinion)[0]
    assert (first.index, first.reason) == (4, "unlike the training images")


def test_several_classes_are_compared_with_their_thresholds() -> None:
    opinion = opinion_of(np.array([[0.9, 0.1], [0.31, 0.1], [0.5, 0.5]]), thresholds=[0.3, 0.9])
    first = next_pictures(features_of(3), 3, opinion=opinion)[0]
    assert (first.index, first.reason) == (1, "class0, 31%, and it applies from 30% on")
    one_class = opinion_of(np.ones((3, 1)))
    assert {each.reason for each in next_pictures(features_of(3), 3, opinion=one_class)} == {"class0, 100%"}
