"""A shard on the disk or in a store: opened, or read in parts."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import IO, TypeAlias, cast

from vitascope.remote import cache
from vitascope.remote.stores import ChangedError, RemoteObject, StoreError
from vitascope.storage import READ_BYTES

ShardFile: TypeAlias = str | RemoteObject
"""A path, or an object, of which the blocks that are read are cached."""


def size_of(shard: ShardFile) -> int:
    """The size in bytes."""
    return shard.size if isinstance(shard, RemoteObject) else os.stat(shard).st_size


def open_shard(shard: ShardFile) -> AbstractContextManager[IO[bytes]]:
    """The shard as an open file without a buffer."""
    if isinstance(shard, RemoteObject):
        return cast("IO[bytes]", cache.ObjectReader(shard))
    return open(shard, "rb", buffering=0)


def read_at(shard: ShardFile, offset: int, size: int) -> bytes:
    """A part of a shard.

    Raises:
        EOFError: the shard ends earlier.
        StoreError: an object that has changed, whose offsets have no meaning any more; as `cache.read`.
    """
    if isinstance(shard, RemoteObject):
        try:
            return cache.read(shard, offset, size)
        except ChangedError as error:
            raise StoreError(f"{shard}: {error}; list the shards again by repeating the command") from error
    descriptor = os.open(shard, READ_BYTES)  # in half the time of a file object
    try:
        os.lseek(descriptor, offset, os.SEEK_SET)
        content = os.read(descriptor, size)
        while len(content) < size:  # some network file systems return a part
            more = os.read(descriptor, size - len(content))
            if not more:
                raise EOFError(f"the shard ends {size - len(content):,} bytes too early")
            content += more
    finally:
        os.close(descriptor)
    return content
