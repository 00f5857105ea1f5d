"""Figures from a model and pictures: content, names and rejected requests."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.analysis.explain.figures import texts
from tests.analysis.explain.test_inputs import PICTURES, model_with_preprocess
from tests.data import noise
from tests.models import labelling_model, small_model, with_preprocess
from vitascope import explain
from vitascope.analysis.explain import plots
from vitascope.analysis.explain.figures import draw
from vitascope.analysis.explain.inputs import as_images
from vitascope.analysis.explain.methods import METHODS
from vitascope.analysis.explain.pictures import Picture, overlay
from vitascope.errors import UserError
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer


def test_heatmap_is_drawn_over_the_photograph_and_not_over_the_models_few_pixels() -> None:
    model = model_with_preprocess()
    photo = noise(120, 200)
    figure = draw(model, photo, "rollout")
    left, right = (np.asarray(axes.images[0].get_array()) for axes in figure.axes)
    np.testing.assert_array_equal(left[:, 40:160], photo[:, 40:160])  # the model's square
    assert (np.ptp(left[:, :39], axis=-1) == 0).all()  # the rest is grey
    whole = Picture(photo, (40, 0, 160, 120)).enlarged()
    heat = explain.rollout(model, photo)[0].numpy()
    np.testing.assert_array_equal(right, overlay(whole, heat))
    assert "attention rollout" in figure.get_label()


def test_picture_of_the_models_size_keeps_its_visible_pixels() -> None:
    figure = draw(model_with_preprocess(), PICTURES[1], "rollout")
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), PICTURES[1])


def blind_model() -> VisionTransformer:
    """A model whose prediction does not depend on the picture."""
    model = model_with_preprocess(class_names=("cat", "dog", "owl", "elk", "emu"))
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.arange(5.0))
    return model


def test_heatmap_without_evidence_says_so_in_the_figure() -> None:
    model = blind_model()
    assert "no evidence for emu at\nthis layer" in texts(draw(model, PICTURES[0], "grad-cam"))
    assert "no evidence for dog" in texts(draw(model, PICTURES[0], "integrated-gradients", "dog"))
    written = texts(draw(model, PICTURES[0], "all"))
    about_a_class = [method for method in METHODS.values() if method.has_target]
    assert written.count("no evidence for emu") == len(about_a_class)
    assert "no evidence" not in texts(draw(model, PICTURES[0], "rollout"))
    (axes,) = draw(model, PICTURES, "grad-cam").axes
    assert [text.get_text() for text in axes.texts] == ["emu 64%\nno evidence"] * 2


def test_pictures_that_a_figure_does_not_show_are_not_kept_in_their_own_resolution(monkeypatch) -> None:
    monkeypatch.delattr(Preprocess, "framed")
    assert draw(model_with_preprocess(), PICTURES, "distance").axes


def test_framed_patch_lies_in_the_models_part_of_the_photograph() -> None:
    figure = draw(model_with_preprocess(), noise(120, 200), "patch", patch=(1, 3))
    (frame,) = figure.axes[0].patches
    assert frame.get_xy() == pytest.approx((40 + 3 * 30 - 0.5, 30 - 0.5))
    assert (frame.get_width(), frame.get_height()) == (30, 30)


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
    guesses = [str(int(model(as_images(model, each)).argmax())) for each in PICTURES]
    figure = draw(model, PICTURES, "attention", truths=[guesses[0], "dog"])
    first, second = (text.get_text() for text in figure.axes[0].texts)
    assert first.startswith(f"{guesses[0]} ")
    assert "is dog" not in first
    assert second.startswith(f"{guesses[1]} ")
    assert second.endswith("\nis dog")


def labelling(*probabilities: float, **options: Any) -> VisionTransformer:
    """A model of several classes per picture with these probabilities for every picture."""
    return with_preprocess(
        labelling_model(*probabilities, class_names=("cat", "dog", "owl"), **options),
        model_with_preprocess().preprocess,
    )


def test_captions_have_all_classes_that_reach_their_thresholds() -> None:
    model = labelling(0.3, 0.9, 0.6, thresholds=(0.2, 0.5, 0.7))
    figure = draw(model, PICTURES, "attention", truths=[["dog", "cat"], []])
    assert [text.get_text() for text in figure.axes[0].texts] == ["cat; dog", "cat; dog\nis none"]
    right, wrong = (text.get_color() for text in figure.axes[0].texts)
    assert (right, wrong) == (plots.RIGHT, plots.WRONG)
    figure = draw(labelling(0.3, 0.4, 0.1), PICTURES, "attention", truths=[["dog", "cat"], []])
    assert [text.get_text() for text in figure.axes[0].texts] == ["none\nis cat; dog", "none"]


def test_truth_whose_name_cannot_be_printed_as_it_is_equals_the_prediction() -> None:
    names = ("a\tcat", "dog", "owl" * 40)
    model = with_preprocess(
        labelling_model(0.9, 0.8, 0.7, class_names=names), model_with_preprocess().preprocess
    )
    caption = draw(model, PICTURES[:1], "attention", truths=[names]).axes[0].texts[0]
    assert caption.get_color() == plots.RIGHT
    assert caption.get_text().startswith("a cat; dog; owlowl")


def test_title_names_the_explained_class_of_several() -> None:
    model = labelling(0.6, 0.9, 0.1)
    method = "integrated gradients"
    for target, title in (
        (None, f"cat (60%), dog (90%): {method} of dog"),
        ("owl", f"cat (60%), dog (90%): {method} of owl"),
    ):
        assert draw(model, PICTURES[0], target=target).get_label().lower() == title.lower()
    assert draw(model, PICTURES[0], "all").get_label().endswith(": every method of dog")
    assert draw(model, PICTURES).get_label().endswith(" of the most probable class over 2 pictures")
    assert draw(model, PICTURES[0], "rollout").get_label() == "cat (60%), dog (90%): attention rollout"
    assert (
        draw(labelling(0.3, 0.4, 0.1), PICTURES[0], "rollout").get_label().startswith("none of the classes: ")
    )


def test_unreadable_pictures_of_several_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        figure = draw(model_with_preprocess(), [b"text", *PICTURES], "attention")
    assert figure.get_label() == "attention over 2 pictures"
    assert [record.getMessage().startswith("left out: ") for record in caplog.records] == [True]
    with pytest.raises(UserError, match="not a picture"):
        draw(model_with_preprocess(), b"text", "attention")


def test_invalid_figure_requests_are_rejected() -> None:
    for arguments, message in (
        ({"method": "guess"}, "unknown method 'guess'"),
        ({"method": "heads"}, "heads is of one picture: not 0"),
        ({"method": "rollout"}, "rollout is of one picture or more: not 0"),
        ({"method": "heads", "pictures": PICTURES}, "heads is of one picture: not 2"),
        ({"method": "filters", "pictures": PICTURES}, "filters is of the model alone: leave out the"),
        ({"method": "features", "pictures": PICTURES, "head": 0}, "head does not apply to features"),
        ({"method": "filters", "target": 1}, "target does not apply to filters"),
    ):
        with pytest.raises(UserError, match=message):
            draw(model_with_preprocess(), **arguments)


def test_saved_figure_keeps_its_resolution(tmp_path: Path) -> None:
    figure = draw(small_model(), method="filters")
    figure.savefig(tmp_path / "filters.png")
    plots.save_figure(figure, tmp_path / "same.png")
    with Image.open(tmp_path / "filters.png") as expected, Image.open(tmp_path / "same.png") as saved:
        assert saved.info["dpi"] == expected.info["dpi"]
        assert saved.convert("RGB").tobytes() == expected.convert("RGB").tobytes()
    assert torch.is_grad_enabled()
