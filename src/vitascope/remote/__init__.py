"""Objects in stores and on web servers: listed, read through a bounded cache, and written.

This module is the door: it knows whether a place is a URL or a local path, and has the pictures of URLs.
"""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from vitascope.remote import cache
from vitascope.remote.stores import RemoteObject, find_object, is_url, name_in, walk

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredImage:
    """A picture in a store: a source, read as the bytes of a local file are."""

    url: str
    object: RemoteObject | None = None
    """As it was listed; None for the picture as it is when it is read."""

    def __str__(self) -> str:
        return self.url

    def read_bytes(self) -> bytes:
        """The encoded picture, from the cache or from the store; errors as `cache.read`."""
        return cache.fetched(self.url) if self.object is None else cache.read(self.object)

    def as_text(self) -> str:
        """The URL, with size and version where they are known; `source_at` reads it in any process."""
        listed = () if self.object is None else (str(self.object.size), self.object.version)
        return "\t".join((self.url, *listed))


def source_at(place: T) -> T | StoredImage:
    """The picture of a URL, or of `StoredImage.as_text`; anything else, such as a path, stays as it is."""
    if not is_url(place):
        return place
    url, *listed = place.rsplit("\t", 2)
    if len(listed) < 2:
        return StoredImage(place)
    return StoredImage(url, RemoteObject(url, int(listed[0]), listed[1]))


def url_name(place: str) -> str:
    """The last name in a URL; empty for a local path."""
    return place.rstrip("/").rpartition("/")[2] if is_url(place) else ""


def on_disk(place: T, copy: Callable[[str], Path]) -> T | Path:
    """The local copy of a URL; a local path stays as it is."""
    return copy(place.rstrip("/")) if is_url(place) else place


def objects_at(place: str) -> Iterable[tuple[tuple[str, ...], RemoteObject]] | None:
    """The object of a URL, or those below its folder by their names there; None for a local path.

    Raises:
        StoreError: no such object or folder, or the store does not answer.
    """
    if not is_url(place):
        return None
    if (object := find_object(place)) is not None:
        return [((), object)]
    return ((tuple(name_in(object.url, place).split("/")), object) for object in walk(place))
