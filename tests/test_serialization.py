"""JSON and YAML of files that anybody may have written."""

import datetime
from pathlib import Path

import pytest

from vitascope.serialization import parse_json, read_yaml, yaml_text

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "references"),
        ("a: &a [*a]", "references"),
        ("<<: &a {b: *a}", "references"),
        ('a: !!int ""', "index out of range"),
        ("a: !!python/object:os.system x", "could not determine a constructor for the tag"),
        ("a: " + "[" * 60_000, "nested too deeply"),
        ("a: .inf", "not finite"),
        ("a: .nan", "not finite"),
        ("a: 0x" + "f" * 1000, "too large"),
        ("a: 2020-01-01", "date, not text"),
        ("1: a", "'1' is not text.*quotes"),
        ("weights:\n  no: 3", "'False' is not text: write it in quotes, as YAML reads no"),
        ("a: [1\nb: 2\n", "expected"),
        ("a: '\x00'", "not allowed"),
    ],
    ids=lambda text: text[:20],
)
def test_yaml_that_is_not_ours_is_rejected_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=reason) as raised:
        read_yaml(tmp_path / "config.yaml")
    assert "\n" not in str(raised.value)


def test_what_is_written_is_read_without_references(tmp_path: Path) -> None:
    shared = [[0, 100], [50, 120]]
    values = {
        "z": shared,
        "a": shared,
        "none": None,
        "name": "猫 & *x",
        "rate": 1e-3,
        "on": True,
        "day": "2020-01-01",
    }
    (tmp_path / "config.yaml").write_text(yaml_text(values), encoding="utf-8")
    found = read_yaml(tmp_path / "config.yaml")
    assert found == values
    assert list(found) == list(values)


def test_a_value_that_yaml_cannot_hold_is_not_written() -> None:
    with pytest.raises(Exception, match="cannot represent"):
        yaml_text({"a": datetime.timedelta()})


@pytest.mark.parametrize(
    "text",
    ["NaN", "[Infinity]", "1e999", "-" + "9" * 400, "[" * 100_000, "{", "", "\ufeff{}"],
    ids=lambda text: text[:9],
)
def test_json_that_is_not_ours_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


def test_json_is_read_exactly() -> None:
    assert parse_json('{"a": [1, -2.5, "é", null, true]}') == {"a": [1, -2.5, "é", None, True]}
