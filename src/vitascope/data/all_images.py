"""All images of some data, in the splits that they have, with their labels as text."""

import itertools
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import overload

from vitascope.data.datasets import image_file, read_data
from vitascope.data.splits import ImageSet
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions
from vitascope.errors import UserError
from vitascope.formatting import SEPARATOR
from vitascope.models.decoding import Encoded, ImageSource, source_name
from vitascope.remote import source_at

SPLITS = ("train", "val", "test", "all")
"""Names of splits; `all` are the images of data that are not divided."""


class AllImages(Sequence[ImageSource]):
    """The images of several sets, one after the other.

    Attributes:
        names: of each image: its path, or for pixels in memory its split and number, `test/17`.
        labels: of each image: its class, or its classes with `SEPARATOR` between them; empty for an image
            without one. None if no image has a label.
        splits: the name of each image's split.
        class_names: of all classes.
        several: whether an image may have several classes.
    """

    def __init__(self, sets: Sequence[ImageSet]) -> None:
        self._sets = [images for images in sets if len(images)]
        self._ends = list(itertools.accumulate(map(len, self._sets)))
        self.names = [
            _name(source, images.name, number)
            for images in self._sets
            for number, source in enumerate(images.sources)
        ]
        self.splits = [images.name for images in self._sets for _ in range(len(images))]
        self.class_names = tuple(dict.fromkeys(name for images in self._sets for name in images.class_names))
        self.several = any(
            images.targets is not None and images.targets.strata is None for images in self._sets
        )
        if self.several and (wrong := next((name for name in self.class_names if SEPARATOR in name), None)):
            raise UserError(
                f"the class name {wrong!r} contains {SEPARATOR!r}, which separates the classes of an image: "
                "rename the class"
            )
        labelled = any(images.targets is not None for images in self._sets)
        self.labels = [label for images in self._sets for label in _labels(images)] if labelled else None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> ImageSource: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ImageSource]: ...
    def __getitem__(self, index: int | slice) -> ImageSource | Sequence[ImageSource]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number = bisect_right(self._ends, index)
        images = self._sets[number]
        return images.sources[index - self._ends[number] + len(images)]


def _labels(images: ImageSet) -> list[str]:
    if images.targets is None:
        return [""] * len(images)
    return [SEPARATOR.join(names) for names in images.targets.names()]


def _name(source: ImageSource, split: str, number: int) -> str:
    is_named = isinstance(source, str | os.PathLike | Encoded)
    return source_name(source) if is_named else f"{split}/{number}"


def all_images(data: str | Sequence[ImageSource], table: TableOptions = AS_RECOGNIZED) -> AllImages:
    """The images of DATA, with or without labels, of one image file, or of a list of pictures.

    Raises:
        UserError: no such data, or no images in it; as `read_data`.
    """
    if not isinstance(data, str):
        sources = list(map(source_at, data)) if isinstance(data, list) else data
        images = AllImages([ImageSet("all", sources)])
    elif (picture := image_file(data)) is not None:
        images = AllImages([ImageSet("all", [picture])])
    else:
        images = AllImages([each for each in read_data(data, table).sets if each.name in SPLITS])
    if not len(images):
        raise UserError(f"{data if isinstance(data, str) else 'the list'}: no images in it")
    return images
