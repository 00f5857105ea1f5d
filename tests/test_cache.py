"""The cache folder: one that cannot be used is named with the variable that sets another."""

import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from vitascope.cache import cache_folder, local_failure
from vitascope.data.contents import DIGEST
from vitascope.data.features.cache import FeatureCache
from vitascope.data.formats.archive import unpack
from vitascope.data.formats.published import Published, fetch
from vitascope.errors import UserError
from vitascope.storage import free_mb


@pytest.fixture
def unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache at which `Path.is_dir` fails, as below a folder that this user may not enter."""
    folder = tmp_path / ("a" * 300)
    monkeypatch.setenv("VITASCOPE_CACHE", str(folder))
    with pytest.raises(OSError, match="File name too long"):
        folder.is_dir()
    return folder


def test_unusable_cache_is_named_with_the_way_out(unusable: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("cat/1.png", b"")
    for use in (
        lambda: unpack(tmp_path / "a.zip"),
        lambda: fetch(Published(name="a", size=1, md5="", urls=()), cache_folder() / "a"),
    ):
        with pytest.raises(
            UserError, match=r"cache cannot be written: .* MB are free .* set VITASCOPE_CACHE"
        ):
            use()


def test_features_are_computed_without_a_usable_cache(
    unusable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = FeatureCache({"model": "a"})
    assert len(cache) == 0
    cache.add(np.array([b"1" * DIGEST]), np.zeros((1, 2), np.float32))
    cache.flush()
    assert "set VITASCOPE_CACHE to another folder; the features are computed, but not cached" in caplog.text


def test_free_room_is_that_of_the_nearest_folder_that_may_be_entered(
    unusable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    usage = shutil.disk_usage
    monkeypatch.setattr("shutil.disk_usage", lambda path: asked.append(path) or usage(path))
    free_mb(unusable / "b")
    assert asked == [tmp_path]


def test_error_without_a_file_or_a_limit_is_not_local() -> None:
    assert local_failure(ConnectionError(111, "Connection refused")) is None
    assert local_failure(FileNotFoundError("s3://bucket/a")) is None
    assert local_failure(ValueError("no number")) is None
