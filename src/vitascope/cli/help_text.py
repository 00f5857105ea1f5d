"""The help of a command in the reader's language: tyro lays it out in English, here it is laid out again."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

from vitascope.language import language, say

_WIDEST = 129
"""Columns of the widest terminal in which tyro sets no boxes side by side."""
_FIRST_OPTION = re.compile(r"^(?:│ |  )(-h, --help +)", re.MULTILINE)
_TITLE = re.compile(r"(─ |^ )(positional arguments|(?:\w+ )?options)( [─ ])")
"""The title of a box, or above a line of dashes in a terminal without UTF-8."""
_HINT = re.compile(r"(.*?) ?(\(required\)|\(default:|\(one of)(.*)")
"""What follows the text of an option: its default, or that it has none."""
_LONGEST_HINT = 30
"""Columns of a hint that is kept on one line."""
_WIDE = "\u3000-\u9fff\uff00-\uffef"
"""Letters and punctuation of two columns, between which lines break."""


@contextlib.contextmanager
def in_readers_language() -> Iterator[None]:
    """Print what the body prints, the help that tyro renders, in the reader's language."""
    if language() == "en":
        yield
        return
    encoding = sys.stdout.encoding or "utf-8"
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=sys.stdout.errors)
    try:
        with contextlib.redirect_stdout(shown), _without_boxes_side_by_side():
            yield
    finally:
        shown.seek(0)
        sys.stdout.write(translated(shown.read(), say_option))


@contextlib.contextmanager
def _without_boxes_side_by_side() -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(min(shutil.get_terminal_size().columns, _WIDEST))
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def say_option(text: str) -> str:
    """A text of the help in the reader's language, however the help has broken it into lines."""
    return say(_by_letters().get(letters(text), text))


@functools.cache
def _by_letters() -> dict[str, str]:
    from vitascope.chinese.options import OPTIONS

    return {letters(text): text for text in OPTIONS}


def letters(text: str) -> str:
    """A text without spaces and line breaks."""
    return "".join(text.split())


def translated(rendered: str, translate: Callable[[str], str]) -> str:
    """The help that tyro has rendered, in another language.

    `translate` gets each title and description of a group, and the text of each option without its hint.
    """
    first = _FIRST_OPTION.search(rendered)
    if first is None:  # not a help
        return rendered
    boxed = "╭" in rendered
    lines = rendered.splitlines()
    inner = max(len(line) for line in lines if line.startswith("╭─" if boxed else " -")) - (4 if boxed else 2)
    done: list[str] = []
    content: list[str] = []
    for line in lines:
        if line.startswith("│ " if boxed else "  ") and line.strip():
            content.append(line[2:].rstrip("│ "))
            continue
        for text in _content(content, len(first[1]), inner, translate):
            done.append(f"│ {text}{' ' * (inner - columns(text))} │" if boxed else f"  {text}")
        content = []
        done.append(_outside(line, translate))
    return "\n".join([*done, ""])


def _outside(line: str, translate: Callable[[str], str]) -> str:
    """The usage, a line of the command's description, or a border with a title."""
    if line.startswith("usage:"):
        return line.replace("usage:", say("usage:"), 1)
    if found := _TITLE.search(line):
        before, title, after = found.groups()
        said = translate(title)
        rule = after[-1] * (len(title) - columns(said))  # keeps the width of the border
        return _TITLE.sub(lambda _: f"{before}{said}{after}{rule}", line)
    return say(line)


def _content(
    content: Sequence[str], column: int, width: int, translate: Callable[[str], str]
) -> Iterator[str]:
    """The lines of a box: a group's description and a rule, if it has one; options with texts at `column`."""
    for place, line in enumerate(content):
        if set(line) in ({"─"}, {"-"}):
            yield from wrapped(parts(translate(" ".join(content[:place])), width), width)
            yield line
            content = content[place + 1 :]
            break
    options: list[tuple[str, list[str]]] = []
    for line in content:
        if options and not line[:column].strip():
            options[-1][1].append(line[column:])
        elif line[column - 2 : column] == "  ":
            options.append((line[:column], [line[column:]]))
        else:  # a name that is too long for a text beside it
            options.append((line, []))
    for name, texts in options:
        described = list(_described(" ".join(texts), width - column, translate)) if texts else []
        if name.endswith("  "):
            yield name + described.pop(0)
        else:
            yield name
        for text in described:
            yield " " * column + text


def _described(text: str, width: int, translate: Callable[[str], str]) -> Iterator[str]:
    """The text of an option with its hint, in lines."""
    found = _HINT.fullmatch(text)
    if found is None:
        return wrapped(parts(translate(text.strip()), width), width)
    described, hint = parts(translate(found[1]), width), [f" {say(found[2])}", *parts(found[3], width)]
    if sum(map(columns, hint)) <= min(_LONGEST_HINT, width):
        hint = ["".join(hint)]
    return wrapped([*described, *hint], width)


def parts(text: str, width: int) -> list[str]:
    """The parts of a text between which a line may break: single letters of two columns, and words.

    Closing punctuation belongs to the part before it, opening punctuation to the part after it.
    """
    closing = rf"[，。；：、！？）》]*(?:[),.;:]+(?![^ {_WIDE}]))?"
    return re.findall(rf" *[（《(]*(?:[{_WIDE}]|[^ {_WIDE}]{{1,{width}}}){closing}", text)


def wrapped(parts: Iterable[str], width: int) -> Iterator[str]:
    """The lines of a text that is given in parts."""
    line = ""
    for part in parts:
        if line and columns(line + part) > width:
            yield line
            line = ""
        line += part if line else part.lstrip()
    yield line


def columns(text: str) -> int:
    """Columns of a text in a terminal."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
