"""Image files: paths, with the cells of their row in a table, and pictures in a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Self, TypeAlias, TypeVar

from vitascope.data.listing import IMAGE_SUFFIXES, is_system_folder, suffix_of
from vitascope.models.decoding import Encoded
from vitascope.remote import cache
from vitascope.remote.stores import RemoteObject, find_object, is_url, name_in, walk

S = TypeVar("S")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredImage(Encoded):
    """A picture in a store."""

    object: RemoteObject

    def __str__(self) -> str:
        return self.object.url

    def read_bytes(self) -> bytes:
        """The encoded picture, from the cache or from the store."""
        return cache.read(self.object)


class TableImage(str):
    """The path of an image, with the cells of its row."""

    __slots__ = ("cells",)
    cells: tuple[str, ...]

    @classmethod
    def of(cls, path: str, cells: Sequence[str]) -> Self:
        """The image of a path, with these cells."""
        image = cls(path)
        image.cells = tuple(cells)
        return image


ImageFile: TypeAlias = str | StoredImage
"""A path, or a picture in a store."""


def as_text(file: ImageFile) -> str:
    """An image file as text, which `from_text` reads in any process; of an object with size and version."""
    if isinstance(file, str):
        return file
    return "\t".join((file.object.url, str(file.object.size), file.object.version))


def from_text(text: str) -> ImageFile:
    """The image file of `as_text`."""
    if not is_url(text):
        return text
    url, size, version = text.rsplit("\t", 2)
    return StoredImage(RemoteObject(url, int(size), version))


def stored_images(url: str) -> Iterator[StoredImage]:
    """The object of this URL, or the images below this folder, in the order of `visible_files`.

    Raises:
        StoreError: no such object or folder, or the store does not answer.
    """
    found = find_object(url)
    if found is not None:
        yield StoredImage(found)
        return
    for each in walk(url):
        folders = name_in(each.url, url).split("/")[:-1]
        if suffix_of(each.url) in IMAGE_SUFFIXES and not any(map(is_system_folder, folders)):
            yield StoredImage(each)


def fetched_ahead(sources: Iterable[S]) -> Generator[S, None, None]:
    """The sources, while the next ones are fetched from their store by threads."""
    return cache.prefetched(
        sources, lambda source: source.object if isinstance(source, StoredImage) else None
    )
