"""The reader's language: every marked text has a translation, with the same places for values."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import re
import sys
import unicodedata
from pathlib import Path
from string import Formatter

import pytest
from jinja2 import nodes

import vitascope
from vitascope.chinese import CHINESE
from vitascope.chinese.report import REPORT
from vitascope.cli import COMMANDS, GROUPS, main
from vitascope.cli.help_text import letters, parts, translated, wrapped
from vitascope.language import counted, language, say
from vitascope.learn.exercises import NAMES, docstrings, solution_text
from vitascope.learn.faults import FAULTS
from vitascope.probing.curve import TIMES
from vitascope.probing.selection import SCORES_HEAD
from vitascope.report.charts import PAIR_WORDS, CalibrationWords, curve_title
from vitascope.report.comparison_page import BY
from vitascope.report.page import environment
from vitascope.run.label_measures import CLASSES_HEAD, ESTIMATES, ESTIMATES_HEAD

ROOT = Path(vitascope.__file__).parent
NOUNS = ("test image", "val image")
"""Counted nouns that are made from the name of a split."""
TYRO = (
    "positional arguments",
    "options",
    "show this help message and exit",
    "(required)",
    "(default:",
    "(one of",
)
CHOSEN = (" to ", "test", "val", "accuracy", "mAP", *ESTIMATES.values(), *ESTIMATES_HEAD, *CLASSES_HEAD)
"""Texts that are looked up from a variable."""
STATES = [f"{{number}} {{name:<11}} {state}" for state in ("right", "wrong", "to do")]
"""Lines of `vitascope learn`."""
COMPARED = {
    *("run", "epochs", "balanced", "macro F1", "training time", "parameters", "MFLOPs", "loss"),
    *(f"{split} {measure}" for split in ("test", "val") for measure in ("accuracy", "mAP", "loss")),
    *("common images", "only this right", "p", "verdict", "better", "worse", "not significant"),
    *(curve_title(name, ()) for name in ("loss", "accuracy", "map", "lr")),
    *BY.values(),
}
"""Cells of the comparison of runs, and what its curves show."""


def marked_in_python(path: Path) -> set[str]:
    """Literal texts of `say`, and nouns of `counted` where it comes from `vitascope.language`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "vitascope.language"
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
            place = {"say": 0, "counted": 1}.get(node.func.id)
            if place is not None and isinstance(node.args[place], ast.Constant):
                text = node.args[place].value
                found.add(text if place == 0 else f"# {text}s")
    return found


def marked_in_template(path: Path) -> set[str]:
    source, jinja = path.read_text(encoding="utf-8"), environment()
    found = set()
    for _, _, message in jinja.extract_translations(source):
        texts = (message,) if isinstance(message, str) else message or ()  # None of a variable
        found |= {text for text in texts if text is not None}
    for node in jinja.parse(source).find_all(nodes.Filter):
        if node.name == "counted":
            found.add(f"# {node.args[0].as_const()}s")
    return found


def said_in_help() -> set[str]:
    """Every line of the commands' descriptions."""
    lines = {line for each in COMMANDS.values() for line in (inspect.getdoc(each) or "").splitlines()}
    return lines - {""} | GROUPS.keys()


@functools.cache
def printed_help(command: str, locale: str) -> str:
    """The help of a command, or of vitascope, in a terminal of 80 columns with UTF-8."""
    with (
        pytest.MonkeyPatch.context() as environ,
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as shown,
    ):
        environ.setenv("COLUMNS", "80")
        environ.setenv("LC_ALL", locale)
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            main([command, "--help"] if command else ["--help"])
        shown.seek(0)
        return shown.read()


def said_of_options() -> set[str]:
    """Every title and description of a group of options, and the text of every option."""
    found: list[str] = []
    for command in COMMANDS:
        translated(printed_help(command, "C"), lambda text: found.append(text) or text)
    texts = {letters(text): text for text in CHINESE}  # which the help has broken into lines
    return {texts.get(letters(text), text) for text in found}


