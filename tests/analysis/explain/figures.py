"""The visible content of a figure."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import matplotlib.text
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from vitascope.analysis.explain import plots


@contextlib.contextmanager
def coarse() -> Iterator[None]:
    """Save figures with a third of the usual pixels per inch, in less than half the time."""
    with matplotlib.rc_context({"savefig.dpi": 40}):
        yield


def drawn(figure: Figure, tmp_path: Path) -> np.ndarray:
    """The figure as saved: pixels (H, W, 3)."""
    with coarse():
        path = plots.save_figure(figure, tmp_path / "new" / "figure.png")
    assert path == tmp_path / "new" / "figure.png"
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def assert_shows_something(pixels: np.ndarray) -> None:
    assert min(pixels.shape[:2]) > 50
    assert (pixels != 255).any(axis=-1).mean() > 0.01  # more than 1% is not white
    assert num_colours(pixels) > 10


def num_colours(pixels: np.ndarray) -> int:
    """The number of different colours among uint8 pixels (H, W, 3)."""
    red, green, blue = np.moveaxis(pixels.astype(np.int32), -1, 0)
    return len(np.unique(red << 16 | green << 8 | blue))  # sorts numbers, which is faster than rows


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))
