"""Pickles as data: arrays and texts of every protocol, and rejection of every other instruction."""

import contextlib
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitascope import pickles
from vitascope.data.formats.pickled_arrays import read_pickle
from vitascope.errors import UserError

PYTHON_2 = (  # written by cPickle of Python 2 and NumPy 1: {"data": array, "labels": [3, 0]}, protocol 2
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04"
    b"K\x00\x85U\x01b\x87Rq\x05(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07"
    b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x06\x00\x7f\x80\xff\x01\x02tb"
    b"U\x06labelsq\x08]q\x09(K\x03K\x00eu."
)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_read(protocol: int) -> None:
    shared = ["a", "b"]
    fortran = np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3))
    values = {
        "data": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "big": fortran,
        "labels": [0, 300, -1, 2**40],
    }
    values |= {"text": "ä", "bytes": b"\x00\xff", "none": None, "flags": [True, False], "deep": [[1], {}, ()]}
    values |= {"one": shared, "two": shared, "tuple": (1, 2, 3, 4), "float": 0.5}
    found = read_pickle(pickle.dumps(values, protocol=protocol), "batch")
    assert found.keys() == values.keys()
    for name in ("data", "big"):
        assert found[name].dtype == values[name].dtype
        np.testing.assert_array_equal(found.pop(name), values.pop(name))
    assert found == values


def test_pickle_of_python_2_is_read() -> None:
    expected = pickle.loads(PYTHON_2, encoding="latin1")  # noqa: S301 - written above
    found = read_pickle(PYTHON_2, "batch")
    np.testing.assert_array_equal(found["data"], expected["data"])
    assert found["data"].tolist() == [[0, 127, 128], [255, 1, 2]]
    assert found["labels"] == [3, 0]


def test_keys_of_bytes_become_text() -> None:
    assert read_pickle(pickle.dumps({b"labels": [1]}), "batch") == {"labels": [1]}


class Harm:
    """An object that would create a file when unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_reduce_is_named_and_has_no_effect(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "harmed"
    content = pickle.dumps({"data": Harm(os.mkdir, str(trace))}, protocol=protocol)
    with pytest.raises(UserError, match=r"batch: rejected: .*'posix\.mkdir'"):
        read_pickle(content, "batch")
    assert not trace.exists()
    pickle.loads(content)  # noqa: S301 - on purpose
    assert trace.exists()  # the pickle was indeed harmful


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
        (b"(S'true'\nios\nsystem\n.", "os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", "os.system"),
        (b"cnumpy\nload\n(S'x'\ntR.", "numpy.load"),
        (b"cnumpy.core.multiarray\nscalar\n.", "numpy.core.multiarray.scalar"),
        (b"cbuiltins\ngetattr\n.", "builtins.getattr"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"Pcall\n.", "PERSID"),
        (b"cnumpy\nndarray\n(oN.", "OBJ"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "NEWOBJ"),
    ],
)
def test_dangerous_instructions_are_rejected_by_name(content: bytes, named: str) -> None:
    with pytest.raises(UserError, match=f"rejected: .*{named}"):
        read_pickle(content, "batch")


HUGE = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I%d\ntcnumpy\ndtype\n"
HUGE += b"(S'u1'\nI0\nI1\ntRI00\nS'ab'\ntb"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        b"\x80\x02}",
        pickle.dumps({"labels": [1, 2]})[:-3],
        PYTHON_2[:80],
        b"]q\x01r\xff\xff\xff\xff.",  # a memo index for which Python's unpickler allocates 64 GB
        b"B\xff\xff\xff\x7fab.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fab.",
        b"(dS'a'\n" + HUGE % 10**12 + b"s.",
        b"(dS'a'\n" + HUGE % -2 + b"s.",
        b"(dS'a'\n" + HUGE % 2**70 + b"s.",
        b"}(]K\x01u.",
        b"}(K\x01u.",
        b"K\x01a.",
        b"}K\x01a.",
        b"}\x8c\x01a\x8c\x01bR.",
        b"cnumpy\nndarray\n}b.",
        b"cnumpy\ndtype\n(S'O'\nI0\nI1\ntR.",
        b"cnumpy\ndtype\n(S'u1,u1'\nI0\nI1\ntR.",
        b"c_codecs\nencode\n(S'a'\nS'rot13'\ntR.",
        b"c_codecs\nencode\nR.",
        b"K\x01K\x02b.",
        b"K\x01.",
        b"h\x01.",
        b"e.",
        b"0.",
        b".",
    ],
)
def test_invalid_pickles_are_rejected_in_little_memory(content: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(UserError, match="batch: "):
        read_pickle(content, "batch")
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_arrays_of_objects_are_rejected() -> None:
    with pytest.raises(UserError, match="'O8', not of integers"):
        read_pickle(pickle.dumps({"data": np.array([[], 1], dtype=object)}, protocol=2), "batch")


def test_endless_pickles_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MAX_INSTRUCTIONS", 1000)
    with pytest.raises(UserError, match="more than 1,000 instructions"):
        read_pickle(b"]" * 2000 + b".", "batch")


@pytest.mark.filterwarnings("ignore:invalid escape:DeprecationWarning")
def test_changed_bytes_are_read_or_rejected() -> None:
    random = np.random.default_rng(0)
    today = pickle.dumps({"data": np.zeros((2, 3), np.uint8), "labels": [1, 2]})
    for round_ in range(2000):
        content = bytearray(PYTHON_2 if round_ % 2 else today)
        for _ in range(random.integers(1, 4)):
            content[random.integers(len(content))] = random.integers(256)
        with contextlib.suppress(UserError):
            assert isinstance(read_pickle(bytes(content), "batch"), dict)


def test_a_list_in_itself_does_not_loop_forever() -> None:
    found = read_pickle(b"}(S'a'\n]q\x01h\x01au.", "batch")
    assert found["a"][0] is found["a"]


DOUBLINGS = b"K\x01\x86q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))


@pytest.mark.parametrize(
    "content", [b"\x93.", b"cnumpy\ndtype\nh\x3c\x85R.", b"c_codecs\nencode\nX\0\0\0\0h\x3c\x86R."]
)
def test_shared_tuples_are_rejected(content: bytes) -> None:
    with pytest.raises(UserError, match="a tuple is used twice"):
        read_pickle(b"K\x01" + DOUBLINGS + content, "batch")


def test_a_declared_length_is_compared_with_the_data() -> None:
    content = b"(dS'a'\n" + HUGE % 3 + b"s."
    with pytest.raises(UserError, match=r"an array \(3,\) of uint8 has 3 bytes, not 2"):
        read_pickle(content, "batch")
    assert read_pickle(content.replace(b"I3", b"I2"), "batch")["a"].tolist() == list(b"ab")
    assert struct.calcsize("P") == 8  # the cases above are written for 64 bits
