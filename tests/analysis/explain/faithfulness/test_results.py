"""The table: intervals against scipy.stats on the numbers of each image, verdicts, order, texts."""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest
from scipy import stats

from vitascope.analysis.explain.faithfulness.results import Comparison, Scores
from vitascope.errors import UserError


def scores(seed: int, images: int = 12, *, better_by: float = 0.0) -> Scores:
    """Scores around the same numbers, better by `better_by` in each curve."""
    rng = np.random.default_rng(seed)
    columns = rng.uniform(0.4, 0.6, (4, images)) + better_by * np.array([[-1], [1], [1], [-1]])
    deletion, insertion, lerf, morf = (tuple(column) for column in columns.tolist())
    seconds = tuple(rng.uniform(0.1, 0.2, images).tolist())
    return Scores(deletion=deletion, insertion=insertion, lerf=lerf, morf=morf, seconds=seconds)


def comparison(**methods: Scores) -> Comparison:
    images = len(methods["random"].deletion)
    return Comparison(
        scores=methods, classes=tuple(range(images)), grid=(4, 6), steps=8, shares=(0.1, 0.5), seed=3
    )


FOUR = {
    "middling": scores(1, better_by=0.1),
    "reversed": scores(2, better_by=-0.2),
    "good": scores(3, better_by=0.2),
    "constant": scores(4),
    "random": scores(0),
}


@pytest.mark.parametrize("images", [2, 3, 50])
def test_intervals_are_those_of_students_t(images: int) -> None:
    mine, baseline = scores(1, images, better_by=0.02), scores(0, images)
    row = comparison(method=mine, random=baseline).table()[0]
    for measure, sign, values, random in (
        (row.deletion, -1, mine.deletion, baseline.deletion),
        (row.insertion, 1, mine.insertion, baseline.insertion),
        (row.road, 1, np.subtract(mine.lerf, mine.morf), np.subtract(baseline.lerf, baseline.morf)),
    ):
        expected = stats.ttest_rel(sign * np.array(values), sign * np.array(random)).confidence_interval(0.95)
        gain = measure.gain.to_dict()
        np.testing.assert_allclose([gain["low"], gain["high"]], [expected.low, expected.high], atol=1e-12)
        assert gain["mean"] == pytest.approx(sign * (np.mean(values) - np.mean(random)))
        assert measure.mean == pytest.approx(np.mean(values))


def test_gain_is_the_mean_of_four_curves() -> None:
    mine, baseline = FOUR["good"], FOUR["random"]
    gains = [
        np.subtract(baseline.deletion, mine.deletion),
        np.subtract(mine.insertion, baseline.insertion),
        np.subtract(mine.lerf, baseline.lerf),
        np.subtract(baseline.morf, mine.morf),
    ]
    each = np.mean(gains, axis=0)
    row = comparison(good=mine, random=baseline).table()[0]
    assert row.gain.mean == pytest.approx(each.mean())
    assert row.gain.half_width == pytest.approx(stats.t.ppf(0.975, 11) * stats.sem(each))


def test_small_difference_in_every_image_separates_methods() -> None:
    """Differences are paired by image, so that variation between images does not hide them."""
    good = FOUR["good"]
    slightly = dataclasses.replace(good, insertion=tuple(value - 0.01 for value in good.insertion))
    found = comparison(slightly=slightly, good=good, random=FOUR["random"])
    assert found.best == "good"
    assert found.rivals == ()


def test_table_and_sentence_agree_if_the_largest_gain_is_uncertain() -> None:
    """A method with a larger mean and a wide interval does not hide one that certainly beats random."""
    baseline = FOUR["random"]
    wild = dataclasses.replace(
        baseline, insertion=tuple(8 * (n % 6 == 0) + i for n, i in enumerate(baseline.insertion))
    )
    slight = dataclasses.replace(baseline, insertion=tuple(value + 0.04 for value in baseline.insertion))
    found = comparison(wild=wild, slight=slight, random=baseline)
    gains = {row.method: row.gain.mean for row in found.table()}
    assert gains["wild"] > gains["slight"] > 0
    assert [(row.method, row.verdict) for row in found.table()][:2] == [
        ("slight", "better"),
        ("wild", "not significant"),
    ]
    assert found.best == found.to_dict()["best"] == "slight"
    assert found.text().endswith("Best: slight; not significantly different: wild.")


