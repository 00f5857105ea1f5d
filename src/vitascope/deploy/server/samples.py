"""Pictures to begin with, where nobody has one at hand: none of them ours, all of them in scikit-learn."""

from __future__ import annotations

import dataclasses
import io
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from vitascope.data.datasets import open_data
from vitascope.data.preprocess import Preprocess


@dataclasses.dataclass(frozen=True)
class SamplePicture:
    """A picture to try."""

    name: str
    """In its address."""
    title: str
    """What it shows, and whose it is."""
    media_type: str
    """Its media type."""
    content: bytes
    """The encoded picture."""


def samples_for(preprocess: Preprocess) -> tuple[SamplePicture, ...]:
    """Photographs for a model of colours; for one of grey, `digits`' test images."""
    return {1: _digits, 3: _photographs}.get(preprocess.channels, tuple)()


@cache
def _photographs() -> tuple[SamplePicture, ...]:
    """scikit-learn's two sample photographs, both CC BY 2.0."""
    from sklearn.datasets import images

    folder = Path(images.__file__).parent
    titles = {
        "china": "A temple in China (danielbuechele, CC BY 2.0)",
        "flower": "A flower (vultilion, CC BY 2.0)",
    }
    return tuple(
        SamplePicture(name, title, "image/jpeg", (folder / f"{name}.jpg").read_bytes())
        for name, title in titles.items()
    )


@cache
def _digits() -> tuple[SamplePicture, ...]:
    """The first test image of each digit."""
    test = open_data("digits").final
    first = [int(np.flatnonzero(test.labels == label)[0]) for label in range(len(test.class_names))]
    found = []
    for name, index in zip(test.class_names, first, strict=True):
        written = io.BytesIO()
        Image.fromarray(np.asarray(test.sources[index])).save(written, "PNG")
        title = f"A handwritten {name} (scikit-learn's digits)"
        found.append(SamplePicture(f"digit-{name}", title, "image/png", written.getvalue()))
    return tuple(found)
