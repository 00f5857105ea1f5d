import pytest

from vitascope.formatting import counted, speed


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 epochs"), (1, "1 epoch"), (2, "2 epochs"), (1000, "1,000 epochs")]
)
def test_one_is_singular(count: int, expected: str) -> None:
    assert counted(count, "epoch") == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(1234.5, "1,234"), (10.4, "10"), (3.14, "3.1"), (0.0421, "0.042"), (0.4, "0.4")]
)
def test_a_slow_speed_keeps_two_digits(value: float, expected: str) -> None:
    assert speed(value) == f"{expected} images/s"