@pytest.mark.parametrize("seed", range(20))
def test_sentence_reports_no_better_method_only_if_no_row_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    methods = {name: scores(int(rng.integers(99)), 8, better_by=rng.normal(0, 0.03)) for name in "abcd"}
    found = comparison(**methods, random=scores(100, 8))
    verdicts = {row.method: row.verdict for row in found.table()}
    said_none = "No method is measurably better than random" in found.text()
    assert said_none == ("better" not in verdicts.values())
    assert said_none or verdicts[found.best] == "better"


def test_one_image_has_no_intervals() -> None:
    found = comparison(method=scores(1, 1, better_by=0.1), random=scores(0, 1))
    row = found.table()[0]
    assert row.verdict == row.deletion.gain.verdict == "one image"
    assert row.gain.to_dict()["low"] is None
    assert "One image gives no interval" in found.text()
    assert "±" not in found.text()
    json.dumps(found.to_dict(), allow_nan=False)


def test_text_has_a_line_per_method_and_names_the_best() -> None:
    found = comparison(**FOUR)
    lines = found.text().splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [row.method for row in found.table()]
    for line, row in zip(lines[1:6], found.table(), strict=True):
        assert f"{row.deletion.mean:.3f}" in line
        assert line.endswith(row.verdict)
        gains = (row.deletion.gain, row.insertion.gain, row.road.gain, row.gain)
        assert line.count("*") == sum(gain.verdict in ("better", "worse") for gain in gains)
    assert "12 images, 4x6 cells, 8 steps" in found.text()
    assert lines[-1] == "Best: good."


def test_order_of_methods_is_compared_between_imputations_of_the_same_cells() -> None:
    """Shifted twins agree; a method that is good by the fill of neighbours alone changes places."""
    twins = {name: scores(9, better_by=by) for name, by in (("a", 0.1), ("b", 0.2), ("c", 0.3))}
    agreed = comparison(**twins, random=FOUR["random"]).agreements
    assert [(part.fills, part.removed, part.tau, part.swapped) for part in agreed] == [
        (("zero", "neighbours"), "hottest", 1, ()),
        (("blur", "neighbours"), "coldest", 1, ()),
    ]
    odd = dataclasses.replace(twins["a"], morf=scores(9, better_by=0.5).morf)
    found = comparison(**twins | {"a": odd}, random=FOUR["random"])
    assert [part.tau for part in found.agreements] == [pytest.approx(-1 / 3), 1]
    assert found.agreements[0].swapped == (("a", "b"), ("a", "c"))
    assert "zero or neighbours, hottest first: tau -0.33, a/b, a/c change places;" in found.text()
    assert found.to_dict()["agreements"][0]["swapped"] == (("a", "b"), ("a", "c"))


def test_plain_values_hold_the_numbers_of_each_image() -> None:
    found = comparison(**FOUR)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["scores"]["good"]["deletion"] == list(FOUR["good"].deletion)
    assert plain["best"] == "good"
    assert [row["method"] for row in plain["methods"]] == [row.method for row in found.table()]
    first, row = plain["methods"][0], found.table()[0]
    assert first["road"]["mean"] == row.road.mean
    assert first["gain"]["low"] == row.gain.mean - (row.gain.half_width or 0)
    assert (plain["images"], plain["grid"], plain["steps"], plain["seed"]) == (12, [4, 6], 8, 3)


def test_table_is_a_data_frame_if_pandas_is_installed() -> None:
    found = comparison(**FOUR)
    if importlib.util.find_spec("pandas") is None:
        with pytest.raises(UserError, match="needs pandas"):
            found.to_dataframe()
        return
    frame = found.to_dataframe()
    assert list(frame.index) == [row.method for row in found.table()]
    assert frame.loc["good", "gain.mean"] == found.table()[0].gain.mean
