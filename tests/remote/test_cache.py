import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.forked import ending, fork
from tests.stores import Store
from vitascope.cache import cache_folder
from vitascope.errors import UserError
from vitascope.models.decoding import read_image
from vitascope.remote import StoredImage, cache
from vitascope.remote.cache import ObjectReader, copied, prefetched, read, size_on_disk
from vitascope.remote.stores import ChangedError, RemoteObject, StoreError, find_object

BLOCK = 2**10


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK", BLOCK)


def content(size: int, seed: int = 0) -> bytes:
    return bytes((seed + number * number) % 251 for number in range(size))


def stored(store: Store, size: int = 3500, seed: int = 0, name: str = "a.bin") -> RemoteObject:
    (store.folder / name).write_bytes(content(size, seed))
    found = find_object(store.add(name))
    assert found is not None
    return found


def test_parts_are_those_of_the_object_and_are_fetched_once(web_store: Store) -> None:
    found, expected = stored(web_store), content(3500)
    for start, size in ((0, 3500), (10, 5), (1000, 1500), (3499, 1), (0, 0), (3500, 0)):
        for _ in range(2):
            assert read(found, start, size) == expected[start : start + size]
    assert read(found) == expected
    assert sum(each.startswith("GET") for each in web_store.server.requests) == 4
    with pytest.raises(EOFError, match="it has 3,500 bytes, and 3,501 are needed"):
        read(found, 1, 3500)


def test_open_object_reads_like_a_file(web_store: Store) -> None:
    found, expected = stored(web_store), content(3500)
    with ObjectReader(found) as file:
        assert file.read(10) == expected[:10]
        assert file.seek(3000) == file.tell() == 3000
        assert file.read() == expected[3000:]
        assert file.read(5) == b""
        assert file.seek(-5, os.SEEK_END) == 3495
        assert file.seek(-5, os.SEEK_CUR) == 3490
        assert file.read(3) == expected[3490:3493]


def test_versions_are_not_mixed_and_a_block_that_is_cut_on_the_disk_is_fetched_again(web_store) -> None:
    before = stored(web_store)
    read(before)
    for path in (cache_folder() / "remote" / "blocks").glob("*/*"):
        os.truncate(path, path.stat().st_size - 1)
    assert read(before) == content(3500)
    after = stored(web_store, seed=1)
    assert read(after) == content(3500, 1)
    assert read(before) == content(3500)  # from the disk


def test_object_that_changes_between_blocks_is_not_mixed(web_store: Store) -> None:
    found = stored(web_store)
    read(found, 0, 10)
    stored(web_store, seed=1)
    with pytest.raises(ChangedError):
        read(found)
    with pytest.raises(StoreError, match=r"a\.bin: changed since it was listed.*; repeat this"):
        copied([found], web_store.url)
    assert size_on_disk() == BLOCK


def test_size_is_bounded_and_the_last_used_blocks_stay(web_store: Store, monkeypatch) -> None:
    limit = 26 * BLOCK
    monkeypatch.setenv("VITASCOPE_REMOTE_GB", str(limit / 1e9))
    found = [stored(web_store, 8 * BLOCK, seed, f"{seed}.bin") for seed in range(8)]
    for number, each in enumerate(found):
        assert read(each) == content(8 * BLOCK, number)
        assert size_on_disk() <= limit
        for path in (cache_folder() / "remote" / "blocks").glob("*/*"):
            os.utime(path, (path.stat().st_atime - 100, path.stat().st_mtime - 100))
    before = len(web_store.server.requests)
    assert read(found[-1]) == content(8 * BLOCK, 7)
    assert len(web_store.server.requests) == before


def test_copies_are_bounded_too(web_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITASCOPE_REMOTE_GB", str(20 * BLOCK / 1e9))
    found = [stored(web_store, 8 * BLOCK, seed, f"{seed}.bin") for seed in range(5)]
    for number, each in enumerate(found):
        folder = copied([each], web_store.url)
        assert (folder / f"{number}.bin").read_bytes() == content(8 * BLOCK, number)
        assert size_on_disk() <= 20 * BLOCK
    assert copied([found[-1]], web_store.url) == folder
    with pytest.raises(UserError, match=r"the cache of remote data is limited to 2\.048e-05 GB"):
        copied(found, web_store.url)


def test_copy_that_is_being_written_is_not_removed(web_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By others that make room, or that find it old: it is as old as its last change."""
    found, other = stored(web_store), stored(web_store, 20 * BLOCK, name="b.bin")
    download = cache.download

    def slow(obj: RemoteObject, path: Path) -> None:
        path.write_bytes(b"the beginning")
        os.utime(path.parent, (0, 0))
        assert size_on_disk() > 0  # removes what is abandoned
        monkeypatch.setenv("VITASCOPE_REMOTE_GB", str(16 * BLOCK / 1e9))
        read(other)  # removes what was used longest ago
        download(obj, path)

    monkeypatch.setattr(cache, "download", slow)
    folder = copied([found], found.url.removesuffix("a.bin"))
    assert (folder / "a.bin").read_bytes() == content(3500)
    assert size_on_disk() < 20 * BLOCK


def test_limit_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("none", "-1", "0", "nan"):
        monkeypatch.setenv("VITASCOPE_REMOTE_GB", text)
        with pytest.raises(UserError, match=f"VITASCOPE_REMOTE_GB is a number of gigabytes.*not '{text}'"):
            cache.limit_bytes()


def test_full_disk_is_one_line_that_concerns_all_objects(web_store: Store, monkeypatch) -> None:
    found = stored(web_store)

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StoreError, match=r"the cache cannot be written: No space left.*set VITASCOPE_CACHE"):
        read(found)
    assert size_on_disk() == 0


@pytest.mark.parametrize("broken", ["folder", "block"])
def test_cache_that_cannot_be_read_concerns_all_objects_and_is_named(
    web_store: Store, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stored(web_store, 100)
    if broken == "folder":
        monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "a.bin"))  # a file
    else:
        read(found)
        (block,) = (cache_folder() / "remote" / "blocks").glob("*/*")
        block.unlink()
        block.symlink_to(block)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"the cache cannot be used: .* MB are free.* VITASCOPE_CACHE"):
            read_image(StoredImage(found.url, found))


def test_threads_and_processes_fetch_a_block_once(web_store: Store) -> None:
    found = stored(web_store, BLOCK)
    web_store.server.seconds = 0.2
    children = [fork(lambda: os._exit(read(found) != content(BLOCK))) for _ in range(2)]
    barrier = threading.Barrier(4)

    def together(_: int) -> bytes:
        barrier.wait()
        return read(found)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(together, range(4))) == {content(BLOCK)}
    assert [ending(child) for child in children] == [0, 0]
    assert sum(each.startswith("GET") for each in web_store.server.requests) == 1


def test_objects_are_prefetched_in_their_order(web_store: Store) -> None:
    found = [stored(web_store, 100, seed, f"{seed}.bin") for seed in range(12)]
    sources = [*found[:5], None, *found[5:]]
    taken = prefetched(iter(sources), lambda source: source)
    assert next(taken) == found[0]
    assert list(taken) == sources[1:]
    before = len(web_store.server.requests)
    assert [read(each) for each in found] == [content(100, seed) for seed in range(12)]
    assert len(web_store.server.requests) == before
