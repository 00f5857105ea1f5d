import errno
import itertools
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from werkzeug import Response

from tests.http_server import Quiet, answering
from tests.stores import BUCKET, Store, files_of, serving
from vitascope.errors import UserError
from vitascope.remote import stores
from vitascope.remote.outputs import Output
from vitascope.remote.stores import (
    ChangedError,
    StoreError,
    find_object,
    is_url,
    list_folder,
    name_in,
    read_range,
    upload,
    walk,
)
from vitascope.training.run.stored_run import StoredRun


def write(path: Path, content: bytes = b"0123456789") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def filled(store: Store) -> str:
    for name in ("b.txt", "a/2.txt", "a/1.txt", "a/b/3.txt", ".hidden", "c.txt", "a/.hidden/4.txt"):
        write(store.folder / "data" / name)
    return store.add("data")


def test_urls_have_a_known_scheme() -> None:
    assert all(map(is_url, ("s3://b/a", "gs://b", "hf://o/n", "http://h/a", "https://h")))
    assert not any(map(is_url, ("s3:/b", "s3://", "a/b", "C://a", None, Path("s3://b/a"))))
    with pytest.raises(StoreError, match=r"unknown scheme ftp://; URLs begin with s3://, gs://, hf://, http"):
        find_object("ftp://host/a")


def test_every_name_of_a_store_is_listed_and_read(s3_store: Store) -> None:
    names = {"#1.png", "what?.png", "a%20b.png", "a b.png", "a+b&c.png", "é.png"}
    for name in names:
        write(s3_store.folder / "data" / name)
    objects = list(walk(s3_store.add("data")))
    assert {name_in(each.url, f"{s3_store.url}/data") for each in objects} == names
    assert all(read_range(each, 0, 10) == b"0123456789" for each in objects)


def test_object_with_the_name_of_a_folder_is_listed_unless_it_only_marks_it(s3_store: Store) -> None:
    empty, full = write(s3_store.folder / "empty", b""), write(s3_store.folder / "full")
    for folder, name in (("data", "cat"), ("more", "cat/")):
        url = f"{s3_store.url}/{folder}"
        s3_store.put(empty, f"{folder}/{name}")
        s3_store.put(full, f"{folder}/cat/1.png")
        assert [name_in(each.url, url) for each in walk(url)] == ["cat/1.png"]
        s3_store.put(full, f"{folder}/{name}")
        if name == "cat":
            assert [name_in(each.url, url) for each in walk(url)] == ["cat", "cat/1.png"]
        else:
            with pytest.raises(StoreError):  # a folder without a name
                list(walk(url))


def test_files_are_walked_before_folders_by_name_and_passing_faults_change_nothing(store: Store) -> None:
    url = filled(store)
    names = ["b.txt", "c.txt", "a/1.txt", "a/2.txt", "a/b/3.txt"]
    expected = list(walk(url))
    assert [(name_in(each.url, url), each.size) for each in expected] == [(name, 10) for name in names]
    assert [each.url for each in list_folder(f"{url}/")[0]] == [f"{url}/b.txt", f"{url}/c.txt"]
    assert find_object(url) is None
    assert find_object(f"{url}/a/1.txt") in expected
    for fault, value in (("cut", 4), ("seconds", 0.02), ("every_third_fails", True)):
        setattr(store.server, fault, value)
        for _ in range(1 if fault == "seconds" else 3):
            assert list(walk(url)) == expected
            assert read_range(expected[0], 1, 10) == b"123456789"
        store.server.seconds = 0.0
    assert store.server.cut == 0


