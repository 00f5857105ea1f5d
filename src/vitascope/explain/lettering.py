"""Text of any script in figures."""

from __future__ import annotations

import functools
import itertools
import textwrap
import unicodedata
from collections.abc import Callable

import matplotlib
from matplotlib import font_manager
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

NOTE = "U+… is a character that no installed font has. Install {fonts}, and draw again."
CJK = "Noto Sans CJK (Debian, Ubuntu: apt install fonts-noto-cjk)"
SYMBOLS = "Symbola (Debian, Ubuntu: apt install fonts-symbola)"
OTHERS = "Noto Sans (Debian, Ubuntu: apt install fonts-noto-core)"
EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO")
"""First words of the names of their characters."""
NOTE_SIZE = 8
"""Points."""
_FAMILIES: dict[str, str] = {}
"""Installed families by letter that the default font lacks, as far as they are found."""


def short(name: str, length: int = 14) -> str:
    """A class name in one short line; its middle is cut, as long names often differ only at the end."""
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    if len(name) <= length:
        return name
    tail = (length - 1) // 3
    return f"{name[: length - 1 - tail]}…{name[len(name) - tail :]}"


def fitted(name: str, inches: float, size: float, written: Callable[[str], str] = str) -> str:
    """As `short`, of at most this width at a font size in points; `written` is how a figure writes it."""
    length = len(name)
    while length > 1 and width_of(written(short(name, length)), size) > inches:
        length -= 1
    return short(name, length)


def width_of(line: str, size: float) -> float:
    """The width of a line in inches, at a font size in points; estimated where the default font has no
    letter."""
    return sum(_advance(letter) for letter in line) * size / 72


class LiteralFigure(Figure):
    """A figure whose texts are class names and file names of any script.

    Matplotlib reads text between two `$` as a formula, and warns about each character that its default font
    lacks. Here every text is literal. Missing characters come from other installed fonts; if none has them,
    they become code points (U+732B) with a note that names the fonts to install.
    """

    is_laid_out = False

    def draw(self, renderer: RendererBase) -> None:
        """Prepare the texts, unless `lay_out` has done it, then draw."""
        if not self.is_laid_out:
            self.prepare_texts()
        super().draw(renderer)

    def prepare_texts(self) -> None:
        """Make every text literal, with fonts for all of its characters."""
        axes = [axis for each in self.axes for axis in (each.xaxis, each.yaxis)]
        ticks = {axis: [label.get_text() for label in axis.get_ticklabels()] for axis in axes}
        texts = [text for text in self.findobj(Text) if isinstance(text, Text)]
        letters = "".join(itertools.chain(*ticks.values(), (text.get_text() for text in texts)))
        write, missing = writer(letters), without_font(letters)
        for axis, labels in ticks.items():
            if (written := [write(label) for label in labels]) != labels:
                axis.set_ticklabels(written)  # an axis renews its labels whenever it is drawn
        for text in (text for text in self.findobj(Text) if isinstance(text, Text)):
            text.set_parse_math(False)
            text.set_text(write(text.get_text()))
            if families := _families_with(_lacking(text.get_text())).values():
                text.set_fontfamily([*text.get_fontfamily(), *sorted(set(families))])
                text.set_fontweight("normal")  # the only weight that all of them have
        if missing and not self.get_supxlabel():
            self.supxlabel(note_on(missing, self.get_figwidth()), fontsize=NOTE_SIZE)


def lay_out(figure: Figure) -> None:
    """Place the parts of a finished figure for good, so that `savefig` draws it only once."""
    if isinstance(figure, LiteralFigure):
        figure.prepare_texts()
        figure.is_laid_out = True
    engine = figure.get_layout_engine()
    if figure.axes and engine is not None:
        engine.execute(figure)
    with matplotlib.rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
        figure.set_layout_engine(None)  # for "none", which is an engine too, `savefig` draws twice


def writer(letters: str) -> Callable[[str], str]:
    """How a `LiteralFigure` writes texts of these letters: those that no font has as code points."""
    missing = without_font(letters)

    def write(text: str) -> str:
        written = (f"U+{ord(letter):04X} " if letter in missing else letter for letter in text)
        return "".join(written).rstrip(" ")

    return write


def without_font(letters: str) -> frozenset[str]:
    """The letters that no installed font has."""
    lacking = _lacking(letters)
    return lacking - _families_with(lacking).keys()


def note_on(missing: frozenset[str], inches: float) -> str:
    """The note on characters without a font, in lines that fit into a figure of this width."""
    fonts = {_font_for(letter) for letter in missing}
    note = NOTE.format(fonts=" and ".join(sorted(fonts)))
    return "\n".join(
        textwrap.wrap(note, int(inches * 72 / NOTE_SIZE / _advance("n")), break_on_hyphens=False)
    )


def _font_for(letter: str) -> str:
    if unicodedata.name(letter, "").startswith(EAST_ASIAN):
        return CJK
    return SYMBOLS if unicodedata.category(letter).startswith("S") else OTHERS


def _lacking(text: str) -> frozenset[str]:
    """The characters that the default font lacks."""
    return frozenset(letter for letter in text if not letter.isascii() and not _has(_default(), letter))


@functools.cache
def _default() -> FT2Font:
    font = FT2Font(font_manager.findfont(font_manager.FontProperties()))
    font.set_size(100, 72)
    return font


@functools.cache
def _advance(letter: str) -> float:
    """The width of a letter, for a font size of 1."""
    if _has(_default(), letter):
        return _default().load_char(ord(letter)).linearHoriAdvance / 65536 / 100
    return 1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.6


def _has(font: FT2Font, letter: str) -> bool:
    return font.get_char_index(ord(letter)) != 0


def _families_with(letters: frozenset[str]) -> dict[str, str]:
    """An installed family for each letter that one has; searched again for the others, because fonts may be
    installed meanwhile."""
    unknown = set(letters - _FAMILIES.keys())
    for path in _font_files() if unknown else ():
        font = _drawable(path)
        if font is not None and (found := {letter for letter in unknown if _has(font, letter)}):
            if path not in {entry.fname for entry in font_manager.fontManager.ttflist}:
                font_manager.fontManager.addfont(path)
            _FAMILIES.update(dict.fromkeys(found, font.family_name))
            unknown -= found
        if not unknown:
            break
    return {letter: _FAMILIES[letter] for letter in letters & _FAMILIES.keys()}


def _font_files() -> list[str]:
    """Font files of matplotlib and of the system. Matplotlib lists the latter once, in a file, so its list
    lacks the fonts that were installed since."""
    known = (entry.fname for entry in font_manager.fontManager.ttflist)
    return sorted({*known, *font_manager.findSystemFonts()})


def _drawable(path: str) -> FT2Font | None:
    """An upright font of normal weight; None for any other, and for one that matplotlib cannot draw, such as
    colour bitmaps."""
    try:
        font = FT2Font(path)
        font.set_size(12, 72)
        properties = font_manager.ttfFontProperty(font)
    except (OSError, RuntimeError, ValueError, KeyError):
        return None
    if (properties.style, properties.weight) != ("normal", 400) or "Last Resort" in properties.name:  # boxes
        return None
    return font
