import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data import Stored, noise
from vitascope.data.contents import (
    BLOCK,
    DIGEST,
    content_of,
    contents_of,
    digest_of,
    digests_of,
    first_of_content,
)


@pytest.mark.parametrize("size", [0, 1, 4096, BLOCK + 5])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_contents_are_equal_if_and_only_if_all_bytes_are(size: int, data: st.DataObject) -> None:
    content = np.random.default_rng(0).bytes(size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.bin"
        path.write_bytes(content)
        for identity in (content_of, digest_of):
            first = identity(path)
            assert identity(content) == identity(Stored(content)) == first
            assert identity(content + b"\0") != first
        if size:
            other = bytearray(content)
            other[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
            before = content_of(path), digest_of(path)
            path.write_bytes(other)
            assert content_of(path) != before[0]
            assert digest_of(path) != before[1]
    assert len(digest_of(content)) == DIGEST


def test_large_pictures_that_differ_in_a_spot_are_no_copies(tmp_path: Path) -> None:
    for number in range(20):  # 768 KB each, black but for 8 x 8 pixels
        pixels = np.zeros((512, 512, 3), dtype=np.uint8)
        down, across = divmod(number, 5)
        pixels[100 * down : 100 * down + 8, 100 * across : 100 * across + 8] = 255
        Image.fromarray(pixels).save(tmp_path / f"{number}.bmp")
    contents = contents_of(sorted(tmp_path.iterdir()))
    assert len(np.unique(contents)) == 20


def test_copies_are_found_by_their_first_image_but_not_among_unreadable_or_empty_files(tmp_path) -> None:
    sources = []
    for number, content in enumerate((b"one", b"two", b"one", b"", b"", b"two", b"one")):
        (tmp_path / f"{number}.png").write_bytes(content)
        sources.append(tmp_path / f"{number}.png")
    sources += [tmp_path / "missing.png", tmp_path / "lost.png"]
    assert first_of_content(contents_of(sources)).tolist() == [0, 1, 0, 3, 4, 1, 0, 7, 8]
    arrays = [noise(4, 4, seed=seed) for seed in (1, 2, 1)] + [noise(8, 2, seed=1)]
    assert first_of_content(contents_of(arrays)).tolist() == [0, 1, 0, 3]
    as_others = [np.zeros((2, 2), np.uint8), np.zeros((1, 4), np.uint8), np.zeros((2, 2), np.int8)]
    assert first_of_content(contents_of(as_others)).tolist() == [0, 1, 2]
    assert first_of_content(contents_of([])).tolist() == []


def test_what_cannot_be_identified_has_an_empty_digest(tmp_path: Path) -> None:
    picture = Image.fromarray(noise(2, 2))
    assert digest_of(tmp_path / "missing.png") == digest_of(picture) == digest_of(torch.zeros(2, 2)) == b""
    found = digests_of([tmp_path / "missing.png", b"x", *[tmp_path] * 20])
    assert found.tolist()[:2] == [b"", digest_of(b"x")]
    assert found.dtype == f"S{DIGEST}"