def said_in_exercises() -> set[str]:
    hints = {fault.hint for faults in FAULTS.values() for fault in faults}
    return hints.union(STATES, *(docstrings(solution_text(name)) for name in NAMES))


@functools.cache
def marked() -> set[str]:
    found = (
        {f"# {noun}s" for noun in NOUNS}
        | set(CHOSEN)
        | set(TYRO)
        | COMPARED
        | set(SCORES_HEAD)
        | set(TIMES.values())
        | said_in_help()
        | said_of_options()
        | said_in_exercises()
    )
    for words in (CalibrationWords(), PAIR_WORDS):
        found |= set(dataclasses.asdict(words).values())
    for path in sorted(ROOT.rglob("*.py")):
        found |= marked_in_python(path)
    for path in sorted((ROOT / "report").glob("*.html")):
        found |= marked_in_template(path)
    return found


def test_every_marked_text_has_a_translation() -> None:
    assert sorted(marked() - CHINESE.keys()) == []


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
        text: (re.findall(r"<[^>]+>", text), re.findall(r"<[^>]+>", said)) for text, said in REPORT.items()
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
    assert (counted(1, "image"), counted(1000, "image")) == ("1 张图像", "1,000 张图像")


def test_counts_are_singular_and_plural_in_english() -> None:
    assert (counted(1, "image"), counted(1000, "image")) == ("1 image", "1,000 images")


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in line)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_chinese_and_fits_80_columns(command: str) -> None:
    out = printed_help(command, "zh_CN.UTF-8")
    assert out.startswith("用法: vitascope")
    assert max(map(columns, out.splitlines())) <= 80
    boxed = {columns(line) for line in out.splitlines() if line[:1] in "╭│╰" and line}
    assert boxed == ({80} if command else set())
    for word in ("usage:", "positional arguments", "show this help", "(required)", "(default:", "(one of"):
        assert word not in out
    described = COMMANDS[command or "predict"]  # the overview lists them all
    assert CHINESE[(described.__doc__ or "").splitlines()[0]] in out


@pytest.mark.parametrize("command", COMMANDS)
def test_names_and_values_of_options_are_those_of_the_english_help(command: str) -> None:
    english, chinese = (
        [line.split("  ")[0] for line in printed_help(command, locale).splitlines() if line.startswith("│ -")]
        for locale in ("C", "zh_CN.UTF-8")
    )
    assert chinese == english


def test_help_of_a_wide_terminal_is_chinese_too(chinese, monkeypatch) -> None:
    """tyro sets the boxes side by side in English."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    with contextlib.suppress(SystemExit):
        main(["train", "--help"])
    sys.stdout.seek(0)
    assert not re.search(r"[a-z]{3,} [a-z]{3,} [a-z]{3,} [a-z]{3,}", sys.stdout.read())


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("图像块的边长，以像素为单位。", 12, ["图像块的边", "长，以像素为", "单位。"]),
        ("用于（可选）图像", 6, ["用于", "（可", "选）图", "像"]),
        ("表格：.csv、.tsv", 8, ["表格：", ".csv、", ".tsv"]),
        ("见 docs/options.md。", 8, ["见", "docs/opt", "ions.md。"]),
    ],
)
def test_chinese_lines_break_between_letters_but_not_before_closing_punctuation(text, width, lines) -> None:
    assert list(wrapped(parts(text, width), width)) == lines


def test_errors_are_english(chinese, capsys) -> None:
    assert main(["train", "--epoch", "3"]) == 2
    assert capsys.readouterr().err.startswith("vitascope: error: unknown option '--epoch'")


def test_titles_above_dashes_are_chinese_too(chinese, capsys) -> None:
    """tyro draws boxes where the encoding is named `utf-8`, which that of `capsys` is not."""
    with contextlib.suppress(SystemExit):
        main(["predict", "--help"])
    out = capsys.readouterr().out
    assert "\n 位置参数  " in out
    assert "\n 集群选项  " in out
    assert "\n  --resume       继续中断的 --out" in out
