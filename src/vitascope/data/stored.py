"""DATA in a store: its images; folders, which are listed; tables and archives, which are copied."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias, TypeVar

from vitascope.data.decoding import Encoded
from vitascope.data.formats.archive import TAR_SUFFIXES
from vitascope.data.listing import IMAGE_SUFFIXES, is_system_folder, suffix_of
from vitascope.data.splits import ImageSet
from vitascope.data.table_options import TABLE_SUFFIXES, is_table
from vitascope.errors import UserError
from vitascope.remote import cache
from vitascope.remote.paths import StorePath, listed_folder
from vitascope.remote.stores import RemoteObject, find_object, is_url, name_in, walk

S = TypeVar("S")

_ARCHIVES = (".zip", *TAR_SUFFIXES)
_DATA_SET = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/?")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredImage(Encoded):
    """A picture in a store."""

    object: RemoteObject

    def __str__(self) -> str:
        return self.object.url

    def read_bytes(self) -> bytes:
        """The encoded picture, from the cache or from the store."""
        return cache.read(self.object)


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


def open_stored(url: str) -> Path:
    """DATA in a store: a folder as it is listed now, or the local copy of a table or an archive.

    Raises:
        StoreError: no such object or folder, or the store does not answer.
        UserError: another kind of object, or one that the cache has no room for.
    """
    found = find_object(url)
    if found is None:
        return listed_folder(url)
    if not is_table(url) and not url.lower().endswith(_ARCHIVES):
        raise UserError(
            f"{url}: neither a folder, nor a table or an archive by its name "
            f"({', '.join((*TABLE_SUFFIXES, *_ARCHIVES))})"
        )
    folder = url.rpartition("/")[0]
    return cache.copied([found], folder) / name_in(url, folder)


def with_objects(images: ImageSet) -> ImageSet:
    """The same images, with `StoredImage`s in place of paths in a store."""
    if not isinstance(images.sources, list):
        return images  # shards, whose files are objects already, and pixels in memory
    sources = [
        StoredImage(source.object) if isinstance(source, StorePath) else source for source in images.sources
    ]
    return dataclasses.replace(images, sources=sources)


def hub_id(data: str) -> str:
    """The id of a whole data set of the hub, which its own library reads; other data stay as they are."""
    match = _DATA_SET.fullmatch(data)
    return data if match is None else f"{match[1]}@{match[2] or 'main'}"
