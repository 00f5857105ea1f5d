"""The identity of an image's content."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data import Stored, noise
from vitascope.data.contents import (
    BLOCK,
    DIGEST,
    PIECE,
    WHOLE,
    content_of,
    contents_of,
    digest_of,
    digests_of,
    first_of_content,
)


@pytest.mark.parametrize("size", [0, 1, WHOLE, WHOLE + 1, 10 * WHOLE])
def test_the_content_is_identified_by_size_and_bytes(tmp_path: Path, size: int) -> None:
    content = bytearray(np.random.default_rng(0).bytes(size))
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    first = content_of(path)
    assert content_of(bytes(content)) == content_of(Stored(bytes(content))) == first
    path.write_bytes(content + b"\0")
    assert content_of(path) != first
    places = {0, size - 1, size // 2} if size <= WHOLE else {0, PIECE - 1, size - PIECE, size - 1}
    for place in places if size else ():
        other = content.copy()
        other[place] ^= 1
        path.write_bytes(other)
        assert content_of(path) != first


def test_copies_are_found_by_their_first_image_but_not_among_unreadable_or_empty_files(
    tmp_path: Path,
) -> None:
    sources = []
    for number, content in enumerate((b"one", b"two", b"one", b"", b"", b"two", b"one")):
        (tmp_path / f"{number}.png").write_bytes(content)
        sources.append(tmp_path / f"{number}.png")
    sources += [tmp_path / "missing.png", tmp_path / "lost.png"]
    assert first_of_content(contents_of(sources)).tolist() == [0, 1, 0, 3, 4, 1, 0, 7, 8]
    arrays = [noise(4, 4, seed=seed) for seed in (1, 2, 1)] + [noise(8, 2, seed=1)]
    assert first_of_content(contents_of(arrays)).tolist() == [0, 1, 0, 3]
    assert first_of_content(contents_of([])).tolist() == []


@pytest.mark.parametrize("size", [0, 1, WHOLE + 1, BLOCK + 5])
def test_every_byte_of_a_file_is_in_its_digest(tmp_path: Path, size: int) -> None:
    content = bytearray(np.random.default_rng(0).bytes(size))
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    first = digest_of(path)
    assert len(first) == DIGEST
    assert digest_of(bytes(content)) == digest_of(Stored(bytes(content))) == first
    assert digest_of(bytes(content) + b"\0") != first
    for place in {0, 1 + PIECE, size // 2, size - 1} if size > 1 else ():
        other = content.copy()
        other[place] ^= 1
        path.write_bytes(other)
        assert digest_of(path) != first


def test_what_cannot_be_identified_has_an_empty_digest(tmp_path: Path) -> None:
    picture = Image.fromarray(noise(2, 2))
    assert digest_of(tmp_path / "missing.png") == digest_of(picture) == digest_of(torch.zeros(2, 2)) == b""
    found = digests_of([tmp_path / "missing.png", b"x", *[tmp_path] * 20])
    assert found.tolist()[:2] == [b"", digest_of(b"x")]
    assert found.dtype == f"S{DIGEST}"
