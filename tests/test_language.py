"""The reader's language: every marked text has a translation, with the same places for values."""

import ast
import dataclasses
import functools
import gettext
import io
import json
import re
from pathlib import Path
from string import Formatter

import pytest
from babel.messages.pofile import read_po
from jinja2 import nodes

import vitascope
import vitascope_lessons
from vitascope.analysis.probing.curve import TIMES
from vitascope.analysis.report.charts import PAIR_WORDS, CalibrationWords, curve_title
from vitascope.analysis.report.page import jinja
from vitascope.cli import main
from vitascope.data.decisions import CHOICES
from vitascope.data.label_measures import CLASSES_HEAD, ESTIMATES, ESTIMATES_HEAD
from vitascope.deploy.server.page_content import web_files
from vitascope.language import language, say, say_count
from vitascope.training.linear.selection import SCORES_HEAD
from vitascope_lessons.checking import inputs_of
from vitascope_lessons.exercises import NAMES, docstrings, solution_text
from vitascope_lessons.faults import faults

ROOT = Path(vitascope.__file__).parent
LESSONS = Path(vitascope_lessons.__file__).parent
CATALOG = read_po((ROOT / "translations" / "zh.po").open("rb"), locale="zh")
CHINESE = {message.id: message.string for message in CATALOG if message.id and not message.context}
EXPLORER = {message.id: message.string for message in CATALOG if message.context == "explorer"}
NOUNS = ("test image", "val image", "out-of-fold image")
"""Counted nouns that are made from the name of a split."""
CHOSEN = (" to ", "test", "val", "out-of-fold", "accuracy", "mAP")
CHOSEN += (*ESTIMATES.values(), *ESTIMATES_HEAD, *CLASSES_HEAD, *CHOICES)
"""Texts that are looked up from a variable."""
STATES = [f"{{number}} {{name:<11}} {state}" for state in ("right", "wrong", "to do")]
"""Lines of `vitascope learn`."""
CURVES = {curve_title(name, ()) for name in ("loss", "accuracy", "map", "lr")}
"""Titles of the curves of a run."""


def marked_in_python(path: Path) -> set[str]:
    """Literal texts of `say`, and nouns of `say_count` where it comes from `vitascope.language`."""
    source = path.read_text(encoding="utf-8")
    if "vitascope.language" not in source:
        return set()
    tree = ast.parse(source)
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "vitascope.language"
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            place = {"say": 0, "say_count": 1}.get(node.func.id) if node.func.id in imported else None
            place = 0 if node.func.id == "WrongAnswer" else place
            if place is not None and isinstance(node.args[place], ast.Constant):
                text = node.args[place].value
                found.add(text if place == 0 else f"# {text}s")
    return found


def marked_in_template(path: Path) -> set[str]:
    source, templates = path.read_text(encoding="utf-8"), jinja()
    found = set()
    for _, _, message in templates.extract_translations(source):
        texts = (message,) if isinstance(message, str) else message or ()  # None of a variable
        found |= {text for text in texts if text is not None}
    for node in templates.parse(source).find_all(nodes.Filter):
        if node.name == "counted":
            found.add(f"# {node.args[0].as_const()}s")
    return found


def said_in_exercises() -> set[str]:
    hints = {hint for name in NAMES for hint, _ in faults(name, inputs_of(name))}
    return hints.union(STATES, *(docstrings(solution_text(name)) for name in NAMES))


@functools.cache
def marked() -> set[str]:
    found = (
        {f"# {noun}s" for noun in NOUNS}
        | set(CHOSEN)
        | CURVES
        | set(SCORES_HEAD)
        | set(TIMES.values())
        | said_in_exercises()
    )
    for words in (CalibrationWords(), PAIR_WORDS):
        found |= set(dataclasses.asdict(words).values())
    for path in sorted((*ROOT.rglob("*.py"), *LESSONS.rglob("*.py"))):
        found |= marked_in_python(path)
    for path in sorted(
        (*(ROOT / "analysis" / "report").glob("*.html"), ROOT / "analysis" / "auditing" / "audit.html")
    ):
        found |= marked_in_template(path)
    return found


def test_every_marked_text_has_a_translation() -> None:
    assert sorted(marked() - CHINESE.keys()) == []


def test_the_compiled_catalog_is_that_of_the_texts() -> None:
    with (ROOT / "translations" / "zh.mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    assert {text: compiled.gettext(text) for text in CHINESE} == CHINESE, "run `make translations`"
    assert json.loads(web_files()["chinese.json"][1]) == EXPLORER, "run `make translations`"


def test_every_translation_is_used() -> None:
    assert sorted(CHINESE.keys() - marked()) == []


def places(text: str) -> tuple[set[str], set[str]]:
    """The places for values of a text: of a template, and of `str.format` with their formats."""
    templates = set(re.findall(r"%\(\w+\)s", text))
    if templates or "%%" in text:
        return templates, set()
    return set(), {f"{name}:{spec}" for _, name, spec, _ in Formatter().parse(text) if name}


def test_translations_have_the_same_places_for_values() -> None:
    assert {text: places(text) for text in CHINESE} == {text: places(said) for text, said in CHINESE.items()}


def test_elements_of_translations_are_those_of_the_texts() -> None:
    found = {
        text: (re.findall(r"<[^>]+>", text), re.findall(r"<[^>]+>", said)) for text, said in CHINESE.items()
    }
    assert {text for text, (ours, theirs) in found.items() if ours != theirs} == set()


@pytest.mark.parametrize(
    ("locale", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "en_US.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN"}, "zh"),
        ({"LC_MESSAGES": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),
    ],
    ids=str,
)
def test_language_is_that_of_the_locale(locale, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in locale.items():
        monkeypatch.setenv(name, value)
    assert language() == expected


@pytest.fixture
def chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")


@pytest.mark.parametrize(("encoding", "expected"), [("gbk", "zh"), ("ascii", "en"), ("latin-1", "en")])
def test_language_is_english_where_chinese_cannot_be_printed(
    encoding: str, expected: str, chinese, monkeypatch
) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert language() == expected


def test_values_are_filled_in(chinese) -> None:
    assert say("{low:.0%} to {high:.0%}", low=0.1, high=0.25) == "10%–25%"
    assert say("a name of a class {x}") == "a name of a class {x}"
    assert (say_count(1, "image"), say_count(1000, "image")) == ("1 张图像", "1,000 张图像")


def test_counts_are_singular_and_plural_in_english() -> None:
    assert (say_count(1, "image"), say_count(1000, "image")) == ("1 image", "1,000 images")


def test_errors_are_english(chinese, capsys) -> None:
    assert main(["train", "--epoch", "3"]) == 2
    assert capsys.readouterr().err.startswith("vitascope: error: unknown option '--epoch'")
