import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data import write_picture, write_tree
from tests.stores import Store
from vitascope.data.contents import image_name
from vitascope.data.datasets import hub_id, open_data, open_pictures, read_data
from vitascope.data.formats.shard_index import MAX_BYTES
from vitascope.data.formats.shards import open_shard
from vitascope.data.pack import pack
from vitascope.data.reading import ImageReader
from vitascope.data.splits import Splits
from vitascope.data.stored import as_pictures, stored_images
from vitascope.data.table_options import TableOptions
from vitascope.errors import UserError
from vitascope.models.decoding import ImageError, read_image, source_name
from vitascope.models.preprocess import Preprocess
from vitascope.remote import StoredImage, source_at
from vitascope.remote.stores import StoreError


def assert_same(one: Splits, other: Splits) -> None:
    """The same images under the same names, in the same order, with the same labels."""
    assert one.parts.keys() == other.parts.keys()
    for name, images in one.parts.items():
        others = other.parts[name]
        assert images.class_names == others.class_names
        assert np.array_equal(images.labels, others.labels)
        assert np.array_equal(images.identified().contents, others.identified().contents)
        assert [image_name(source, one.root) for source in images.sources] == [
            image_name(source, other.root) for source in others.sources
        ]
        for mine, theirs in zip(images.sources, others.sources, strict=True):
            assert np.array_equal(np.asarray(read_image(mine)), np.asarray(read_image(theirs)))
        assert np.array_equal(images.order(3, 1), others.order(3, 1))


@pytest.mark.parametrize(
    ("store", "splits"), [("http", ("",)), ("s3", ("train", "val", "test"))], indirect=["store"]
)
def test_folder_is_read_like_a_local_one(store: Store, splits: tuple[str, ...]) -> None:
    for split in splits:
        write_tree(store.folder / "photos" / split, {"cat": 6, "big dog": 7})
    (store.folder / "photos" / "notes.md").write_text("unused")
    url = store.add("photos")
    found, local = open_data(url, seed=1), open_data(str(store.folder / "photos"), seed=1)
    assert_same(found, local)
    assert found.unused == local.unused == ("1 .md",)
    assert str(found.root) == url
    assert source_name(found.train.sources[0]).startswith(url)


def test_object_with_the_name_of_a_folder_is_rejected(s3_store: Store) -> None:
    write_tree(s3_store.folder / "photos", {"cat": 3, "dog": 3})
    url = s3_store.add("photos")
    s3_store.put(s3_store.folder / "photos" / "cat" / "000.png", "photos/cat")
    with pytest.raises(StoreError, match=rf"{url}/\S*: another object has the name of its folder"):
        open_data(url)


def requested_tars(store: Store, before: int) -> list[str]:
    """The shards of which something was read."""
    return [each for each in store.server.requests[before:] if ".tar" in each and each.startswith("GET")]


def packed(store: Store) -> str:
    """The URL of packed shards of 18 images."""
    write_tree(store.folder / "photos", {"cat": 9, "dog": 9})
    pack(str(store.folder / "photos"), store.folder / "shards", shard_mb=1)
    return store.add("shards")


def test_packed_shards_are_opened_without_reading_them_and_read_like_local_ones(web_store: Store) -> None:
    url, local = packed(web_store), str(web_store.folder / "shards")
    images = read_data(url).by_name
    assert not requested_tars(web_store, 0)
    for split, others in read_data(local).by_name.items():
        for source, theirs in zip(images[split].sources, others.sources, strict=True):
            assert (source.name, source.offset, source.size) == (theirs.name, theirs.offset, theirs.size)
    assert_same(open_data(url), open_data(local))


@pytest.mark.parametrize("name", ["index.json", "samples.npz"])
def test_file_beside_shards_that_is_too_large_is_not_fetched(web_store, name, monkeypatch) -> None:
    url = packed(web_store)
    monkeypatch.setitem(MAX_BYTES, name, 10)
    with pytest.raises(
        UserError, match=rf"^{url}/{name}: [\d,]+ bytes, and {name} beside shards has at most 10"
    ):
        read_data(url)
    assert f"GET /shards/{name}" not in web_store.server.requests


def test_headers_of_other_shards_are_read_once(web_store: Store) -> None:
    url = packed(web_store)
    (web_store.folder / "web" / "shards" / "index.json").unlink()
    first = read_data(url).by_name["train"]
    before = len(web_store.server.requests)
    assert requested_tars(web_store, 0)
    again = read_data(url).by_name["train"]
    assert not requested_tars(web_store, before)
    assert list(again.sources) == list(first.sources)
    assert np.array_equal(again.labels, first.labels)


