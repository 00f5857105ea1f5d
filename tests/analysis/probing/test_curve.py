"""Learning curves and their forecasts."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from tests.analysis.probing.digits import DIGITS, PIXELS, PROPERTIES, drawn
from vitascope.analysis.probing.curve import Forecast, _doubt, forecast, learning_curve
from vitascope.data.folds import Division
from vitascope.data.targets import ClassIndices
from vitascope.training.linear.classifiers import ClassMeans, LeastSquares, Neighbors
from vitascope.training.linear.selection import out_of_fold


@pytest.mark.parametrize("targets", [DIGITS, PROPERTIES], ids=["exclusive", "several"])
def test_a_curve_rises_to_the_cross_validated_value(targets: ClassIndices) -> None:
    some = drawn(0)[:400]
    division = Division.of(targets.take(some))
    folds = division.folds()
    curve = learning_curve(Neighbors((5,)), PIXELS[some], division, folds)
    (held_out,) = out_of_fold(Neighbors((5,)), PIXELS[some], division.targets, folds)
    if targets.exclusive:
        value = (held_out.argmax(axis=1) == division.targets.labels).mean()
    else:  # the mAP
        columns = zip(division.targets.labels.T, held_out.T, strict=True)
        value = np.mean([average_precision_score(*column) for column in columns])
    assert curve.values[-1] == pytest.approx(value, abs=1e-6)
    assert 0.002 < curve.deviations[-1] < 0.03
    assert curve.sizes[-1] == 320
    assert (np.diff(curve.sizes) > 0).all()
    assert curve.values[-1] > curve.values[0] + 0.05
    assert len(curve.forecasts) == 2
    assert all(each.low < each.value < each.high for each in curve.forecasts)


def test_a_forecast_continues_a_power_law() -> None:
    sizes = np.array([20.0, 40.0, 80.0, 160.0, 320.0, 640.0])
    errors = 0.5 * (sizes / 20) ** -0.5
    for each in forecast(sizes, errors, np.diag((0.002 * errors) ** 2), 640):
        true = 1 - 0.5 * (each.factor * 640 / 20) ** -0.5
        assert each.low < true < each.high
        assert each.value == pytest.approx(true, abs=0.03)


def test_noise_widens_the_interval() -> None:
    sizes = np.array([20.0, 40.0, 80.0, 160.0, 320.0])
    errors = 0.5 * (sizes / 20) ** -0.5
    widths = []
    for deviation in (0.001, 0.05):
        double, four = forecast(sizes, errors, np.full((5, 5), deviation**2), 400)
        assert four.high - four.low > double.high - double.low
        widths.append(double.high - double.low)
    assert widths[1] > 1.5 * widths[0]


def test_perfect_values_have_a_forecast_below_one() -> None:
    sizes = np.array([20.0, 40.0, 80.0, 160.0])
    double, _ = forecast(sizes, np.array([0.1, 0.02, 0.0, 0.0]), np.zeros((4, 4)), 200)
    assert 0.9 < double.low < double.value < 1


def test_a_curve_that_does_not_rise_has_no_forecast() -> None:
    noise = np.random.default_rng(0).normal(size=(400, 4))
    division = Division.of(DIGITS.take(np.arange(400)))
    curve = learning_curve(ClassMeans(), noise, division, division.folds())
    assert not curve.forecasts
    assert curve.lines()[0].startswith("no forecast for more labels: 320 images are not better than 30")


def test_few_images_have_no_forecast() -> None:
    division = Division.of(DIGITS.take(np.arange(60)))
    curve = learning_curve(ClassMeans(), PIXELS[:60], division, division.folds())
    assert "too few images" in curve.reason
    assert not curve.forecasts


def test_groups_widen_the_deviations() -> None:
    """Copies of an image are one observation."""
    some = np.repeat(drawn(0)[:100], 4)
    targets = DIGITS.take(some)
    groups = np.repeat(np.arange(100), 4).astype(str)
    grouped = Division.of(targets, groups)
    folds = grouped.folds()
    as_groups = learning_curve(LeastSquares((100.0,)), PIXELS[some], grouped, folds)
    as_images = learning_curve(LeastSquares((100.0,)), PIXELS[some], Division.of(targets), folds)
    assert as_groups.deviations[-1] > 1.5 * as_images.deviations[-1]


def test_a_forecast_in_words() -> None:
    double, four = Forecast(2, 0.912, 0.88, 0.931), Forecast(4, 0.984, 0.97, 0.991)
    assert (
        double.in_words(0.87) == "twice as many labels would bring 91% (88 to 93); cross-validated now: 87%"
    )
    assert four.in_words(0.975) == (
        "four times as many labels: no gain can be shown, 98.4% (97.0 to 99.1); cross-validated now: 97.5%"
    )


def test_a_curve_at_its_end_is_not_continued_upwards() -> None:
    """Errors that have fallen to a limit, with the noise of 400 images."""
    sizes, values = np.geomspace(12, 320, 6), []
    for seed in range(20):
        limit = 0.12 + 0.3 * (sizes / 12) ** -1.5
        drawn = np.random.default_rng(seed).normal(limit, 0.016)
        values.append(forecast(sizes, drawn, np.diag(np.full(6, 0.016**2)), 400)[0].value)
    assert abs(np.mean(values) - 0.88) < 0.02


def test_forecasts_cover_the_curve_that_was_held_back() -> None:
    """A small version of benchmarks/results/2026-11-26-probe_coverage.md."""
    covered = []
    classifier = LeastSquares((64.0,))
    for seed in range(15):
        order = drawn(seed)
        some, double, rest = order[:200], order[:400], order[400:]
        division = Division.of(DIGITS.take(some))
        curve = learning_curve(classifier, PIXELS[some], division, division.folds(seed), seed=seed)
        fitted = classifier.fit(PIXELS[double], DIGITS.take(double))
        (probabilities,) = fitted.probabilities(PIXELS[rest])
        held_back = (probabilities.argmax(axis=1) == DIGITS.labels[rest]).mean()
        covered.append(curve.forecasts[0].low <= held_back <= curve.forecasts[0].high)
    assert np.mean(covered) >= 0.8


def test_errors_of_the_same_images_are_compared_in_pairs() -> None:
    """Their covariance decides: the same errors, alike on the same images or not, are a gain or none."""
    errors = np.array([0.3, 0.25, 0.2])
    alike, apart = np.full((3, 3), 0.01), 0.01 * np.eye(3)
    assert _doubt([10.0, 40.0, 160.0], errors, alike) == ""
    assert "beyond chance (80.0% and 70.0%)" in _doubt([10.0, 40.0, 160.0], errors, apart)
