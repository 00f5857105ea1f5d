"""What an image is, whatever its name: the identity of its content, and images with the same one."""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import UnionType

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from vitascope.models.decoding import Encoded, ImageSource, encoded_bytes, source_name
from vitascope.network import Threads

DIGEST = 16
"""Bytes of a digest, which the cache of features has for every image."""
BLOCK = 2**20
"""Bytes of a file that are read at a time."""
UNREADABLE = b"unreadable"
"""The content of a file that cannot be opened."""
_SHORT = 12  # bytes of the hash in a content
_EMPTY = b"0-"  # how the contents of empty files begin
_THREADS = 16


def content_of(source: ImageSource) -> bytes:
    """The identity of an image's content: the size in bytes and a BLAKE2b hash of all bytes of the encoded
    picture (a file and its copy in a shard have the same), or of the shape and the pixels of an array."""
    try:
        size, digest = _hashed(source, _SHORT)
    except (OSError, EOFError):
        return UNREADABLE
    return f"{size}-{digest.hex()}".encode()


def digest_of(source: ImageSource) -> bytes:
    """The hash of `content_of` in `DIGEST` bytes. Empty for what has no such identity: a file that cannot be
    read, an image of Pillow, which has more than pixels, and a tensor."""
    if not isinstance(source, str | os.PathLike | bytes | Encoded | np.ndarray):
        return b""
    try:
        return _hashed(source, DIGEST)[1]
    except (OSError, EOFError):
        return b""


def _hashed(source: ImageSource, length: int) -> tuple[int, bytes]:
    """The number of bytes of a picture, and a BLAKE2b hash of all of them, so many bytes long.

    Raises:
        OSError, EOFError: it cannot be read.
    """
    digest, size = hashlib.blake2b(digest_size=length), 0
    if isinstance(source, str | os.PathLike):
        with open(source, "rb", buffering=0) as file:
            while block := file.read(BLOCK):
                digest.update(block)
                size += len(block)
        return size, digest.digest()
    content = encoded_bytes(source)
    if content is None:
        assert isinstance(source, np.ndarray)
        digest.update(f"{source.dtype.str} {source.shape} ".encode())
        content = source.tobytes()
    digest.update(content)
    return len(content), digest.digest()


def contents_of(sources: Sequence[ImageSource]) -> npt.NDArray[np.bytes_]:
    """`content_of` each source, (N,), with a bar if that takes long."""
    found = _of_each(content_of, sources, in_memory=np.ndarray)
    bar = tqdm(found, "images identified", len(sources), delay=3, leave=False, disable=None)
    return np.array(list(bar), dtype=np.bytes_)


def digests_of(sources: Sequence[ImageSource]) -> npt.NDArray[np.bytes_]:
    """`digest_of` each source, (N,)."""
    found = _of_each(digest_of, sources, in_memory=np.ndarray | bytes)
    return np.array(list(found), dtype=f"S{DIGEST}")


def _of_each(
    identity: Callable[[ImageSource], bytes], sources: Sequence[ImageSource], in_memory: type | UnionType
) -> Iterator[bytes]:
    """The identity of each source; files are read by threads, because on a network drive each waits."""
    if not len(sources) or len(sources) <= _THREADS or isinstance(sources[0], in_memory):
        yield from map(identity, sources)
        return
    step = min(32, math.ceil(len(sources) / _THREADS))  # a task for each small file would take as long as it

    def part(start: int) -> list[bytes]:
        return [identity(source) for source in sources[start : start + step]]

    with Threads(_THREADS) as pool:
        for some in pool.map(part, range(0, len(sources), step)):
            yield from some


def first_of_content(contents: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
    """For each image, the index of the first one that has its content: (N,).

    An image without a copy is the first itself, and so are unreadable and empty files.
    """
    _, firsts, places = np.unique(contents, return_index=True, return_inverse=True)
    own = np.arange(len(contents))
    without = (contents == UNREADABLE) | np.char.startswith(contents, _EMPTY)
    return np.where(without, own, firsts[places])


def image_name(source: ImageSource, root: Path | str | None) -> str:
    """An image's path below the data's folder, or its URL; empty for pixels in memory."""
    if not isinstance(source, str | os.PathLike | Encoded):
        return ""
    name = source_name(source).replace("\\", "/")
    prefix = root.as_posix() if isinstance(root, Path) else root or ""
    return name.removeprefix(prefix).lstrip("/:") if prefix else name
