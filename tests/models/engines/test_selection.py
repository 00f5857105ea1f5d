"""The classes that are predicted: the most probable ones, or those above their thresholds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import labelling_model, law, small_model, with_trust
from vitascope.errors import UserError
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.selection import TOP_K, ClassSelection

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
        ({"threshold": 1.5}, r"threshold must be in \[0, 1\], not 1.5"),
        ({"threshold": float("nan")}, "threshold must be .*, not nan"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ClassSelection(**options)


@pytest.fixture(scope="module")
def calibrated() -> TorchEngine:
    return TorchEngine(with_trust(small_model(num_classes=4, class_names=tuple("abcd"))), device="cpu")


def test_verdict_has_the_set_and_the_reason_why_the_class_is_not_known(calibrated: TorchEngine) -> None:
    assert calibrated.sets is not None
    limit = float(calibrated.sets.limits(0.8))
    sure, unsure = [1 - 3e-3, 1e-3, 1e-3, 1e-3], [0.1, limit, 0.0, 0.9 - limit]
    rows, familiarity = torch.tensor([sure, unsure, sure, unsure]), torch.tensor([0.5, 0.5, 0.09, 0.09])
    found = ClassSelection(coverage=0.8, familiar=0.9).judged(calibrated, rows, familiarity)
    assert [verdict.unknown for verdict in found] == [None, "ambiguous", "unfamiliar", "unfamiliar"]
    assert found[0].set == ("a",)
    contained = calibrated.sets.contain(rows, 0.8)
    assert contained is not None
    ordered = sorted(zip(unsure, contained[1].tolist(), "abcd", strict=True), reverse=True)
    assert found[1].set == tuple(name for _, inside, name in ordered if inside)
    assert [verdict.familiarity for verdict in found] == pytest.approx(familiarity.tolist())
    assert "several classes are likely: " in found[1].in_words()
    assert "9.00% of the validation images" in found[2].in_words()
    assert found[0].in_words() == ""


def test_familiarity_alone_is_judged_at_the_default_rate(calibrated: TorchEngine) -> None:
    rows = torch.tensor([[1.0, 0, 0, 0]] * 2)
    found = ClassSelection().judged(calibrated, rows, torch.tensor([0.0099, 0.0101]))
    assert [verdict.unknown for verdict in found] == ["unfamiliar", None]


@pytest.mark.parametrize("images", [1, 9, 98, 99])
@pytest.mark.parametrize("familiar", [None, 0.9])
def test_a_class_is_known_only_if_unfamiliar_pictures_can_be_told(
    images: int, familiar: float | None
) -> None:
    """The least familiarity of n validation images is 1 / (n + 1), of whatever picture."""
    engine = TorchEngine(with_trust(small_model(num_classes=4, class_names=tuple("abcd")), 120), device="cpu")
    engine.familiar_images = images
    enough, selection = images >= (99 if familiar is None else 9), ClassSelection(familiar=familiar)
    rows, least = torch.tensor([[1.0, 0, 0, 0]] * 2), torch.tensor([1 / (images + 1), 0.5])
    unlike, usual = selection.judged(engine, rows, least)
    assert (unlike.unknown, usual.unknown) == (("unfamiliar", None) if enough else ("unchecked", "unchecked"))
    assert usual.in_words() == ""
    if familiar is not None and not enough:
        with pytest.raises(
            UserError, match=r"at 10% false alarms need 9 .*, and the model was calibrated on 1$"
        ):
            selection.check(engine)
    else:
        selection.check(engine)


def test_a_model_that_was_not_calibrated_leaves_every_picture_unchecked() -> None:
    engine = TorchEngine(small_model(num_classes=4), device="cpu")
    (verdict,) = ClassSelection().judged(engine, torch.tensor([[1.0, 0, 0, 0]]), None)
    assert (verdict.unknown, verdict.set) == ("unchecked", None)
    assert ClassSelection().unchecked(engine) == ""  # none of its answers has the field


@pytest.mark.parametrize("rate", [0.0, 1.0, float("nan"), 2.0])
@pytest.mark.parametrize("name", ["coverage", "familiar"])
def test_rates_are_shares(name: str, rate: float) -> None:
    with pytest.raises(UserError, match=f"{name} must be "):
        ClassSelection(**{name: rate})


def test_rates_need_a_calibrated_model_with_enough_images(calibrated: TorchEngine) -> None:
    plain = TorchEngine(small_model(num_classes=4), device="cpu")
    for selection in (ClassSelection(coverage=0.9), ClassSelection(familiar=0.9)):
        selection.check(calibrated)
        with pytest.raises(UserError, match="the model was not calibrated"):
            selection.check(plain)
    with pytest.raises(UserError, match=r"sets of 99.9% need 999 validation images, and .* on 120"):
        ClassSelection(coverage=0.999).check(calibrated)
