import json
import logging
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forked import ending, fork
from tests.models import law
from vitascope.data.contents import DIGEST, digests_of
from vitascope.data.features import cache as feature_cache
from vitascope.data.features.cache import FeatureCache
from vitascope.errors import UserError

MADE = {"digest": "a", "layer": 3}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITASCOPE_FEATURES_GB", raising=False)
    return tmp_path / "cache" / "features"


def contents(numbers: list[int]) -> np.ndarray:
    return digests_of([b"image %d" % number for number in numbers])


def features(numbers: list[int], width: int = 5) -> np.ndarray:
    """Float32 (n, width), a function of the image."""
    return np.outer(np.array(numbers), np.arange(1, width + 1)).astype(np.float32)


def keep(numbers: list[int], made: dict = MADE, width: int = 5) -> FeatureCache:
    cache = FeatureCache(made)
    cache.add(contents(numbers), features(numbers, width))
    cache.flush()
    return cache


def chunks(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/[!.]*.safetensors"))


def assert_has(numbers: list[int], others: list[int] = [], made: dict = MADE) -> None:  # noqa: B006
    cache = FeatureCache(made)
    places = cache.find(contents(numbers + others))
    assert (places[: len(numbers)] >= 0).all()
    assert (places[len(numbers) :] == -1).all()
    if numbers:
        assert np.array_equal(cache.take(places[: len(numbers)]), features(numbers))


@law
@given(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=5), st.lists(st.integers(0, 40)))
def test_what_was_kept_is_found_in_any_order(tmp_path_factory, writes, asked) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VITASCOPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        for numbers in writes:
            keep(numbers)
        kept = {number for numbers in writes for number in numbers}
        cache = FeatureCache(MADE)
        assert len(cache) == len(kept)
        places = cache.find(contents(asked))
        assert (places >= 0).tolist() == [number in kept for number in asked]
        found = [number for number in asked if number in kept]
        if found:
            assert np.array_equal(cache.take(places[places >= 0]), features(found))


def test_every_part_of_the_key_has_features_of_its_own(folder: Path) -> None:
    keep([1, 2])
    assert_has([], [1, 2], {**MADE, "layer": 4})
    keep([1], {**MADE, "layer": 4})
    assert len(list(folder.glob("*/made.json"))) == 2
    made = [json.loads(path.read_text()) for path in folder.glob("*/made.json")]
    assert sorted(each["layer"] for each in made) == [3, 4]
    assert all(each["pillow"] and each["format"] for each in made)


def test_images_without_a_digest_are_not_kept_and_digests_that_end_in_zeros_are_told_apart() -> None:
    ends = [b"a" * 15 + b"\0", b"a" * 14 + b"\0\0", b"\0" * 15 + b"b"]
    digests = np.array([b"", b"x" * DIGEST, *ends], f"S{DIGEST}")
    cache = FeatureCache(MADE)
    cache.add(digests, features([0, 1, 2, 3, 4]))
    cache.flush()
    again = FeatureCache(MADE)
    assert again.find(digests)[0] == -1
    assert len(again) == 4
    assert np.array_equal(again.take(again.find(digests[1:])), features([1, 2, 3, 4]))


def test_features_wait_in_memory_until_there_are_enough_or_time_has_passed(folder: Path, monkeypatch) -> None:
    cache = FeatureCache(MADE)
    cache.add(contents([1]), features([1]))
    assert chunks(folder) == []
    with monkeypatch.context() as soon:
        soon.setattr(feature_cache, "CHUNK_SECONDS", 0.0)
        cache.add(contents([2]), features([2]))
        assert len(chunks(folder)) == 1
    monkeypatch.setattr(feature_cache, "CHUNK_BYTES", 2 * 20)
    cache.add(contents([3]), features([3]))
    assert len(chunks(folder)) == 1
    cache.add(contents([4]), features([4]))
    assert len(chunks(folder)) == 2
    assert_has([1, 2, 3, 4])


def test_a_shortened_file_is_not_read(folder: Path) -> None:
    keep([1, 2, 3])
    keep([4])
    first = chunks(folder)[0]
    content = first.read_bytes()
    for keeps in (0.999, 0.9, 0.5, 0.1, 0.0):
        first.write_bytes(content[: int(keeps * len(content))])
        assert_has([4], [1, 2, 3])


