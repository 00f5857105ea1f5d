"""Balanced epochs: every class equally often, every image of a class too, shards still read forward."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.model import law
from vitascope.data.formats.shards import GROUP, ShardMembers
from vitascope.data.sampling import balanced_order
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices


def images_of(labels: np.ndarray, K: int) -> ImageSet:
    return ImageSet("train", range(len(labels)), ClassIndices(labels, tuple(map(str, range(K)))))


@law
@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_classes_and_the_images_of_each_class_are_equally_often_in_an_epoch(counts, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    N, K = len(labels), len(counts)
    order = balanced_order(images_of(labels, K), np.arange(N), seed, epoch=3)
    assert len(order) == len(set(order.tolist())) == N  # repetitions have numbers of their own
    places = np.bincount(labels[order % N], minlength=K)
    assert places.max() - places.min() <= 1
    often = np.bincount(order % N, minlength=N)
    for label in range(K):
        of_class = often[labels == label]
        assert of_class.max() - of_class.min() <= 1
    for image in range(N):
        assert sorted(order[order % N == image] // N) == list(range(often[image]))


def test_places_that_do_not_divide_evenly_go_to_every_class_in_turn() -> None:
    """Five places for three classes."""
    images = images_of(np.array([0, 1, 2, 0, 0]), 3)
    among = np.arange(5)
    totals = sum(
        np.bincount(images.labels[balanced_order(images, among, 0, epoch) % 5], minlength=3)
        for epoch in range(600)
    )
    np.testing.assert_allclose(totals / 600, 5 / 3, atol=0.1)


def test_every_image_of_a_large_class_comes_in_some_epoch_and_orders_differ() -> None:
    images = images_of(np.repeat([0, 1], [90, 10]), 2)
    orders = [balanced_order(images, np.arange(100), 0, epoch) for epoch in range(20)]
    assert set(np.concatenate(orders) % 100) == set(range(100))
    assert all((one != other).any() for one, other in itertools.pairwise(orders))
    np.testing.assert_array_equal(orders[7], balanced_order(images, np.arange(100), 0, 7))
    assert (orders[7] != balanced_order(images, np.arange(100), 1, 7)).any()


def test_only_the_given_images_are_drawn() -> None:
    images = images_of(np.repeat([0, 1], [90, 10]), 2)
    among = np.array([3, 5, 6, 80, 95, 97])
    order = balanced_order(images, among, 0, 0)
    assert len(order) == 6
    assert set(order % 100) <= set(among)
    assert np.bincount(images.labels[order % 100]).tolist() == [3, 3]


def test_shards_are_read_forward_a_few_at_a_time() -> None:
    shards, N = np.repeat(np.arange(12, dtype=np.int32), 10), 120
    members = ShardMembers(
        tuple(map(str, range(12))), shards, np.arange(N), np.ones(N, np.int64), np.full(N, b"a")
    )
    labels = (np.arange(N) % 10 == 0).astype(np.int64)  # one image of the small class in each shard
    order = balanced_order(ImageSet("train", members, ClassIndices(labels, ("a", "b"))), np.arange(N), 0, 0)
    read = shards[order % N]
    last = {shard: max(np.flatnonzero(read == shard)) for shard in set(read)}
    first = {shard: min(np.flatnonzero(read == shard)) for shard in set(read)}
    for place in range(N):
        assert sum(first[shard] <= place <= last[shard] for shard in first) <= GROUP
    assert np.bincount(labels[order % N]).tolist() == [60, 60]
