import pytest

import vitascope as vs
from vitascope.errors import UserError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size must be in \[1, 100000\], not 0"),
        ({"batch_size": 10**6}, "batch_size must be in .*, not 1000000"),
        ({"workers": -1}, "workers must be at least 0, not -1"),
        ({"precision": "fp8"}, "unknown precision 'fp8'; nearest: fp32"),
        ({"device": 0}, "device must be text"),
        ({"cache": "no"}, "cache must be"),
    ],
)
def test_impossible_values_are_one_line(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        vs.Compute(**options)
