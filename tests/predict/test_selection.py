"""The classes that are predicted: the most probable ones, or those above their thresholds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model import labelling_model, law, small_model
from vitascope.errors import UserError
from vitascope.predict.engine import TorchEngine
from vitascope.predict.selection import TOP_K, ClassSelection

PROBABILITIES = torch.tensor([[0.2, 0.9, 0.4, 0.6], [0.1, 0.2, 0.3, 0.5], [0.0, 0.0, 0.0, 0.0]])


@pytest.fixture(scope="module")
def several() -> TorchEngine:
    return engine((0.5, 0.95, 0.3, 0.6))


def engine(thresholds: tuple[float, ...] = ()) -> TorchEngine:
    return TorchEngine(labelling_model(0.1, 0.2, 0.3, 0.4, thresholds=thresholds), device="cpu")


def indices(selection: ClassSelection, engine: TorchEngine) -> list[list[int]]:
    return [[index for index, _ in row] for row in selection.of(engine, PROBABILITIES)]


def test_classes_that_reach_their_own_threshold_are_predicted_most_probable_first(
    several: TorchEngine,
) -> None:
    assert indices(ClassSelection(), several) == [[3, 2], [2], []]
    assert indices(ClassSelection(top_k=1), several) == [[3], [2], []]
    assert indices(ClassSelection(), engine()) == [[1, 3], [3], []]


@law
@given(st.floats(0, 1), st.none() | st.integers(1, 6))
def test_one_threshold_replaces_those_of_all_classes(threshold: float, top_k: int | None) -> None:
    for row, found in zip(
        PROBABILITIES, ClassSelection(top_k, threshold).of(_ENGINE, PROBABILITIES), strict=True
    ):
        scores = [score for _, score in found]
        assert scores == sorted(scores, reverse=True) == [float(row[index]) for index, _ in found]
        applies = int((row >= threshold).sum())
        assert len(found) == (applies if top_k is None else min(applies, top_k))


_ENGINE = engine()


def test_model_of_one_class_predicts_the_most_probable_ones() -> None:
    one = TorchEngine(small_model(num_classes=4), device="cpu")
    assert indices(ClassSelection(), one)[0] == [1, 3, 2, 0]
    assert indices(ClassSelection(top_k=2), one)[0] == [1, 3]
    assert ClassSelection().limit(one) == TOP_K
    with pytest.raises(UserError, match="a threshold is for models that predict any number of classes"):
        ClassSelection(threshold=0.5).check(one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k must be at least 1, not 0"),
        ({"threshold": 1.5}, "threshold is a probability from 0 to 1, not 1.5"),
        ({"threshold": float("nan")}, "threshold is a probability from 0 to 1, not nan"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ClassSelection(**options)