@law
@given(st.data())
def test_a_damaged_header_is_not_read_and_raises_nothing(tmp_path_factory, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VITASCOPE_CACHE", str(root := tmp_path_factory.mktemp("cache")))
        keep([1, 2])
        (path,) = chunks(root / "features")
        content = bytearray(path.read_bytes())
        length = 8 + int.from_bytes(content[:8], "little")
        place = data.draw(st.integers(0, length - 1))
        content[place] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        cache = FeatureCache(MADE)
        places = cache.find(contents([1, 2]))
        if (places >= 0).all():  # a space in the header, say
            assert np.array_equal(cache.take(places), features([1, 2]))


def test_a_file_of_another_key_is_not_read(folder: Path) -> None:
    keep([1], {"key": 1})
    (other,) = chunks(folder)
    cache = keep([2], width=7)
    shutil.copy(other, cache.folder)
    again = FeatureCache(MADE)
    assert again.find(contents([1])).tolist() == [-1]
    assert again.take(again.find(contents([2]))).shape == (1, 7)


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_read(folder, monkeypatch) -> None:
    keep([1])

    def killed() -> None:
        def write_half(path: Path, content: bytes) -> int:
            with open(path, "wb") as file:
                file.write(content[: len(content) // 2])
            os.kill(os.getpid(), 9)
            return 0

        Path.write_bytes = write_half  # type: ignore[method-assign]
        keep([2])

    assert ending(fork(killed)) == -9
    (aside,) = folder.rglob(".*.safetensors")
    assert_has([1], [2])
    keep([3])  # the lock is free
    assert aside.exists()  # a process may still be writing it
    old = time.time() - 2 * feature_cache._ABANDONED_SECONDS
    os.utime(aside, (old, old))
    keep([2])
    assert not aside.exists()
    assert_has([1, 2, 3])


def test_several_processes_write_the_same_key(folder: Path) -> None:
    def write(first: int) -> None:
        for number in range(first, first + 12):
            keep([number, number + 1])
            assert_has([number])

    children = [fork(lambda first=first: write(first)) for first in (0, 6, 12)]
    assert [ending(child) for child in children] == [0, 0, 0]
    assert_has(list(range(25)))
    assert len(chunks(folder)) == 36


def test_keys_that_were_used_longest_ago_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [{"key": number} for number in range(3)]
    for age, made in zip((30, 20, 10), keys, strict=True):
        cache = keep([1, 2], made)
        used = time.time() - age
        os.utime(cache.folder / "made.json", (used, used))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert_has([1, 2], made=keys[0])  # a use
    monkeypatch.setenv("VITASCOPE_FEATURES_GB", str((size + 10) / 1e9))
    keep([1, 2], {"key": 3})
    assert_has([], [1, 2], keys[1])
    for made in (keys[0], keys[2], {"key": 3}):
        assert_has([1, 2], made=made)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= size + 10


def test_a_key_beyond_the_bound_alone_is_kept_up_to_it_with_one_warning(folder, monkeypatch, caplog) -> None:
    monkeypatch.setenv("VITASCOPE_FEATURES_GB", "0.000001")
    monkeypatch.setattr(feature_cache, "CHUNK_BYTES", 1)
    cache = FeatureCache(MADE)
    for number in range(10):
        cache.add(contents([number]), features([number]))
    cache.flush()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the limit is 1e-06 GB (VITASCOPE_FEATURES_GB)" in record.getMessage()
    assert 0 < len(FeatureCache(MADE)) < 10
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 1000


def test_other_keys_are_not_removed_for_a_key_that_is_beyond_the_bound_without_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep([1, 2], {"key": 1})
    monkeypatch.setenv("VITASCOPE_FEATURES_GB", "0.000001")
    keep(list(range(100)))
    assert_has([1, 2], made={"key": 1})
    assert_has([], [1, 2])


def test_a_limit_that_is_no_size_is_rejected_and_one_of_zero_keeps_nothing(folder, monkeypatch) -> None:
    for text in ("many", "-1", "nan"):
        monkeypatch.setenv("VITASCOPE_FEATURES_GB", text)
        with pytest.raises(UserError, match=f"VITASCOPE_FEATURES_GB is a number of gigabytes.*{text}"):
            FeatureCache(MADE)
    monkeypatch.setenv("VITASCOPE_FEATURES_GB", "0")
    keep([1])
    assert not folder.exists()


def test_features_that_are_removed_or_damaged_while_they_are_read_are_one_line(folder: Path) -> None:
    for harm in (lambda cache: shutil.rmtree(cache.folder), lambda cache: os.truncate(chunks(folder)[0], 10)):
        keep([1, 2])
        cache = FeatureCache(MADE)
        places = cache.find(contents([1, 2]))
        harm(cache)
        with pytest.raises(UserError, match=r"were removed or damaged while .* raise VITASCOPE_FEATURES_GB"):
            cache.take(places)
        cache.add(contents([3]), features([3]))  # the folder is made again
        cache.flush()
        assert_has([3], [1, 2])
        shutil.rmtree(folder)


def test_a_full_disk_costs_one_warning(folder: Path, monkeypatch, caplog) -> None:
    keep([1])

    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", full)
        cache = FeatureCache(MADE)
        for number in (2, 3):
            cache.add(contents([number]), features([number]))
            cache.flush()
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    assert "not cached from here on" in record.getMessage()
    assert_has([1], [2, 3])
