"""Figures from a model and pictures: content, names and rejected requests."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.explain.test_inputs import PICTURES, model_with_preprocess
from tests.model import small_model
from vitascope import explain
from vitascope.errors import UserError
from vitascope.explain import plots
from vitascope.explain.figures import VIEWS, draw


def test_heatmap_is_drawn_beside_its_picture() -> None:
    model = model_with_preprocess()
    figure = draw(model, PICTURES[0], "rollout")
    left, right = figure.axes
    assert model.preprocess is not None
    picture = plots.to_picture(model.preprocess.pixels(PICTURES[0]))
    np.testing.assert_array_equal(left.images[0].get_array(), picture)
    heat = explain.rollout(model, PICTURES[0])[0].numpy()
    np.testing.assert_array_equal(right.images[0].get_array(), plots.overlay(plots.enlarged(picture), heat))
    assert "attention rollout" in figure.get_label()


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        ({"method": "grad-cam", "target": 1, "layer": 0}, "Grad-CAM, layer 0 of 1 over 2 pictures"),
        ({"method": "rollout", "kind": "test image"}, "attention rollout over 2 test images"),
        ({"method": "features", "layer": 0}, "Similar features have similar colours: 2 pictures"),
        ({"method": "distance"}, "Mean attention distance over 2 pictures"),
    ],
)
def test_several_pictures_share_a_figure_with_a_title(arguments: dict[str, Any], title: str) -> None:
    assert draw(model_with_preprocess(), PICTURES, **arguments).get_label() == title


def test_grid_marks_predictions_that_differ_from_the_truth() -> None:
    model = model_with_preprocess()
    guesses = [str(int(model(explain.inputs.as_images(model, each)).argmax())) for each in PICTURES]
    figure = draw(model, PICTURES, "attention", truths=[guesses[0], "dog"])
    first, second = (text.get_text() for text in figure.axes[0].texts)
    assert first.startswith(f"{guesses[0]} ")
    assert "is dog" not in first
    assert second.startswith(f"{guesses[1]} ")
    assert second.endswith("\nis dog")


def test_unreadable_pictures_of_several_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        figure = draw(model_with_preprocess(), [b"text", *PICTURES], "attention")
    assert figure.get_label() == "attention over 2 pictures"
    assert [record.getMessage().startswith("left out: ") for record in caplog.records] == [True]
    with pytest.raises(UserError, match="not a picture"):
        draw(model_with_preprocess(), b"text", "attention")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "guess"}, "unknown method 'guess'"),
        ({"method": "heads"}, "heads explains pictures: give one$"),
        ({"method": "rollout"}, "rollout explains pictures: give one or more"),
        ({"method": "heads", "pictures": PICTURES}, "heads explains one picture, not 2"),
        ({"method": "filters", "pictures": PICTURES}, "filters shows the model alone"),
        ({"method": "features", "pictures": PICTURES, "head": 0}, "head does not apply to features"),
        ({"method": "filters", "target": 1}, "target does not apply to filters"),
    ],
)
def test_invalid_figure_requests_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        draw(model_with_preprocess(), **arguments)


def test_views_of_the_model_need_no_pictures_and_no_preprocessing() -> None:
    for name in (name for name, view in VIEWS.items() if view.takes == "nothing"):
        assert draw(small_model(), method=name).axes


def test_saved_figure_keeps_its_resolution(tmp_path: Path) -> None:
    figure = draw(small_model(), method="filters")
    figure.savefig(tmp_path / "filters.png")
    plots.save_figure(figure, tmp_path / "same.png")
    assert (tmp_path / "filters.png").read_bytes() == (tmp_path / "same.png").read_bytes()
    assert torch.is_grad_enabled()
