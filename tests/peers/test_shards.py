"""The webdataset library reads our shards, and we read its shards: same bytes, same labels."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data import noise, sets_of, splits_of, write_tree
from vitascope.data.formats.shards import Shards
from vitascope.data.pack import pack
from vitascope.models.decoding import read_image

webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed (vitascope[peers])")


def samples(*paths: Path) -> Iterator[dict[str, Any]]:
    return iter(webdataset.WebDataset(list(map(str, paths)), shardshuffle=False))


def test_webdataset_reads_our_shards(tmp_path: Path) -> None:
    data = write_tree(tmp_path / "pictures", {"cat": 20, "dog": 20})
    pack(str(data), tmp_path / "shards")
    splits = splits_of(Shards(), str(tmp_path / "shards"), seed=0)
    for images in (splits.train, splits.val, splits.measured):
        theirs = list(samples(*sorted((tmp_path / "shards").glob(f"{images.name}-*.tar"))))
        assert [sample["png"] for sample in theirs] == [source.read_bytes() for source in images.sources]
        assert [int(sample["cls"]) for sample in theirs] == images.labels.tolist()


def test_webdataset_decodes_our_shards(tmp_path: Path) -> None:
    pack("digits", tmp_path / "shards")
    images = splits_of(Shards(), str(tmp_path / "shards"), seed=0).val
    theirs = webdataset.WebDataset(str(tmp_path / "shards" / "val-00000.tar"), shardshuffle=False)
    decoded = list(theirs.decode("pill").to_tuple("png", "cls"))
    assert [label for _, label in decoded] == images.labels.tolist()
    np.testing.assert_array_equal(
        np.stack([image for image, _ in decoded]),
        np.stack([np.asarray(read_image(source)) for source in images.sources]),
    )


@pytest.mark.parametrize("how", ["cls", "json"])
def test_shards_of_webdataset_are_read(tmp_path: Path, how: str) -> None:
    written = []
    with webdataset.ShardWriter(str(tmp_path / "set-%03d.tar"), maxcount=7, verbose=0) as writer:
        for number in range(20):
            buffer = io.BytesIO()
            Image.fromarray(noise(6, 6, seed=number)).save(buffer, "JPEG")
            label = {"cls": number % 3} if how == "cls" else {"json": {"label": number % 3, "text": "é"}}
            writer.write({"__key__": f"{'folder/' * 20}{number:03}", "jpg": buffer.getvalue(), **label})
            written.append(buffer.getvalue())
    images = sets_of(Shards(), tmp_path)["all"]
    assert len(images.sources.files) == 3
    assert [source.read_bytes() for source in images.sources] == written
    assert images.labels.tolist() == [number % 3 for number in range(20)]
