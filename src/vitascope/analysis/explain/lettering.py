"""Text of any script in figures: class names and file names."""

import contextlib
import functools
import unicodedata

import matplotlib
from matplotlib import font_manager
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

FAMILIES = (
    "Noto Sans CJK",
    "Source Han Sans",
    "WenQuanYi",
    "PingFang",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Noto Sans",
    "Noto Emoji",
    "Symbola",
    "STIXGeneral",
)
"""Beginnings of the names of font families that have the letters which matplotlib's own font lacks."""


def short(name: str, length: int = 14) -> str:
    """A class name in one short line; its middle is cut, as long names often differ only at the end."""
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    if len(name) <= length:
        return name
    tail = (length - 1) // 3
    return f"{name[: length - 1 - tail]}…{name[len(name) - tail :]}"


def fitted(name: str, inches: float, size: float) -> str:
    """As `short`, of at most this width at a font size in points."""
    length = len(name)
    while length > 1 and text_width(short(name, length), size) > inches:
        length -= 1
    return short(name, length)


def text_width(line: str, size: float) -> float:
    """A line's width in inches, at a font size in points; estimated where matplotlib's font has no letter."""
    return sum(_advance(letter) for letter in line) * size / 72


class LiteralFigure(Figure):
    """A figure whose texts are class names and file names of any script.

    Matplotlib reads text between two `$` as a formula. Here every text is literal, and letters come from the
    first installed font of `FAMILIES` that has them.
    """

    def draw(self, renderer: RendererBase) -> None:
        """Prepare the texts, then draw."""
        self.prepare_texts()
        super().draw(renderer)

    def prepare_texts(self) -> None:
        """Make every text literal, in fonts of any script."""
        for text in self.findobj(Text):
            assert isinstance(text, Text)
            text.set_parse_math(False)
            text.set_text(text.get_text().encode(errors="replace").decode())  # a file name may not be UTF-8
            text.set_fontfamily(["sans-serif", *_installed()])


def lay_out(figure: Figure) -> None:
    """Place the parts of a finished figure for good, so that `savefig` draws it only once."""
    if isinstance(figure, LiteralFigure):
        figure.prepare_texts()
    engine = figure.get_layout_engine()
    if figure.axes and engine is not None:
        engine.execute(figure)
    with matplotlib.rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
        figure.set_layout_engine(None)  # for "none", which is an engine too, `savefig` draws twice


@functools.cache
def _installed() -> list[str]:
    """The installed families of `FAMILIES`, in that order."""
    fonts = font_manager.fontManager
    # Matplotlib lists the system's fonts once, in a file, so its list lacks those installed since.
    for path in {*font_manager.findSystemFonts()} - {entry.fname for entry in fonts.ttflist}:
        with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError):  # it cannot draw this one
            fonts.addfont(path)
    names = sorted({entry.name for entry in fonts.ttflist})
    return [name for family in FAMILIES for name in names if name.startswith(family)]


@functools.cache
def _default() -> FT2Font:
    font = FT2Font(font_manager.findfont(font_manager.FontProperties()))
    font.set_size(100, 72)
    return font


@functools.cache
def _advance(letter: str) -> float:
    """The width of a letter, for a font size of 1."""
    if _default().get_char_index(ord(letter)):
        return _default().load_char(ord(letter)).linearHoriAdvance / 65536 / 100
    return 1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.6