def test_server_that_hangs_is_one_line(web_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    url = filled(web_store)
    monkeypatch.setattr(stores, "READ_SECONDS", 0.2)
    monkeypatch.setattr(stores, "PATIENCE", 0.3)
    web_store.server.seconds = 2.0
    before = len(web_store.server.requests)
    with pytest.raises(StoreError, match="Timeout on reading"):
        find_object(f"{url}/b.txt")
    assert len(web_store.server.requests) - before <= 6
    web_store.server.seconds = 0.0


def test_missing_places_changed_objects_and_a_server_that_is_gone_are_one_line(store: Store) -> None:
    url = filled(store)
    with pytest.raises(StoreError, match=f"^{url}/none: no such object, folder or bucket$"):
        find_object(f"{url}/none")
    with pytest.raises(StoreError, match=f"^{url}/none: no such folder or bucket$"):
        list(walk(f"{url}/none"))
    found = find_object(f"{url}/b.txt")
    assert found is not None
    write(store.folder / "data" / "b.txt", b"abcdefghij")  # of the same size
    store.add("data")
    with pytest.raises(ChangedError):
        read_range(found, 0, 4)
    store.server.gone = True
    for call in (lambda: find_object(url), lambda: list(walk(url)), lambda: read_range(found, 0, 4)):
        before = len(store.server.requests)
        with pytest.raises(StoreError, match="does not answer as it should") as caught:
            call()
        assert str(caught.value).startswith(url)
        assert "\n" not in str(caught.value)
        assert len(store.server.requests) - before <= 4 * stores.ATTEMPTS


def test_missing_buckets_folders_without_a_name_and_credentials_are_one_line(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    file, url = write(s3_store.folder / "a"), filled(s3_store)
    s3_store.put(file, "other/cat//2.png")
    access = "; set AWS_ACCESS_KEY_ID"

    def check(call: Callable[[], object], match: str) -> None:
        with pytest.raises(StoreError, match=match):
            call()

    check(lambda: find_object("s3://none/a"), "^s3://none/a: no such object, folder or bucket$")
    check(lambda: list(walk("s3://none")), "^s3://none: no such folder or bucket$")
    check(lambda: upload(file, "s3://none/a"), "^s3://none/a: cannot be written: no such bucket$")
    check(lambda: list(walk(f"{s3_store.url}/other")), r"team/other/cat//: a folder without a name")
    s3_store.server.expired = True
    check(lambda: list(walk(url)), f"no access: The provided token has expired.*{access[2:]}")
    check(lambda: find_object(url), "no access")
    s3_store.server.expired = False
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    check(lambda: find_object(f"s3://{BUCKET}/files"), f"no access: Unable to locate credentials{access}")


class FailingClient:
    """A library of a store that raises an error when a file is uploaded."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def _strip_protocol(self, url: str) -> str:
        return url

    def put_file(self, path: str, place: str) -> None:
        self.calls += 1
        cause = OSError(errno.ENOSPC, "No space left on device")
        raise self.error from cause if isinstance(self.error, RuntimeError) else None


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> FailingClient:
    client = FailingClient(error)
    monkeypatch.setattr(stores, "_file_system", lambda url: client)
    monkeypatch.setenv("VITASCOPE_CACHE", "/full")
    return client


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left"), r"/full: No space left \(.* MB are free there\); make room"),
        (
            RuntimeError("a wrapped one"),
            r"/full: No space left on device \(.* MB are free there\); make room",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/full/a"), "/full/a: Permission denied.*_CACHE"),
        (PermissionError(errno.EACCES, "Permission denied", "/keys"), "not the store: /keys: Perm"),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "/full/a"),
            "/full/a: No such file.*VITASCOPE_CACHE",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "not the store: Too many.*; start fewer"),
    ],
)
def test_failure_of_this_machine_is_not_reported_as_one_of_the_store(monkeypatch, error, line: str) -> None:
    client = failing(monkeypatch, error)
    with pytest.raises(StoreError, match=rf"^s3://bucket/a: .*{line}") as caught:
        upload(Path(__file__), "s3://bucket/a")
    assert "does not answer" not in str(caught.value)
    assert client.calls == 1


def test_other_errors_of_a_server_and_of_its_library_are_those_of_the_store(monkeypatch) -> None:
    for error, line in (
        (PermissionError("Access Denied"), "no access"),
        (OSError(errno.EBUSY, "x"), "does not answer as it should"),
        (TypeError("not a mapping"), "does not answer as it should: not a mapping"),
    ):
        failing(monkeypatch, error)
        with pytest.raises(StoreError, match=line):
            upload(Path(__file__), "s3://bucket/a")


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for scheme, extra in (("s3", "s3"), ("gs", "gcs"), ("http", "http"), ("https", "http")):
        with pytest.raises(StoreError, match=rf"needs an extra: pip install \"vitascope\[{extra}\]\"$"):
            find_object(f"{scheme}://place/file")


def test_server_without_versions_or_parts_is_rejected(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    write(tmp_path / "a.bin")
    with (
        serving(files_of(tmp_path, versions=False)) as server,
        pytest.raises(StoreError, match="changes would go unnoticed: download it"),
    ):
        find_object(f"{server.url}/a.bin")
    with serving(files_of(tmp_path, ranges=False)) as server:
        found = find_object(f"{server.url}/a.bin")
        assert found is not None
        assert read_range(found, 0, 10) == b"0123456789"
        with pytest.raises(StoreError, match="sends no parts of files"):
            read_range(found, 0, 4)


def test_folder_that_lists_itself_is_one_line(tmp_path: Path, web_store: Store) -> None:
    write(tmp_path / "web" / "a" / "1.txt")
    (tmp_path / "web" / "a" / "again").symlink_to(tmp_path / "web" / "a")
    with pytest.raises(StoreError, match="more than 32 folders in each other: does one of them list itself"):
        list(walk(f"{web_store.url}/a"))


@pytest.mark.parametrize("status", [404, 410])
def test_object_that_is_gone_is_a_changed_one(tmp_path: Path, status: int) -> None:
    pytest.importorskip("aiohttp")
    write(tmp_path / "a.png")
    files, gone = files_of(tmp_path), False
    with serving(lambda *each: (Response("gone", status) if gone else files)(*each)) as server:
        found = find_object(f"{server.url}/a.png")
        assert found is not None
        gone = True
        with pytest.raises(ChangedError, match="it was listed, and is gone"):
            read_range(found, 0, 4)


@pytest.mark.parametrize("end", ["</html>", ""])
def test_list_that_breaks_off_is_not_taken_for_the_whole(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a connection whose end is that of the list, as a server of HTTP/1.0 sends it."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(stores, "PAUSE", 0.0)

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(f'<HTML><a href="a/">a</a><a href="b/">b</a>{end}'.encode())

    with answering(Handler) as url:
        if end:
            assert list_folder(url) == ([], [f"{url}/a", f"{url}/b"])
        else:
            with pytest.raises(StoreError, match="breaks off before </html>"):
                list_folder(url)


def test_names_that_lead_out_of_a_folder_are_rejected() -> None:
    assert name_in("http://h/a/b%20c.jpg", "http://h/a/") == "b c.jpg"
    assert name_in("s3://b/a/b%20c.jpg", "s3://b/a") == "b%20c.jpg"
    for url, name in itertools.product(("http://h/a", "s3://b/a"), ("../x", "x/../../y", "", "/etc", "a//b")):
        with pytest.raises(StoreError, match="is no path below"):
            name_in(f"{url}/{name}", url)
    with pytest.raises(StoreError, match="is no path below"):
        name_in("http://h/a/%2e%2e%2fx", "http://h/a")


@pytest.mark.parametrize("name", [".", "..", "../x", "a//b", "/a", "./", "a\x01", "a\n"])
@pytest.mark.parametrize("kind", [StoredRun, Output])
def test_url_whose_local_copy_would_be_in_another_folder_is_rejected(kind: type, name: str) -> None:
    with pytest.raises(UserError, match="a URL to write to has no empty name"):
        kind(f"s3://bucket/{name}")


def test_upload_is_whole(s3_store: Store, tmp_path: Path) -> None:
    content = bytes(range(256)) * 1000
    s3_store.server.every_third_fails = True
    for number in range(3):
        url = f"{s3_store.url}/{number}.bin"
        upload(write(tmp_path / "a.bin", content), url)
        found = find_object(url)
        assert found is not None
        assert read_range(found, 0, found.size) == content
