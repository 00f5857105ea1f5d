"""The evidence for one map, on a model that is linear in its image, and against `compare`."""

import numpy as np
import pytest
import torch

from tests.analysis.explain.faithfulness.test_compare import LinearModel, evidence_map
from tests.analysis.explain.figures import texts
from tests.analysis.explain.test_inputs import PICTURES, model_with_preprocess
from tests.models import random_images
from vitascope import explain
from vitascope.analysis.explain.targets import ClassScore, FeatureCosine
from vitascope.errors import UserError

ONE = ClassScore(torch.tensor([1]))


def test_true_map_is_beaten_by_no_random_one_and_its_reverse_by_all() -> None:
    model = LinearModel()
    image = model.images(1)
    heat = evidence_map(model, image, ONE)
    for maps in (9, 19):
        assert explain.evidence(model, image, heat, 1, maps=maps).p == pytest.approx(1 / (maps + 1))
        assert explain.evidence(model, image, -heat, 1, maps=maps).p == 1


def test_curve_is_that_of_deletion() -> None:
    model = LinearModel()
    image = model.images(1)
    measured = explain.evidence(model, image, evidence_map(model, image, ONE), 1, steps=16, maps=2)
    there = np.sort(model.evidence(image[0]))[::-1]
    np.testing.assert_allclose(measured.curve, 0.5 + there.sum() - np.cumsum([0, *there]), atol=1e-6)
    np.testing.assert_allclose(measured.shares, np.arange(17) / 16)
    same = explain.compare(model, image, {"true": evidence_map}, target=1, steps=16, shares=(0.3,))
    assert measured.merit == pytest.approx(same.scores["true"].merit[0], abs=1e-3)  # the noise of ROAD
    assert measured.random.shape == (2, 17)
    assert np.ptp(measured.random[:, [0, -1]], axis=0) == pytest.approx(0, abs=1e-6)


def test_p_values_of_maps_that_know_nothing_are_uniform() -> None:
    """At most a share a of them is at most a, but for chance: 40 maps, half of them at 0.5."""
    model = LinearModel()
    image, rng = model.images(1), np.random.default_rng(3)
    values = np.array(
        [
            explain.evidence(model, image, rng.normal(size=(4, 4)), 1, maps=19, steps=4, seed=seed).p
            for seed in range(40)
        ]
    )
    assert abs((values <= 0.5).sum() - 20) < 4 * (40 / 4) ** 0.5
    assert (values <= 0.05).sum() < 9


def test_figure_has_the_curve_beside_the_map_and_the_p_value_in_its_title() -> None:
    figure = explain.draw(model_with_preprocess(), PICTURES[0], "rollout", evidence=True)
    assert "attention rollout, p = " in figure.get_label()
    assert "against 99 random maps" in figure.get_label()
    assert "cells deleted, hottest first (%)" in texts(figure)
    assert len(explain.draw(model_with_preprocess(), PICTURES[0], "rollout").axes) == len(figure.axes) - 1


def test_invalid_requests_are_rejected() -> None:
    for change, message in (
        ({"image": random_images(2, 3, 32, 32)}, "measured on one image, not 2"),
        ({"heatmap": torch.ones(1, 4, 5)}, r"finite values \(1, 4, 4\), and this one is \(1, 4, 5\)"),
        ({"heatmap": torch.full((4, 4), torch.nan)}, "finite values"),
        ({"target": FeatureCosine(torch.ones(1, 16))}, "not a FeatureCosine"),
        ({"maps": 0}, "maps must be at least 1, not 0"),
    ):
        asked = {"image": random_images(1, 3, 32, 32), "heatmap": torch.ones(4, 4)} | change
        with pytest.raises(UserError, match=message):
            explain.evidence(LinearModel(), **asked)
    for pictures, method, message in (
        (PICTURES, "rollout", "not 2"),
        (PICTURES[0], "heads", "heads is none"),
    ):
        with pytest.raises(UserError, match=message):
            explain.draw(model_with_preprocess(), pictures, method, evidence=True)
