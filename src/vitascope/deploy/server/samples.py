"""Pictures to try a model on: photographs and digits that come with scikit-learn."""

from __future__ import annotations

import dataclasses
import io
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from vitascope.data.datasets import open_data
from vitascope.data.preprocess import Preprocess

PHOTOGRAPHS = {
    "china": "A temple in China (danielbuechele, CC BY 2.0)",
    "flower": "A flower (vultilion, CC BY 2.0)",
}


@dataclasses.dataclass(frozen=True)
class SamplePicture:
    """An encoded picture, its name in the URL, and a title with its author."""

    name: str
    title: str
    media_type: str
    content: bytes


def samples_for(preprocess: Preprocess) -> tuple[SamplePicture, ...]:
    """Photographs for a model with 3 channels, test images of `digits` for one with 1."""
    return {1: _digits, 3: _photographs}.get(preprocess.channels, tuple)()


@cache
def _photographs() -> tuple[SamplePicture, ...]:
    from sklearn.datasets import images

    contents = {name: Path(images.__file__).with_name(f"{name}.jpg").read_bytes() for name in PHOTOGRAPHS}
    return tuple(SamplePicture(name, PHOTOGRAPHS[name], "image/jpeg", contents[name]) for name in contents)


@cache
def _digits() -> tuple[SamplePicture, ...]:
    """The first test image of each digit."""
    test = open_data("digits").final
    found = []
    for label, name in enumerate(test.class_names):
        file = io.BytesIO()
        first = int(np.flatnonzero(test.labels == label)[0])
        Image.fromarray(np.asarray(test.sources[first])).save(file, "PNG")
        title = f"A handwritten {name} (scikit-learn's digits)"
        found.append(SamplePicture(f"digit-{name}", title, "image/png", file.getvalue()))
    return tuple(found)
