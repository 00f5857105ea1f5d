"""DATA in a store: its images, and its listing as a folder of empty files, which the formats read."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

from vitascope.data.decoding import Encoded, ImageSource
from vitascope.data.formats.archive import TAR_SUFFIXES
from vitascope.data.formats.shard_index import MAX_BYTES, check_size
from vitascope.data.listing import IMAGE_SUFFIXES, is_system_folder, suffix_of
from vitascope.data.splits import ImageSet, Inventory
from vitascope.data.table_options import TABLE_SUFFIXES, TableOptions, is_table
from vitascope.errors import UserError
from vitascope.remote import cache
from vitascope.remote.stores import ChangedError, RemoteObject, StoreError, find_object, is_url, name_in, walk
from vitascope.storage import explaining_failure

S = TypeVar("S")

_NAMES = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)
"""Errors about the name of a file."""
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


def is_stored_image(data: str) -> bool:
    """Whether the data are one picture in a store, by their name."""
    return is_url(data) and suffix_of(data) in IMAGE_SUFFIXES


def fetched_ahead(sources: Iterable[S]) -> Generator[S, None, None]:
    """The sources, while the next ones are fetched from their store by threads."""
    return cache.fetched_ahead(
        sources, lambda source: source.object if isinstance(source, StoredImage) else None
    )


def _copy(found: RemoteObject, path: Path) -> None:
    """Write an object to a file, block by block from the cache."""
    try:
        with open(path, "wb") as file:
            shutil.copyfileobj(cache.ObjectReader(found), file, cache.BLOCK)
    except ChangedError as error:
        raise StoreError(f"{found}: {error}; repeat this") from error


class Mirror:
    """The listing of a folder in a store as a local folder of empty files, without hidden ones.

    Names and sizes of tars are real, and so is the text that describes shards.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url.rstrip("/"), folder
        self._objects: dict[str, RemoteObject] = {}
        for found in walk(self.url):
            name = name_in(found.url, self.url)
            if any(map(is_system_folder, name.split("/")[:-1])):
                continue
            self._objects[name] = found
            path = folder / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            except OSError as error:
                if error.errno not in _NAMES:
                    raise
                raise StoreError(
                    f"{found}: no local path can have this name ({error.strerror}; another object may have "
                    "the name of its folder): rename the object"
                ) from error
            if name in MAX_BYTES:
                check_size(found, name, found.size)
                _copy(found, path)
            elif suffix_of(name) == ".tar":
                os.truncate(path, found.size)

    def object_at(self, path: str | os.PathLike[str]) -> RemoteObject:
        """The object that a path in the folder stands for."""
        return self._objects[os.path.relpath(path, self.folder)]

    def contains(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path lies in the folder."""
        return Path(path).is_relative_to(self.folder)

    def renamed(self, text: str) -> str:
        """A text with the URL in place of the folder."""
        return text.replace(str(self.folder), self.url)


@dataclasses.dataclass(frozen=True)
class Mirrored:
    """Data in a store as local data, while the context of `mirrored` lasts."""

    place: str
    table: TableOptions
    mirrors: Sequence[Mirror]

    @property
    def is_listing(self) -> bool:
        """Whether the place itself is a folder of empty files."""
        return any(self.place == str(mirror.folder) for mirror in self.mirrors)

    def file_of(self, path: Path) -> str | RemoteObject:
        """What to read for a path."""
        mirror = self._mirror(path)
        return str(path) if mirror is None else mirror.object_at(path)

    def stored(self, found: Inventory) -> Inventory:
        """An inventory of the place, with the objects in place of the empty files."""
        root: Path | str | None = found.root
        if isinstance(root, Path) and (mirror := self._mirror(root)) is not None:
            root = mirror.renamed(str(root))
        return dataclasses.replace(
            found,
            sets=tuple(dataclasses.replace(each, sources=self._sources(each)) for each in found.sets),
            root=root,
            unused=tuple(map(self.renamed, found.unused)),
            notes=tuple(map(self.renamed, found.notes)),
            unlabelled=self.renamed(found.unlabelled),
        )

    def renamed(self, text: str) -> str:
        """A text with URLs in place of local folders."""
        for mirror in self.mirrors:
            text = mirror.renamed(text)
        return text

    def _sources(self, images: ImageSet) -> Sequence[ImageSource]:
        if not isinstance(images.sources, list):
            return images.sources  # shards, whose files are objects already, and pixels in memory
        return [self._source(source) for source in images.sources]

    def _source(self, source: ImageSource) -> ImageSource:
        if not isinstance(source, str | os.PathLike):
            return source
        mirror = self._mirror(source)
        return source if mirror is None else StoredImage(mirror.object_at(source))

    def _mirror(self, path: str | os.PathLike[str]) -> Mirror | None:
        return next((mirror for mirror in self.mirrors if mirror.contains(path)), None)


@contextmanager
def mirrored(data: str, table: TableOptions) -> Iterator[Mirrored]:
    """Data of which some are in a store, as local data: a folder is mirrored, a table and an archive copied.

    Raises:
        StoreError: no such object or folder, or the store does not answer.
        UserError: more data than the cache has room for.
    """
    with ExitStack() as opened:
        mirrors: list[Mirror] = []

        def mirror(url: str) -> str:
            parent = Path(tempfile.gettempdir())
            with explaining_failure(parent, "the listing", "make room, or set TMPDIR to another folder"):
                folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="vitascope-", dir=parent))
                mirrors.append(Mirror(url, Path(folder).resolve()))
            return str(mirrors[-1].folder)

        place = data
        if table.images is not None and is_url(table.images):
            table = dataclasses.replace(table, images=mirror(table.images))
        if is_url(data):
            found = find_object(data)
            if found is None:
                place = mirror(data)
            elif is_table(data):
                folder = data.rpartition("/")[0]
                place = str(cache.copied([found], folder) / name_in(data, folder))
                if table.images is None:
                    table = dataclasses.replace(table, images=mirror(folder))
            elif data.lower().endswith(_ARCHIVES):
                folder = data.rpartition("/")[0]
                place = str(cache.copied([found], folder) / name_in(data, folder))
            else:
                raise UserError(
                    f"{data}: neither a folder, nor a table or an archive by its name "
                    f"({', '.join((*TABLE_SUFFIXES, *_ARCHIVES))})"
                )
        try:
            yield Mirrored(place, table, mirrors)
        except UserError as error:
            text = str(error)
            for each in mirrors:
                text = each.renamed(text)
            error.args = (text if place == data else text.replace(place, data),)
            raise


def hub_id(data: str) -> str:
    """The id of a whole data set of the hub, which its own library reads; other data stay as they are."""
    found = _DATA_SET.fullmatch(data)
    return data if found is None else f"{found[1]}@{found[2] or 'main'}"
