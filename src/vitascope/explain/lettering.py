"""Text of any script in figures."""

from __future__ import annotations

import functools
import re

from matplotlib import font_manager
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

CODE_POINT = re.compile(r"U\+[0-9A-F]{4}")
NOTE = "No installed font has the characters shown as U+…; install one, such as Noto Sans, and draw again."


def short(name: str, length: int = 14) -> str:
    """A class name in one short line; its middle is cut, as long names often differ only at the end."""
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    if len(name) <= length:
        return name
    tail = (length - 1) // 3
    return f"{name[: length - 1 - tail]}…{name[len(name) - tail :]}"


class LiteralFigure(Figure):
    """A figure whose texts are class names and file names of any script.

    Matplotlib reads text between two `$` as a formula, and warns about each character that its default font
    lacks. Here every text is literal. Missing characters come from other installed fonts; if none has them,
    they become code points (U+732B) with a note.
    """

    def draw(self, renderer: RendererBase) -> None:
        """Prepare the texts, then draw."""
        for axes in self.axes:
            for axis in (axes.xaxis, axes.yaxis):
                ticks = [label.get_text() for label in axis.get_ticklabels()]
                if (legible := [_legible(text) for text in ticks]) != ticks:
                    axis.set_ticklabels(legible)  # an axis renews its labels whenever it is drawn
        texts = [text for text in self.findobj(Text) if isinstance(text, Text)]
        for text in texts:
            text.set_parse_math(False)
            text.set_text(_legible(text.get_text()))
            if families := _families_with(_lacking(text.get_text()))[0]:
                text.set_fontfamily([*text.get_fontfamily(), *families])
                text.set_fontweight("normal")  # the only weight that all of them have
        if not self.get_supxlabel() and any(CODE_POINT.search(text.get_text()) for text in texts):
            self.supxlabel(NOTE, fontsize=8)
        super().draw(renderer)


def _legible(text: str) -> str:
    """A text with the characters that no font has as code points."""
    missing = _families_with(_lacking(text))[1]
    return "".join(f"U+{ord(letter):04X} " if letter in missing else letter for letter in text).rstrip(" ")


def _lacking(text: str) -> frozenset[str]:
    """The characters that the default font lacks."""
    return frozenset(
        letter for letter in text if not letter.isascii() and ord(letter) not in _default_letters()
    )


@functools.cache
def _default_letters() -> frozenset[int]:
    """Code points in matplotlib's default font."""
    return _letters(font_manager.findfont(font_manager.FontProperties()))


def _letters(path: str) -> frozenset[int]:
    """Code points in a font file; none for a font that matplotlib cannot draw, such as colour bitmaps."""
    try:
        font = FT2Font(path)
        font.set_size(12, 72)
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(font.get_charmap())


@functools.cache
def _families_with(lacking: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Installed families that cover these characters, and the characters that none has."""
    fonts = {
        font.name: font.fname
        for font in font_manager.fontManager.ttflist
        if font.style == "normal" and font.weight == 400 and "Last Resort" not in font.name  # boxes
    }
    families: list[str] = []
    missing = set(lacking)
    for name, path in sorted(fonts.items()):
        if not missing:
            break
        known = _letters(path)
        if found := {letter for letter in missing if ord(letter) in known}:
            families.append(name)
            missing -= found
    return tuple(families), frozenset(missing)
