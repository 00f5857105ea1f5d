"""Pairs of classes: together and confused."""

from itertools import combinations, permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.model import law
from vitascope.run.label_pairs import ClassPair, pairs_confused, pairs_together


@law
@given(N=st.integers(1, 30), K=st.integers(1, 6), seed=st.integers(0, 10**6), count=st.integers(1, 40))
def test_pairs_are_counted_and_the_most_frequent_come_first(N: int, K: int, seed: int, count: int) -> None:
    labels, answers = np.random.default_rng(seed).random((2, N, K)) < 0.4
    together = {(i, j): int((labels[:, i] & labels[:, j]).sum()) for i, j in combinations(range(K), 2)}
    missed, wrong = labels & ~answers, ~labels & answers
    confused = {(i, j): int((missed[:, i] & wrong[:, j]).sum()) for i, j in permutations(range(K), 2)}
    for found, counts in (
        (pairs_together(labels, count), together),
        (pairs_confused(labels, answers, count), confused),
    ):
        ranked = sorted((-number, pair) for pair, number in counts.items() if number)
        assert found == [ClassPair(*pair, -number) for number, pair in ranked[:count]]