@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_table_is_read_like_a_local_one(web_store: Store, place: str) -> None:
    write_tree(web_store.folder / "data" / "images", {"cat": 6, "dog": 6})
    folder = web_store.folder / "data"
    rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in sorted(folder.rglob("*.png"))]
    (folder / "labels.csv").write_text("\n".join(["image,label", *rows]))
    url, local = web_store.add("data"), str(folder / "labels.csv")
    data, images = (f"{url}/labels.csv", None) if place == "beside" else (local, url)
    assert_same(open_data(data, table=TableOptions(images=images)), open_data(local))


@pytest.mark.parametrize(("store", "kind"), [("http", "zip"), ("s3", "gztar")], indirect=["store"])
def test_archive_is_read_like_a_local_one(store: Store, kind: str) -> None:
    write_tree(store.folder / "photos", {"cat": 6, "dog": 6})
    archive = Path(shutil.make_archive(str(store.folder / "photos"), kind, store.folder / "photos"))
    assert_same(open_data(store.add(archive.name)), open_data(str(archive)))


def test_one_picture_is_shown(web_store: Store) -> None:
    write_picture(web_store.folder / "a.png")
    (picture,) = open_pictures(web_store.add("a.png"))
    expected = np.asarray(read_image(web_store.folder / "a.png"))
    assert np.array_equal(np.asarray(read_image(picture)), expected)
    there, absent, array = as_pictures([f"{web_store.url}/a.png", f"{web_store.url}/b.png", expected])
    assert np.array_equal(np.asarray(read_image(there)), expected)
    assert array is expected
    with pytest.raises(StoreError, match=r"no such object, folder or bucket$"):
        read_image(absent)
    reader = ImageReader(None, Preprocess(image_size=(8, 8)))
    local, stored = (
        reader.sources_of([place])[0] for place in (web_store.folder / "a.png", f"{web_store.url}/a.png")
    )
    assert np.array_equal(reader.preprocess.pixels(local), reader.preprocess.pixels(stored))


def test_every_third_failing_request_changes_nothing(web_store: Store) -> None:
    write_tree(web_store.folder / "photos", {"cat": 6, "dog": 7})
    url = web_store.add("photos")
    web_store.server.every_third_fails = True
    web_store.server.cut = 2
    assert_same(open_data(url), open_data(str(web_store.folder / "photos")))


def test_picture_that_changed_or_is_gone_is_an_unreadable_one(web_store: Store) -> None:
    write_tree(web_store.folder / "photos", {"cat": 2})
    url = web_store.add("photos")
    first, second = stored_images(url)
    write_picture(web_store.folder / "photos" / "cat" / "000.png", size=(9, 9), seed=9)
    web_store.add("photos")
    with pytest.raises(ImageError, match=rf"^{first}: cannot be read: changed since it was listed"):
        read_image(first)
    assert read_image(second).size


def test_server_that_is_gone_makes_no_picture_unreadable(web_store: Store) -> None:
    write_tree(web_store.folder / "photos", {"cat": 2})
    first, _ = stored_images(web_store.add("photos"))
    web_store.server.gone = True
    with pytest.raises(StoreError, match="does not answer"):
        read_image(first)


def test_shard_that_changed_stops_the_run(web_store: Store) -> None:
    images = open_data(packed(web_store)).train
    shutil.rmtree(web_store.folder / "cache")
    for path in (web_store.folder / "shards").glob("*.tar"):
        path.write_bytes(path.read_bytes() + bytes(10240))
    web_store.add("shards")
    with pytest.raises(StoreError, match=r"changed since it was listed.*list the shards again"):
        read_image(images.sources[0])


def test_places_that_are_no_data_are_one_line(web_store: Store) -> None:
    (web_store.folder / "a").mkdir()
    (web_store.folder / "a" / "train-images-idx3-ubyte").write_bytes(b"0" * 100)
    (web_store.folder / "a" / "x.bin").write_bytes(b"0")
    url = web_store.add("a")
    for place, reason in {
        f"{url}/x.bin": "neither a folder, nor a table or an archive by its name",
        f"{url}/none": "no such object, folder or bucket",
        url: "no images in class folders; expected .*; unused: 1 files without a suffix, 1 .bin",
    }.items():
        with pytest.raises(UserError, match=f"^{place}: {reason}"):
            open_data(place)


def test_whole_data_set_of_the_hub_is_read_by_its_library() -> None:
    assert hub_id("hf://datasets/owner/name") == "owner/name@main"
    assert hub_id("hf://datasets/owner/name@v1/") == "owner/name@v1"
    assert hub_id("hf://datasets/owner/name/photos") == "hf://datasets/owner/name/photos"


def test_stored_pictures_and_shards_can_be_sent_to_other_processes(web_store: Store) -> None:
    import pickle

    write_tree(web_store.folder / "photos", {"cat": 2})
    first, _ = stored_images(web_store.add("photos"))
    assert isinstance(first, StoredImage)
    assert pickle.loads(pickle.dumps(first)) == source_at(first.as_text()) == first  # noqa: S301
    with open_shard(first.object) as file:
        assert file.read(4) == b"\x89PNG"
