"""The interval of a mean; its numbers are compared with scipy.stats in tests/explain/faithfulness."""

from vitascope.intervals import Interval


def test_verdict_is_whether_the_interval_excludes_zero() -> None:
    assert Interval(0.1, 0.09).verdict == "better"
    assert Interval(0.1, 0.11).verdict == "not significant"
    assert Interval(-0.1, 0.11).verdict == "not significant"
    assert Interval(-0.1, 0.09).verdict == "worse"
    assert Interval(0.0, 0.0).verdict == "not significant"
    assert Interval(0.1, None).verdict == "one image"
