"""The preprocessing of a model: its own, or a default with a warning."""

import logging

import pytest

from tests.model import small_model
from vitascope.data.preprocess import Preprocess
from vitascope.weights.preprocess import default_preprocess, preprocess_of


def test_a_model_without_preprocessing_gets_the_default_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = small_model()
    model.preprocess = None
    with caplog.at_level(logging.WARNING):
        assert [preprocess_of(model) for _ in range(3)] == [default_preprocess(model.config)] * 3
    (message,) = caplog.messages
    height, width = model.config.image_hw
    assert f"centre crop of {height}x{width} pixels, mean 0.5 and std 0.5" in message
    assert "set model.preprocess" in message


def test_the_preprocessing_of_a_model_is_used_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    model.preprocess = Preprocess(image_size=(48, 48), resize="squash")
    assert preprocess_of(model) is model.preprocess
    assert not caplog.messages
