import errno
import hashlib
import io
import itertools
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data import Stored, encoded, exif_of, noise, splits_of, write_picture, write_tree
from vitascope.cli.models import Pack
from vitascope.data import pack as packing
from vitascope.data.datasets import open_data
from vitascope.data.formats.shards import Shards
from vitascope.data.pack import pack
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError
from vitascope.models.decoding import Encoded, read_image


def content_of(images: ImageSet) -> Counter[tuple[bytes, int]]:
    sources = [
        s.read_bytes() if isinstance(s, Encoded) else Path(str(s)).read_bytes() for s in images.sources
    ]
    return Counter(zip(sources, images.labels.tolist(), strict=True))


def pictures(tmp_path: Path, count: int = 10) -> str:
    root = tmp_path / "pictures"
    for split in ("train", "val", "test"):
        write_tree(root / split, {"cat": count, "dog": count})
    return str(root)


def every_file(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def members(path: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return tar.getmembers()


def test_16_bit_pictures_keep_their_range_and_their_size(tmp_path: Path) -> None:
    for split, label in itertools.product(("train", "val", "test"), ("cat", "dog")):
        path = write_picture(tmp_path / "scans" / split / label / "1.png")
        Image.fromarray(noise(8, 8, 1).astype(np.uint16) * 16 + len(label + split)).save(path)
    before = open_data(str(tmp_path / "scans"))
    for out, image_size in (("whole", None), ("small", 4)):
        pack(str(tmp_path / "scans"), tmp_path / out, image_size=image_size)
        assert content_of(open_data(str(tmp_path / out)).train) == content_of(before.train)
    values = noise(8, 8, 1).astype(np.uint16) * 200
    suffix, content = packing._encoded(Image.fromarray(values), image_size=4)  # without a file
    assert suffix == "tif"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), values)


def test_files_keep_bytes_label_split_and_class_names(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"cat": 20, "dog": 20})  # which is split when it is packed
    for out, data in (("a", pictures(tmp_path)), ("b", str(tree))):
        pack(data, tmp_path / out, seed=4)
        before, after = open_data(data, seed=4), splits_of(Shards(), str(tmp_path / out), seed=9)
        for name, images in after.parts.items():
            assert content_of(images) == content_of(before.parts[name])
            assert images.class_names == before.parts[name].class_names
        assert after.parts.keys() == before.parts.keys()


def test_same_input_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pictures(tmp_path)
    pack(data, tmp_path / "one", image_size=6)
    monkeypatch.setattr("vitascope.network.usable_cores", lambda: 7)
    for path in Path(data).rglob("*.png"):
        path.touch()
    pack(data, tmp_path / "two", image_size=6)
    assert every_file(tmp_path / "one") == every_file(tmp_path / "two")


def test_shards_stay_below_their_size_and_the_index_describes_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(packing, "MB", 20_000)
    packed = pack(pictures(tmp_path), tmp_path / "shards", shard_mb=1)
    index = json.loads((tmp_path / "shards" / "index.json").read_text())
    lines = index["splits"]["train"]
    assert [line["file"] for line in lines] == [f"train-{number:05}.tar" for number in range(len(lines))]
    assert len(lines) > 2
    for line in lines:
        content = (tmp_path / "shards" / line["file"]).read_bytes()
        assert len(content) == line["bytes"] <= 20_000
        assert hashlib.sha256(content).hexdigest() == line["sha256"]
        headers = members(tmp_path / "shards" / line["file"])
        assert len(headers) == 2 * line["count"]
        for header in headers:  # no user and no time
            assert (header.mtime, header.uid, header.gid, header.uname, header.gname) == (0, 0, 0, "", "")
            assert header.mode == 0o644
    assert packed.index.images("train") == sum(line["count"] for line in lines) == 20
    assert index["class_names"] == ["cat", "dog"]


def test_digits_become_png_and_stay_grey(tmp_path: Path) -> None:
    pack("digits", tmp_path / "shards")
    before, after = open_data("digits"), splits_of(Shards(), str(tmp_path / "shards"), seed=0)
    assert after.channels == 1
    ours, theirs = (
        Counter(
            (np.asarray(read_image(source)).tobytes(), int(label))
            for source, label in zip(part.sources, part.labels, strict=True)
        )
        for part in (after.val, before.val)
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("format", "suffix"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("TIFF", "tif")]
)
def test_picture_without_a_suffix_gets_that_of_its_format(tmp_path, monkeypatch, format, suffix) -> None:
    picture = encoded(noise(8, 8), format)
    sources = [Stored(picture), picture]
    images = ImageSet("any", sources, ClassIndices(np.array([0, 1]), ("cat", "dog")))
    monkeypatch.setattr(packing, "open_data", lambda data, **_: Splits(images, images, None, channels=3))
    pack("anything", tmp_path / "shards")
    names = [member.name for member in members(tmp_path / "shards" / "val-00000.tar")]
    assert names == ["00000000.cls", f"00000000.{suffix}", "00000001.cls", f"00000001.{suffix}"]


