import pytest

from vitascope.formatting import aligned, counted, duration, listed, speed


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 epochs"), (1, "1 epoch"), (2, "2 epochs"), (1000, "1,000 epochs")]
)
def test_one_is_singular(count: int, expected: str) -> None:
    assert counted(count, "epoch") == expected


@pytest.mark.parametrize(
    ("count", "expected"), [(0, ""), (3, "0, 1, 2"), (4, "0, 1, 2 and 1 other"), (9, "0, 1, 2 and 6 others")]
)
def test_the_first_of_many_are_listed(count: int, expected: str) -> None:
    assert listed([str(number) for number in range(count)]) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(1234.5, "1,234"), (10.4, "10"), (3.14, "3.1"), (0.0421, "0.042"), (0.4, "0.4")]
)
def test_a_slow_speed_keeps_two_digits(value: float, expected: str) -> None:
    assert speed(value) == f"{expected} images/s"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.04, "0.0 s"), (119.9, "119.9 s"), (120, "0:02:00"), (90_061.4, "1 day, 1:01:01")],
)
def test_long_times_have_hours_and_minutes(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_columns_of_a_table_are_aligned() -> None:
    rows = [("run", "epochs", "note"), ("a", "5", "long note"), ("longer", "120", "")]
    expected = ["run     epochs  note", "a            5  long note", "longer     120"]
    assert list(aligned(rows, left={0, 2})) == expected
