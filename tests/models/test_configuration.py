import dataclasses
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import law
from vitascope.arguments import check_fields
from vitascope.errors import UserError


@dataclasses.dataclass(kw_only=True)
class Options:
    kind: Literal["round", "square"] = "round"
    count: int = 1
    rate: float = 0.5
    wanted: bool = True
    sides: tuple[int, ...] = (1, 2)
    start: float | None = None
    size: tuple[int, int] | int = 3
    names: tuple[str, ...] = ()


VALUES = {
    "kind": st.sampled_from(["round", "square"]),
    "count": st.integers(),
    "rate": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "wanted": st.booleans(),
    "sides": st.lists(st.integers()) | st.lists(st.integers()).map(tuple),
    "start": st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "size": st.integers() | st.tuples(st.integers(), st.integers()),
    "names": st.lists(st.text()) | st.lists(st.text()).map(tuple),
}


@law
@given(st.fixed_dictionaries(VALUES))
def test_values_of_the_declared_types_are_accepted(values: dict[str, object]) -> None:
    check_fields(Options(**values))


@law
@given(
    name=st.sampled_from(list(VALUES)), value=st.text() | st.binary() | st.dictionaries(st.text(), st.none())
)
def test_values_of_another_type_are_rejected_by_name(name: str, value: object) -> None:
    if name == "kind" and value in ("round", "square"):
        return
    with pytest.raises(UserError, match=name) as raised:
        check_fields(Options(**{name: value}))
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kind", "sqare", "unknown kind 'sqare'; nearest: square; it is one of round, square"),
        ("kind", None, "unknown kind None; it is one of round, square"),
        ("kind", 3, "unknown kind 3; it is one of round, square"),
        ("count", 2.0, "count must be a whole number, not 2.0"),
        ("count", False, "count must be a whole number, not False"),
        ("rate", None, "rate must be a number, not None"),
        ("rate", True, "rate must be a number, not True"),
        ("wanted", 1, "wanted must be true or false, not 1"),
        ("sides", 3, "sides must be a list of whole numbers, not 3"),
        ("sides", (1, None), r"sides must be a list of whole numbers, not \(1, None\)"),
        ("start", "0", "start must be a number or null, not '0'"),
        ("names", None, "names must be a list of names, not None"),
        ("names", ("cat", 3), r"names must be a list of names, not \('cat', 3\)"),
        ("size", 3.5, "size must be a pair of whole numbers or a whole number, not 3.5"),
    ],
)
def test_errors_name_the_accepted_values(name: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_fields(Options(**{name: value}))