def test_larger_pictures_are_resized_by_their_shorter_side_and_others_kept(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    small = write_picture(root / "train" / "cat" / "small.png", size=(10, 40))
    write_picture(root / "train" / "dog" / "large.png", size=(30, 90))
    write_tree(root / "val", {"cat": 1, "dog": 1})
    pack(str(root), tmp_path / "shards", image_size=10)
    train = splits_of(Shards(), str(tmp_path / "shards"), seed=0).train
    kept, resized = (train.sources[int(np.flatnonzero(train.labels == label)[0])] for label in (0, 1))
    assert kept.read_bytes() == small.read_bytes()
    image = Image.open(io.BytesIO(resized.read_bytes()))
    assert (image.format, image.size) == ("JPEG", (30, 10))
    expected = Image.open(root / "train" / "dog" / "large.png").resize((30, 10), Image.Resampling.LANCZOS)
    assert np.abs(np.asarray(image, float) - np.asarray(expected, float)).mean() < 25  # JPEG halves colours


def test_resized_photograph_is_upright(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "pictures", {"cat": 3, "dog": 3})
    picture = np.zeros((40, 60, 3), np.uint8)
    picture[:20] = 255  # as stored; turned by 90 degrees clockwise, the right half is white
    for place, path in enumerate(sorted(root.rglob("*.png"))):
        picture[-1, place] = 1  # no two are equal
        Image.fromarray(picture).save(path, exif=exif_of(6))
    pack(str(root), tmp_path / "shards", image_size=20)
    image = read_image(splits_of(Shards(), str(tmp_path / "shards"), seed=0).train.sources[0])
    assert image.size == (20, 30)
    assert np.asarray(image)[:, 12:].min() > 200
    assert np.asarray(image)[:, :8].max() < 50


def test_unreadable_images_of_a_pack_are_left_out_and_named(tmp_path: Path) -> None:
    data = pictures(tmp_path)
    broken = Path(data) / "train" / "cat" / "004.png"
    broken.write_bytes(broken.read_bytes()[:60])
    packed = pack(data, tmp_path / "shards", image_size=100)
    (reason,) = packed.unreadable
    assert reason.startswith(f"{broken}: cannot be read")
    assert len(splits_of(Shards(), str(tmp_path / "shards"), seed=0).train) == 19
    assert not pack(data, tmp_path / "as they are").unreadable  # nothing is decoded, every byte is kept


def test_too_many_unreadable_images_are_rejected_and_nothing_is_left(tmp_path: Path) -> None:
    data = pictures(tmp_path)
    for number in range(3):
        (Path(data) / "val" / "cat" / f"{number:03}.png").write_bytes(b"text")
    with pytest.raises(UserError, match="more than 10% of 20 images of the val set"):
        pack(data, tmp_path / "shards", image_size=8)
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pictures(tmp_path)
    add = packing._Tar.add

    def fill(tar: packing._Tar, *sample: Any) -> None:
        if tar.path.name.startswith("val"):
            raise OSError(errno.ENOSPC, "No space left on device")
        add(tar, *sample)

    monkeypatch.setattr(packing._Tar, "add", fill)
    with pytest.raises(UserError, match=r"No space left on device .* MB are free there"):
        pack(data, tmp_path / "shards")
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]


def test_an_empty_folder_is_filled_and_others_are_rejected(tmp_path: Path) -> None:
    data = pictures(tmp_path, 2)
    out = tmp_path / "shards"
    out.mkdir()
    pack(data, out)
    before = every_file(out)
    with pytest.raises(UserError, match="shards: exists already"):
        pack(data, out)
    assert every_file(out) == before
    with pytest.raises(UserError, match=r"inside of .*pictures"):
        pack(data, Path(data) / "train" / ".." / "shards")


def test_sizes_below_one_and_splits_without_a_readable_image_are_rejected(tmp_path: Path) -> None:
    for option in ("shard_mb", "image_size"):
        with pytest.raises(UserError, match=f"{option} must be at least 1, not 0"):
            pack("digits", tmp_path / "shards", **{option: 0})
    write_tree(tmp_path / "pictures" / "train", {"cat": 2, "dog": 2})
    (write_tree(tmp_path / "pictures" / "val", {"cat": 1}) / "cat" / "000.png").write_bytes(b"text")
    with pytest.raises(UserError, match=r"none of 1 image of the val set can be read: .*000\.png"):
        pack(str(tmp_path / "pictures"), tmp_path / "shards", image_size=8)


def test_the_command_prints_its_files(tmp_path: Path, capsys) -> None:
    data = pictures(tmp_path)
    broken = Path(data) / "train" / "cat" / "004.png"
    broken.write_bytes(b"text")
    Pack(data=data, out=tmp_path / "my shards", image_size=6).call()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"left out: {broken}: not a picture that Pillow can read"
    assert lines[1].startswith("train  19 images in 1 shard, 0.1 MB")
    assert [line.split()[0] for line in lines[2:4]] == ["val", "test"]
