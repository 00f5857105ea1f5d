"""What the explorer's page consists of: its files, and pictures to try. Needs no library of servers."""

import io
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from vitascope.data.samples import CREDIT, PHOTOS, SYNONYMS

if TYPE_CHECKING:
    from vitascope.models.engines.engine import Engine  # torch is imported later

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
"""The files that `web/` may have."""


class SamplePicture(NamedTuple):
    """An encoded picture, its name in the URL, a title with its source, and words for what it shows."""

    name: str
    title: str
    media_type: str
    content: bytes
    words: tuple[str, ...]


def web_files(package: str = "vitascope.deploy.server", folder: str = "web") -> dict[str, tuple[str, bytes]]:
    """The page's files by name, with their media types; those of another package for its page."""
    return {
        path.name: (media_type, path.read_bytes())
        for path in files(package).joinpath(folder).iterdir()
        if (media_type := MEDIA_TYPES.get(path.name[path.name.rfind(".") :]))
    }


def samples_for(engine: "Engine") -> list[SamplePicture]:
    """Pictures of the classes that a model knows by name; all that suit its channels if its classes have no
    names."""
    words = {word.lower() for name in engine.class_names for word in re.findall(r"[^\W_]+", name)}
    return [
        one
        for one in _samples(engine.preprocess.channels)
        if not words or any(each in words or f"{each}s" in words for each in one.words)
    ]


@cache
def _samples(channels: int) -> tuple[SamplePicture, ...]:
    """Photographs for 3 channels; for 1, the first test image of each of scikit-learn's digits."""
    found = []
    if channels == 3:
        for name, path in PHOTOS.items():
            title = f"{name} ({CREDIT})"
            found.append(SamplePicture(name, title, "image/jpeg", path.read_bytes(), SYNONYMS[name]))
    if channels == 1:
        from vitascope.data.datasets import open_data

        test = open_data("digits").measured
        for name, places in zip(test.class_names, test.truth.by_class(), strict=True):
            file, first = io.BytesIO(), int(places[0])
            Image.fromarray(np.asarray(test.sources[first])).save(file, "PNG")
            title = f"A handwritten {name} (scikit-learn's digits)"
            found.append(SamplePicture(f"digit-{name}", title, "image/png", file.getvalue(), (name,)))
    return tuple(found)
