"""The policy for pickles: names from an allow-list, and bounded work."""

import collections
import io
import pickle
from typing import Any

import pytest

from vitascope import pickles
from vitascope.pickles import load_pickle, scan_pickle


def nothing(name: str) -> Any:
    return None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_only_names_of_the_allow_list_are_found(protocol: int) -> None:
    content = pickle.dumps(collections.OrderedDict(a=1, b=(2, 3)), protocol)
    known = {"collections.OrderedDict": dict, "__builtin__.list": list, "builtins.list": list}
    assert load_pickle(content, known.get) == {"a": 1, "b": (2, 3)}
    with pytest.raises(pickle.UnpicklingError, match=r"refers to 'collections\.OrderedDict'"):
        load_pickle(content, nothing)


def test_the_scan_sees_names_from_the_memo() -> None:
    content = b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x8c\x03abc\x8c\x03abch\x00h\x01\x93."
    with pytest.raises(pickle.UnpicklingError, match=r"refers to 'os\.system'"):
        list(scan_pickle(io.BytesIO(content), {"abc.abc"}.__contains__))


def test_a_name_that_the_scan_misses_is_rejected_on_loading() -> None:
    hidden = b"\x80\x04\x8c\x02os\x8c\x06system\x8c\x03abc0\x8c\x03abc0\x93."  # POP twice
    list(scan_pickle(io.BytesIO(hidden), {"abc.abc"}.__contains__))
    with pytest.raises(pickle.UnpicklingError, match=r"refers to 'os\.system'"):
        load_pickle(hidden, {"abc.abc": int}.get)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (b")" + b"\x85" * 200_000, "more than 100 tuples"),  # hashing it would crash the process
        (b"K\x01" + b"\x85q\x00h\x00\x86" * 60, "used twice"),  # and this would take years
        (b"K\x01\x85N0q\x00h\x00\x86", "used twice"),
        (b"K\x01\x852\x86", "instruction DUP"),
    ],
)
def test_tuples_that_take_too_long_to_hash_are_rejected(keys: bytes, reason: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=reason):
        load_pickle(b"}" + keys + b"K\x01s.", nothing, max_tuples=100)


def test_scanning_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MAX_INSTRUCTIONS", 100)
    with pytest.raises(pickle.UnpicklingError, match="more than 100 instructions"):
        list(scan_pickle(io.BytesIO(b"]" * 200 + b"."), bool))


def test_a_scan_stops_at_the_end_of_its_pickle() -> None:
    stream = io.BytesIO(pickle.dumps(1) + b"rest")
    list(scan_pickle(stream, bool))
    assert stream.read() == b"rest"
