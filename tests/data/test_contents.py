"""The identity of an image's content."""

from pathlib import Path

import numpy as np
import pytest

from tests.data import noise
from vitascope.data.contents import (
    PIECE,
    UNREADABLE,
    WHOLE,
    content_of,
    contents_of,
    first_of_content,
)


@pytest.mark.parametrize("size", [0, 1, WHOLE, WHOLE + 1, 10 * WHOLE])
def test_the_content_is_identified_by_size_and_bytes(tmp_path: Path, size: int) -> None:
    content = bytearray(np.random.default_rng(0).bytes(size))
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    first = content_of(path)
    assert content_of(bytes(content)) == first
    path.write_bytes(content + b"\0")
    assert content_of(path) != first
    places = {0, size - 1, size // 2} if size <= WHOLE else {0, PIECE - 1, size - PIECE, size - 1}
    for place in places if size else ():
        other = content.copy()
        other[place] ^= 1
        path.write_bytes(other)
        assert content_of(path) != first


def test_a_file_that_cannot_be_opened_has_no_content(tmp_path: Path) -> None:
    assert content_of(tmp_path / "missing.png") == UNREADABLE


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
