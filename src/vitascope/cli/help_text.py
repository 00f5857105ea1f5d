"""The help of a command in the reader's language: titles, usage words, descriptions; not the options."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import unicodedata
from collections.abc import Iterator

from vitascope.language import language, say

_TITLE = re.compile(r"(─ |^ )(positional arguments|options|(?:\w+ )+options)( [─ ])")
"""The title of a box, or above a line of dashes in a terminal without UTF-8."""
_WORDS = re.compile(r"(show this help message and exit|\(required\)|\(default:)([^│\n]*)")


@contextlib.contextmanager
def in_readers_language() -> Iterator[None]:
    """Print what the body prints, the help that tyro renders, in the reader's language."""
    if language() == "en":
        yield
        return
    encoding = sys.stdout.encoding or "utf-8"
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=sys.stdout.errors)
    try:
        with contextlib.redirect_stdout(shown):
            yield
    finally:
        shown.seek(0)
        sys.stdout.write("".join(map(_translated, shown.read().splitlines(keepends=True))))


def _translated(line: str) -> str:
    """A line of the help, whose boxes keep their width."""
    if line.startswith("usage:"):
        return line.replace("usage:", say("usage:"), 1)
    text = line.rstrip("\n")
    if (translated := say(text)) != text:  # of a command's description
        return line.replace(text, translated)
    return _WORDS.sub(_words, _TITLE.sub(_title, line))


def _title(found: re.Match[str]) -> str:
    """A title, and more of its rule or spaces."""
    before, title, after = found.groups()
    group, _, kind = title.rpartition(" ")
    said = f"{group} {say('options')}" if kind == "options" and group else say(title)
    return f"{before}{said}{after}{after[-1] * (len(title) - _width(said))}"


def _words(found: re.Match[str]) -> str:
    """tyro's own words, and more spaces up to the side of the box."""
    word = say(found[1])
    return f"{word}{found[2]}{' ' * (len(found[1]) - _width(word))}"


def _width(text: str) -> int:
    """Columns of a text in a terminal."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
