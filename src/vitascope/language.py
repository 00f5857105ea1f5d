"""The reader's language: English texts of reports and lessons, with translations (`translations/zh.po`)."""

import functools
import gettext
import os
import sys
from pathlib import Path
from typing import Literal


def language() -> Literal["en", "zh"]:
    """The language that the locale asks for: the first of LC_ALL, LC_MESSAGES and LANG that is set.

    English where standard output cannot print Chinese, such as in ASCII.
    """
    locale = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh" if locale.startswith("zh") and _is_printable("中文") else "en"


def _is_printable(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def say(text: str, /, **values: object) -> str:
    """A text in the reader's language; with `values`, also its {places} filled in, as by `str.format`.

    Texts without a translation, such as names, remain as they are. `tests/test_language.py` finds the marked
    ones: literal arguments of `say` and `counted`, and those of Jinja's `_`, `trans` and `counted`.
    """
    if language() == "zh":
        text = _chinese().gettext(text)
    return text.format(**values) if values else text


@functools.cache
def _chinese() -> gettext.GNUTranslations:
    with Path(__file__).with_name("translations").joinpath("zh.mo").open("rb") as file:
        return gettext.GNUTranslations(file)


def say_count(count: int, noun: str) -> str:
    """A count with its noun: `1 image`, `1,000 images`; in Chinese `1,000 张图像`."""
    plural = count != 1 or language() == "zh"
    return say(f"# {noun}{'s' if plural else ''}").replace("#", f"{count:,}")
