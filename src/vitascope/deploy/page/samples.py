"""The pictures that a page offers: small copies without the metadata of their files, such as places."""

import base64
import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import NamedTuple

from PIL import Image

from vitascope.data.splits import ImageSet
from vitascope.data.stored import as_pictures
from vitascope.deploy.export.export import evenly_spaced
from vitascope.deploy.server.page_content import SamplePicture, samples_for
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.models.decoding import ImageSource, source_name
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.preprocess import Preprocess

TEST = "test"
"""Test images of the model's run, in the place of pictures."""
MOST = 8
"""Pictures in a page."""
LONGEST = 512
"""Pixels of the longer side of each."""
MOST_BYTES = 100_000
"""Of each."""
FORMS = (("PNG", 0), *(("JPEG", quality) for quality in (90, 75, 50, 25)))
"""How a picture is encoded: as the first form that is small enough; the last one always is."""


class Samples(NamedTuple):
    """The pictures of a page."""

    pictures: Sequence[SamplePicture]
    description: str
    """Whose pictures they are, in words."""

    def to_json(self) -> list[dict[str, str]]:
        """What `web/local.js` reads."""
        return [
            {
                "name": one.name,
                "title": one.title,
                "type": one.media_type,
                "base64": base64.b64encode(one.content).decode(),
            }
            for one in self.pictures
        ]


def choose_samples(
    given: ImageSource | Iterable[ImageSource] | None,
    engine: TorchEngine,
    tests: Callable[[], ImageSet | None],
) -> Samples:
    """The given pictures, test images of the model's run, or those of vitascope that suit the model.

    Nobody's own pictures are in a page that others may get unless they were asked for.

    Raises:
        ImageError: a picture cannot be read.
        UserError: test images of a model without a run.
    """
    if given is None:
        own = samples_for(engine)
        words = f"built-in pictures: {', '.join(one.name for one in own)}" if own else "none"
        if len(own) < len(engine.class_names) and tests() is not None:
            words += f"; samples={TEST} takes test images of the run, of every class"
        return Samples(own, words)
    if isinstance(given, str) and given == TEST:
        images = tests()
        if images is None:
            raise UserError(f"samples {TEST}: the model has no run with test images; name pictures")
        sources, name = images.sources, images.noun
        chosen = some_of_each_class(images, MOST)
        names = [] if images.targets is None else images.targets.names()
        titles = [
            f"{', '.join(names[place]) or 'no class'} ({name})" if names else f"{name} {place}"
            for place in chosen
        ]
        description = f"{some_of(len(chosen), len(sources), name)} of the run"
    else:
        sources = as_pictures(given)
        chosen = evenly_spaced(range(len(sources)), MOST)
        titles = [title_of(sources[place], place) for place in chosen]
        description = some_of(len(chosen), len(sources), "given picture")
    pictures = [
        SamplePicture(str(number), title, *encoded(shrunk(engine.preprocess, sources[place], LONGEST)), ())
        for number, (place, title) in enumerate(zip(chosen, titles, strict=True))
    ]
    return Samples(pictures, description if pictures else "none")


def some_of_each_class(images: ImageSet, most: int) -> list[int]:
    """The indices of at most `most` images: of every class as many as of the others, as far as possible."""
    if images.targets is None:
        return evenly_spaced(range(len(images)), most)
    turns = itertools.zip_longest(*(places.tolist() for places in images.targets.by_class()))
    places = (place for turn in turns for place in turn if place is not None)
    return sorted(itertools.islice(dict.fromkeys(places), most))


def some_of(chosen: int, count: int, noun: str) -> str:
    """`8 of 20 test images`, or `5 test images`."""
    return f"{f'{chosen} of ' if chosen < count else ''}{counted(count, noun)}"


def title_of(source: ImageSource, place: int) -> str:
    """The name of a picture's file without its folders, which are the reader's own."""
    name = source_name(source)
    return f"picture {place + 1}" if name.startswith("<") else PurePath(name).name


def shrunk(preprocess: Preprocess, source: ImageSource, longest: int) -> Image.Image:
    """A picture in the model's colours, at most `longest` pixels high and wide."""
    planes = preprocess.whole_pixels(source)  # (C, H, W)
    image = Image.fromarray(planes[0] if len(planes) == 1 else planes.transpose(1, 2, 0))
    image.thumbnail((longest, longest))
    return image


def encoded(image: Image.Image) -> tuple[str, bytes]:
    """The media type and content of a picture's file: without loss if that is small."""
    for form, quality in FORMS:
        file = io.BytesIO()
        image.save(file, form, quality=quality)
        if file.tell() <= MOST_BYTES:
            break
    return f"image/{form.lower()}", file.getvalue()
