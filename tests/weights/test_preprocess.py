"""The preprocessing of a model."""

import pytest

from tests.model import small_model
from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.weights.preprocess import preprocess_of


def test_a_model_without_preprocessing_is_rejected() -> None:
    model = small_model()
    model.preprocess = None
    with pytest.raises(UserError, match=r"set model\.preprocess = vitascope\.Preprocess\("):
        preprocess_of(model)


def test_the_preprocessing_of_a_model_is_its_own() -> None:
    model = small_model()
    model.preprocess = Preprocess(image_size=(48, 48), resize="squash")
    assert preprocess_of(model) is model.preprocess
