"""DATA in a store: folders, which are listed; tables and archives, which are copied."""

import dataclasses
import re

from vitascope.data.formats.archive import TAR_SUFFIXES
from vitascope.data.splits import ImageSet
from vitascope.data.table_options import TABLE_SUFFIXES, is_table
from vitascope.errors import UserError
from vitascope.remote import StoredImage, cache
from vitascope.remote.paths import AnyPath, StorePath, stored_at
from vitascope.remote.stores import RemoteObject, name_in

_ARCHIVES = (".zip", *TAR_SUFFIXES)
_DATA_SET = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/?")


def open_stored(url: str) -> AnyPath | None:
    """DATA in a store: a folder as it is listed now, or the local copy of a table or an archive; None for
    local DATA.

    Raises:
        StoreError: no such object or folder, or the store does not answer.
        UserError: another kind of object, or one that the cache has no room for.
    """
    stored = stored_at(url)
    if not isinstance(stored, RemoteObject):
        return stored
    if not is_table(url) and not url.lower().endswith(_ARCHIVES):
        raise UserError(
            f"{url}: neither a folder, nor a table or an archive by its name "
            f"({', '.join((*TABLE_SUFFIXES, *_ARCHIVES))})"
        )
    folder = url.rpartition("/")[0]
    return cache.copied([stored], folder) / name_in(url, folder)


def with_objects(images: ImageSet) -> ImageSet:
    """The same images, with `StoredImage`s in place of paths in a store."""
    if not isinstance(images.sources, list):
        return images  # shards, whose files are objects already, and pixels in memory
    sources = [
        StoredImage(source.object.url, source.object) if isinstance(source, StorePath) else source
        for source in images.sources
    ]
    return dataclasses.replace(images, sources=sources)


def hub_id(data: str) -> str:
    """The id of a whole data set of the hub, which its own library reads; other data stay as they are."""
    match = _DATA_SET.fullmatch(data)
    return data if match is None else f"{match[1]}@{match[2] or 'main'}"
