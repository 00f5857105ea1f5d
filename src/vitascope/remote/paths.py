"""Paths in stores: a folder that was listed once, with those methods of `pathlib.Path` that formats call."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Self, TypeAlias, cast

from vitascope.remote import cache, stores


@functools.total_ordering
@dataclasses.dataclass(frozen=True, slots=True)
class StorePath:
    """A folder in a store, or what was listed below it; hidden objects are left out.

    It stands in for a `Path` where folders are listed and files are read as a whole. A file's `object` tells
    the rest.
    """

    url: str
    """Of the folder that was listed."""
    below: tuple[str, ...]
    """The names from there to this path."""
    listing: Mapping[tuple[str, ...], stores.RemoteObject | dict[str, None]] = dataclasses.field(
        repr=False, compare=False
    )
    """By `below`: an object, or the names in a folder."""

    def __str__(self) -> str:
        return self.object.url if self.is_file() else "/".join((self.url, *self.below))

    def as_posix(self) -> str:  # noqa: D102 - as of `Path`, like the rest
        return str(self)

    def __lt__(self, other: "StorePath") -> bool:
        return self.parts < other.parts

    def __truediv__(self, name: str | PurePosixPath) -> Self:
        return dataclasses.replace(self, below=(*self.below, *PurePosixPath(name).parts))

    @property
    def parts(self) -> tuple[str, ...]:  # noqa: D102
        return (self.url, *self.below)

    @property
    def name(self) -> str:  # noqa: D102
        return self.parts[-1].rpartition("/")[2]

    @property
    def stem(self) -> str:  # noqa: D102
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:  # noqa: D102
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Self:  # noqa: D102
        return dataclasses.replace(self, below=self.below[:-1])

    @property
    def object(self) -> stores.RemoteObject:
        """The object of a file."""
        return cast("stores.RemoteObject", self.listing[self.below])

    def relative_to(self, folder: "StorePath") -> PurePosixPath:  # noqa: D102
        return PurePosixPath(*self.below[len(folder.below) :])

    def is_file(self) -> bool:  # noqa: D102
        return isinstance(self.listing.get(self.below), stores.RemoteObject)

    def is_dir(self) -> bool:  # noqa: D102
        return isinstance(self.listing.get(self.below), dict)

    def iterdir(self) -> Iterator[Self]:  # noqa: D102
        return (self / name for name in cast("dict[str, None]", self.listing[self.below]))

    def stat(self) -> os.stat_result:
        """The size; all else is 0."""
        return os.stat_result((*[0] * 6, self.object.size, *[0] * 3))

    def read_bytes(self) -> bytes:
        """The content, from the cache or the store; a StoreError if it changed since it was listed."""
        try:
            return cache.read(self.object)
        except stores.ChangedError as error:
            raise stores.StoreError(f"{self}: {error}; repeat this") from error


AnyPath: TypeAlias = Path | StorePath
"""A path here or in a store, for whoever lists folders and reads whole files."""


def folder_at(place: str) -> AnyPath:
    """A local path, `~` expanded, or the folder of a URL as `listed_folder` gives it."""
    return listed_folder(place) if stores.is_url(place) else Path(place).expanduser()


def stored_at(place: str) -> stores.RemoteObject | StorePath | None:
    """The object, or the folder as `listed_folder` gives it, of a URL; None for a local path."""
    return (stores.find_object(place) or listed_folder(place)) if stores.is_url(place) else None


def listed_folder(url: str) -> StorePath:
    """The folder of a URL as it is now.

    Raises:
        StoreError: no such folder, an object with the name of a folder, or the store does not answer.
    """
    url = url.rstrip("/")
    listing: dict[tuple[str, ...], stores.RemoteObject | dict[str, None]] = {(): {}}
    for found in stores.walk(url):
        names = tuple(stores.name_in(found.url, url).split("/"))
        for depth, name in enumerate(names):
            folder = listing.setdefault(names[:depth], {})
            if isinstance(folder, stores.RemoteObject):
                raise stores.StoreError(
                    f"{found}: another object has the name of its folder: rename one of them"
                )
            folder[name] = None
        listing[names] = found
    return StorePath(url, (), listing)
