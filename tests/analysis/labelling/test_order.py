"""`order`: laws of the order in which pictures are offered for labels."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from tests.models import law
from vitascope.analysis.labelling.order import (
    EVERY,
    FEW,
    NextPicture,
    doubts,
    judging,
    next_pictures,
    random_keys,
    typical,
)

Array = npt.NDArray[Any]


def features_of(count: int, seed: int = 0, width: int = 8) -> Array:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def separated(counts: list[int], seed: int = 0) -> tuple[Array, Array]:
    """Clusters of these sizes around orthogonal directions, mixed, and the cluster of each picture."""
    generator = np.random.default_rng(seed)
    clusters = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    noise = generator.normal(scale=0.02, size=(len(clusters), len(counts) + 2))
    return (10 * np.eye(len(counts), len(counts) + 2)[clusters] + noise).astype(np.float32), clusters


def indices(pictures: list[NextPicture]) -> list[int]:
    return [picture.index for picture in pictures]


@given(
    st.sampled_from([0, 1, 2, 16, 40]), st.integers(0, 50), st.integers(0, 99), st.sampled_from([1, 3, 40])
)
@law
def test_each_group_without_a_label_is_offered_once(
    count: int, wanted: int, seed: int, of_groups: int
) -> None:
    generator = np.random.default_rng(seed)
    groups, labelled = generator.integers(0, of_groups, count), generator.random(count) < 0.1
    found = next_pictures(features_of(count, seed), wanted, labelled=labelled, labels=FEW - 7, groups=groups)
    left = set(groups.tolist()) - set(groups[labelled].tolist())
    assert len(found) == min(wanted, len(left))  # all that is left where more are wanted
    chosen = groups[indices(found)].tolist()
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= left
    for picture in found:
        alike = np.flatnonzero(groups == groups[picture.index]).tolist()
        assert sorted([picture.index, *picture.copies]) == alike


@given(st.integers(1, 60), st.integers(0, 99))
@law
def test_order_of_the_rows_does_not_matter(count: int, seed: int) -> None:
    generator, features = np.random.default_rng(seed), features_of(count, seed)
    mixed, labelled = generator.permutation(count), generator.random(count) < 0.2
    first = next_pictures(features, 9, labelled=labelled, labels=FEW - 5)
    second = next_pictures(features[mixed], 9, labelled=labelled[mixed], labels=FEW - 5)
    assert indices(first) == mixed[indices(second)].tolist()
    assert [picture.reason for picture in first] == [picture.reason for picture in second]


def test_pictures_begin_a_longer_order() -> None:
    features = features_of(40)
    longest = indices(next_pictures(features, 40))
    assert sorted(longest) == list(range(40))
    for count in (0, 1, 7, 16):
        assert indices(next_pictures(features, count)) == longest[:count]


def test_separated_clusters_give_a_picture_each_the_largest_first() -> None:
    sizes = [30, 26, 21, 17, 14, 11, 8, 5, 3, 1]
    features, clusters = separated(sizes)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    by_hand = KMeans(len(sizes), n_init=10, random_state=0).fit(unit)
    found = next_pictures(features, len(sizes))
    assert clusters[indices(found)].tolist() == list(range(10))
    assert set(indices(found)) == set(by_hand.transform(unit).argmin(axis=0).tolist())
    assert found[0].reason == "typical of 30 pictures"
    assert found[-1].reason == "typical of 1 picture"
    labelled = np.isin(np.arange(len(unit)), indices(found)[:3])  # one of each of the three largest
    assert set(range(3, 10)) <= set(
        clusters[indices(next_pictures(features, 10, labelled=labelled))].tolist()
    )


def test_equal_pictures_are_all_offered_and_copies_once() -> None:
    features = np.ones((16, 4), np.float32)
    assert sorted(indices(next_pictures(features, 20))) == list(range(16))
    (only,) = next_pictures(features, 20, groups=np.zeros(16, np.int64))
    assert len(only.copies) == 15
    assert sorted(typical(np.zeros((3, 4), np.float32), 5).tolist()) == [0, 1, 2]


def test_pictures_are_random_once_there_are_labels() -> None:
    features = features_of(80)
    few, many = next_pictures(features, 80), next_pictures(features, 80, labels=FEW)
    assert [picture.reason for picture in few].count("at random") == 80 - FEW
    assert {picture.reason for picture in many} == {"at random"}
    assert indices(many) == indices(next_pictures(features, 80, labels=FEW))
    assert indices(many) != indices(next_pictures(features, 80, labels=FEW, seed=1))
    labelled = np.arange(80) < FEW - 3
    assert [picture.reason for picture in next_pictures(features, 5, labelled=labelled)][3:] == [
        "at random"
    ] * 2


def test_unsure_pictures_come_first_and_are_not_all_alike() -> None:
    features, clusters = separated([4, 20, 20])
    margins = np.full(44, 0.9)
    margins[17] = 0.0
    found = next_pictures(features, 3, labels=FEW, margins=margins)
    assert (found[0].index, found[0].reason) == (17, "unsure")
    margins = np.array([0.1, 0.2, 0.3])[clusters]  # a batch of two has only one of the four least sure ones
    assert clusters[indices(next_pictures(features, 2, labels=FEW, margins=margins))].tolist() == [0, 1]
    assert sorted(indices(next_pictures(features, 99, labels=FEW, margins=margins))) == list(range(44))
    assert next_pictures(features[:0], 3, labels=FEW, margins=margins[:0]) == []


def test_judges_are_the_first_of_a_random_third_up_to_one_without_a_look() -> None:
    keys, groups = EVERY * np.array([3, 1, 2, 9, 0]), np.arange(5)
    keys[3] += 1  # never judges
    for looked, judges, next_ones in (
        ([], [], [4, 1, 2, 0]),
        ([4, 1, 0], [4, 1], [2]),
        ([1, 2, 0, 3], [], [4]),
        ([0, 1, 2, 4], [0, 1, 2, 4], []),
    ):
        pool, mask, waiting = judging(keys, groups, np.isin(np.arange(5), looked))
        assert np.flatnonzero(pool).tolist() == [0, 1, 2, 4]
        assert set(np.flatnonzero(mask)) == set(judges)
        assert [n for n in waiting.tolist() if n not in looked] == [n for n in next_ones if n not in looked]


def test_all_judge_if_all_have_been_looked_at() -> None:
    keys = random_keys(features_of(20))
    assert judging(keys, np.arange(20), np.ones(20, np.bool_))[1].all()
    assert 0 < judging(keys, np.arange(20), np.arange(20) > 0)[0].sum() < 20


def test_one_of_near_copies_judges() -> None:
    keys, groups = EVERY * np.array([2, 1, 3, 0]), np.array([0, 1, 1, 0])
    keys[2] += 1  # follows its copy
    pool, mask, waiting = judging(
        keys, groups, np.array([True, False, False, False])
    )  # a copy of the first, 3
    assert pool.all()
    assert np.flatnonzero(mask).tolist() == [0]
    assert waiting.tolist() == [1]
    assert judging(keys, groups, np.ones(4, np.bool_))[1].sum() == 2


def test_judges_are_a_fair_sample_however_the_others_were_chosen() -> None:
    shares, N = [], 300
    for seed in range(200):
        draw = np.random.default_rng(seed)
        hard = draw.random(N) < 0.3
        looked = hard & (draw.random(N) < 0.4)  # chosen: hard ones only
        keys = random_keys(draw.normal(size=(N, 2)))
        for _ in range(30):
            looked[judging(keys, np.arange(N), looked)[2][0]] = True
        judges = judging(keys, np.arange(N), looked)[1]
        assert judges.sum() >= 30
        shares.append(hard[judges].mean() - hard.mean())
    assert abs(np.mean(shares)) < 4 * np.std(shares) / np.sqrt(len(shares))
    assert hard[looked].mean() > 0.5  # all labelled ones are no fair sample


def test_doubts_name_the_two_most_probable_classes() -> None:
    words = doubts(np.array([[0.1, 0.7, 0.2], [0.5, 0.5, 0.0]]), ["a", "b", "c"])
    assert words == ["b or c, 70% to 20%", "a or b, 50% to 50%"]
