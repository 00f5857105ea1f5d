"""The promises of a kind of labels, checked on one example of labels.

What is stored, counted, lost and measured is computed once more: by loops over the names of classes, by
torch's losses and their gradients, and by scikit-learn's measures.
"""

from __future__ import annotations

import json

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from torch import Tensor

from vitascope.data.targets import Targets, targets_from_json


def check_target(targets: Targets, random: np.random.Generator) -> None:
    """Check every promise of a kind of labels, on these."""
    check_stored(targets)
    check_counts(targets)
    logits = random.normal(size=(len(targets), len(targets.class_names)))
    check_losses(targets, logits)
    if targets.counts.any():
        ties = logits.round()
        for values in (logits, ties):
            check_measures(targets, targets.probabilities(values), random)


def check_stored(targets: Targets) -> None:
    """Names, JSON, subsets and another order of the classes keep the labels, and what is unknown of them."""
    N, names = len(targets), targets.class_names
    assert targets_from_json(json.loads(json.dumps(targets.to_json())), names) == targets or not N
    first, rest = np.split(np.arange(N), [N // 3])
    assert targets.take(first).joined(targets.take(rest)) == targets
    assert targets.take(np.arange(N)[::-1]).names() == targets.names()[::-1]
    assert targets.merged() == targets
    assert targets.in_classes(names[::-1]).in_classes(names) == targets
    assert set(targets.in_classes(names[::-1]).class_names) == set(names)
    if not targets.partial:
        assert targets.of_names(targets.names(), names) == targets
        pairs = np.triu_indices(N)
        differ = [set(targets.names()[i]) != set(targets.names()[j]) for i, j in zip(*pairs, strict=True)]
        assert targets.differ(*pairs).tolist() == differ


def check_counts(targets: Targets) -> None:
    """Images by class are those whose names have it; the weights of balance make the classes count alike."""
    images = [[i for i, row in enumerate(targets.names()) if name in row] for name in targets.class_names]
    assert [places.tolist() for places in targets.by_class()] == images
    assert targets.counts.tolist() == list(map(len, images))
    assert [np.flatnonzero(column).tolist() for column in targets.members.T] == images
    assert np.array_equal(targets.membership(targets.labels), targets.members)
    assert targets.decisions == (len(targets) if targets.exclusive else targets.known.sum())
    assert targets.partial == bool((targets.rows < 0).any())
    if targets.exclusive and (targets.counts > 0).all():
        weight = targets.balanced_weights * targets.counts
        np.testing.assert_allclose(weight, len(targets) / len(targets.class_names))
    elif (targets.counts > 0).all():  # the images with a class count as those that are known to be without
        np.testing.assert_allclose(targets.balanced_weights * targets.counts, targets.known - targets.counts)


def loss_of(targets: Targets, logits: Tensor) -> Tensor:
    """The loss of all images by torch."""
    if targets.exclusive:
        return F.cross_entropy(logits, torch.from_numpy(targets.labels), reduction="sum")
    return F.binary_cross_entropy_with_logits(
        logits, torch.from_numpy(targets.members).double(), reduction="sum"
    )


def check_losses(targets: Targets, logits: np.ndarray) -> None:
    """Probabilities and logits are inverses; losses and slopes are those of torch, without the unknown."""
    probabilities = targets.probabilities(logits)
    again = targets.probabilities(targets.logits(probabilities))
    np.testing.assert_allclose(again, probabilities, atol=1e-9)
    np.testing.assert_allclose(
        targets.sharpened(probabilities, 2.0), targets.probabilities(2 * logits), atol=1e-9
    )
    leaf = torch.from_numpy(logits).requires_grad_()
    expected = loss_of(targets, leaf)
    (slope,) = torch.autograd.grad(expected, leaf)
    np.testing.assert_allclose(targets.total_loss(targets.members, logits), expected.item(), atol=1e-9)
    loss, slopes = targets.loss_and_slope(logits, targets.members.astype(np.float64))
    np.testing.assert_allclose(loss, expected.item(), atol=1e-9)
    np.testing.assert_allclose(slopes, slope.numpy(), atol=1e-9)
    shares = targets.shares(torch.from_numpy(targets.rows))
    known = ~shares.isnan()
    assert np.array_equal(shares.nan_to_num().numpy(), targets.members)
    assert known.sum(0).tolist() == targets.known.tolist()
    if targets.decisions:
        cells = torch.from_numpy(np.where(targets.members, -logits, logits))
        mean = expected / targets.decisions if targets.exclusive else F.softplus(cells)[known].mean()
        np.testing.assert_allclose(
            targets.cross_entropy(torch.from_numpy(logits), targets), mean.item(), rtol=1e-6
        )


def check_measures(targets: Targets, probabilities: np.ndarray, random: np.random.Generator) -> None:
    """The measure is scikit-learn's, of samples too; the labels themselves have the best one."""
    N, rows = len(targets), targets.rows
    answers = targets.answers(probabilities)
    if targets.exclusive:
        expected = np.mean([row.argmax() == label for row, label in zip(probabilities, rows, strict=True)])
        counts = np.zeros((len(targets.class_names),) * 2, np.int64)
        np.add.at(counts, (rows, answers), 1)
        assert np.array_equal(targets.confusion(answers), counts)
        own = probabilities[np.arange(N), rows][:, None]
    else:
        columns = [(column >= 0, column) for column in rows.T if (column > 0).any()]
        scores = [
            average_precision_score(column[known], values[known])
            for (known, column), values in zip(columns, probabilities.T[targets.counts > 0], strict=True)
        ]
        expected = np.mean(scores)
        own = np.where(rows > 0, probabilities, 1 - probabilities)
    quality = targets.quality(probabilities)
    np.testing.assert_allclose(quality, expected)
    value, low, high = targets.score(probabilities).value_and_limits
    assert value == quality
    assert low <= value <= high
    np.testing.assert_allclose(targets.self_confidence(probabilities), own)
    assert targets.quality(targets.members.astype(np.float64)) == 1
    assert targets.correct(targets.labels).all()
    right = [np.array_equal(answer, label) for answer, label in zip(answers, targets.labels, strict=True)]
    assert targets.correct(answers).tolist() == right
    columns = targets.columns(answers, probabilities)
    assert columns["correct"].tolist() == right
    assert {len(column) for column in columns.values()} == {N}
    sample = random.integers(0, N, N)
    weights = np.stack([np.ones(N), np.bincount(sample, minlength=N)], axis=1).astype(np.int32)
    qualities = targets.weighted_qualities(probabilities, weights)
    np.testing.assert_allclose(qualities[0], quality)
    if (drawn := targets.take(sample)).counts.any():
        np.testing.assert_allclose(qualities[1], drawn.quality(probabilities[sample]))
    assert targets.difference(probabilities, probabilities).value == 0
