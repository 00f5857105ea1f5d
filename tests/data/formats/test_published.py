import dataclasses
import hashlib
import http.client
import http.server
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.data import write_tree
from tests.data.formats.test_cifar import NAMES, cifar_files, packed_cifar
from tests.http_server import Quiet, answering
from vitascope.cache import cache_folder
from vitascope.data.datasets import open_data
from vitascope.data.formats.published import KNOWN_SETS, Published, PublishedSet, fetch
from vitascope.errors import UserError

CONTENT = bytes(range(256)) * 4000  # 1 MB


@dataclasses.dataclass
class Server:
    """The next answers of the server, and the requests that it received."""

    url: str = ""
    content: bytes = CONTENT
    ranges: bool = True
    """Whether it supports range requests."""
    cuts: list[int] = dataclasses.field(default_factory=list)
    """Bytes after which the next connections end; later ones are complete."""
    statuses: list[int] = dataclasses.field(default_factory=list)
    """The statuses of the next answers; later ones are 200 or 206."""
    sends_length: bool = True
    asked: list[str | None] = dataclasses.field(default_factory=list)
    """The Range of each request."""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(Quiet, http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers["Range"]
            state.asked.append(wanted)
            status = state.statuses.pop(0) if state.statuses else 200
            start = int(wanted[6:-1]) if wanted and state.ranges and status == 200 else 0
            body = state.content[start:]
            self.send_response(206 if start and status == 200 else status)
            if state.sends_length:
                self.send_header("Content-Length", str(len(body)))
            if start:
                self.send_header(
                    "Content-Range", f"bytes {start}-{len(state.content) - 1}/{len(state.content)}"
                )
            self.end_headers()
            self.wfile.write(body[: state.cuts.pop(0)] if state.cuts else body)

    with answering(Handler) as address:
        state.url = f"{address}/file"
        yield state


@pytest.fixture(autouse=True)
def _no_pause_and_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # of 10 MB, which a cut loses
    monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "cache"))


def published(*urls: str, content: bytes = CONTENT) -> Published:
    return Published(name="set.bin", size=len(content), md5=hashlib.md5(content).hexdigest(), urls=urls)


def part_of(folder: Path) -> Path:
    return folder / ".set.bin.part"


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


@pytest.mark.parametrize(
    ("length", "asked"),
    [(300_000, ["bytes=300000-"]), (len(CONTENT), []), (len(CONTENT) + 1, [None])],
)
def test_download_resumes_at_the_end_of_a_part(server: Server, tmp_path: Path, length: int, asked) -> None:
    part_of(tmp_path).write_bytes((CONTENT + b"z")[:length])
    assert fetch(published(server.url), tmp_path).read_bytes() == CONTENT
    assert server.asked == asked


def test_retries_are_limited_and_the_part_is_kept(server: Server, tmp_path: Path) -> None:
    server.cuts = [1000] + [0] * 100
    with pytest.raises(UserError, match=r"set\.bin cannot be downloaded \(.*; try again"):
        fetch(published(server.url), tmp_path)
    assert part_of(tmp_path).read_bytes() == CONTENT[:1000]
    server.cuts = []
    assert fetch(published(server.url), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("status", [404, 403, 416])
def test_a_url_without_the_file_is_not_asked_again(server: Server, tmp_path: Path, status: int) -> None:
    server.statuses = [status] * 9
    with pytest.raises(UserError) as caught:
        fetch(published(server.url), tmp_path)
    assert len(server.asked) == 1
    assert f"set.bin cannot be downloaded ({server.url}: " in str(caught.value)
    assert str(status) in str(caught.value)
    assert f"put the file into {tmp_path} by hand" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_content_is_removed_before_it_gets_its_name(server: Server, tmp_path: Path) -> None:
    file = published(server.url)
    server.content = b"x" + CONTENT[1:]
    with pytest.raises(UserError, match=f"does not have the MD5 {file.md5}, and was removed"):
        fetch(file, tmp_path)
    assert left_in(tmp_path) == set()
    server.content = CONTENT
    assert fetch(file, tmp_path).read_bytes() == CONTENT


def test_an_endless_answer_is_stopped_at_the_size_of_the_file(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT * 50
    server.sends_length = False
    with pytest.raises(UserError, match="the server sends more than the 1,024,000 bytes of the file"):
        fetch(published(server.url), tmp_path)
    assert len(server.asked) == 1
    assert part_of(tmp_path).stat().st_size <= len(CONTENT) + constants.DOWNLOAD_CHUNK_SIZE
    server.content = CONTENT
    assert fetch(published(server.url), tmp_path).read_bytes() == CONTENT
    assert server.asked[1] is None  # not resumed


def test_a_file_copied_by_hand_is_used_and_checked(tmp_path: Path) -> None:
    (tmp_path / "set.bin").write_bytes(CONTENT)
    assert fetch(published("http://127.0.0.1:9/"), tmp_path).read_bytes() == CONTENT
    (tmp_path / "set.bin").write_bytes(b"something else")
    with pytest.raises(UserError, match=r"is not set\.bin as published .*; remove it"):
        fetch(published("http://127.0.0.1:9/"), tmp_path)
    assert (tmp_path / "set.bin").read_bytes() == b"something else"  # a file of the user is kept


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line_and_the_download_resumes_later(server: Server, tmp_path: Path) -> None:
    part_of(tmp_path).symlink_to("/dev/full")
    with pytest.raises(
        UserError, match=r"cannot be written: No space left on device .*; make room, or set VITASCOPE_CACHE"
    ):
        fetch(published(server.url), tmp_path)
    assert not (tmp_path / "set.bin").exists()
    assert len(server.asked) == 1  # a full disk causes no retry
    part_of(tmp_path).unlink()
    assert fetch(published(server.url), tmp_path).read_bytes() == CONTENT


def test_parallel_downloads_load_a_file_once(server: Server, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        files = list(pool.map(lambda _: fetch(published(server.url), tmp_path).read_bytes(), range(4)))
    assert files == [CONTENT] * 4
    assert server.asked == [None]


@pytest.mark.parametrize(
    ("own", "general", "expected"),
    [
        ("/a/b", "/c", "/a/b"),
        ("", "/c", "/c/vitascope"),
        (None, "", "/home/me/.cache/vitascope"),
        ("~/x", None, "/home/me/x"),
    ],
)
def test_the_environment_sets_the_cache_folder(monkeypatch, own, general, expected: str) -> None:
    for name, value in (("HOME", "/home/me"), ("VITASCOPE_CACHE", own), ("XDG_CACHE_HOME", general)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert str(cache_folder()) == expected


def test_cifar_is_downloaded_and_read_by_name(server: Server, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # a folder of that name would have precedence
    server.content = packed_cifar(tmp_path / "cifar.tgz", cifar_files("10-python")).read_bytes()
    file = dataclasses.replace(published(server.url, content=server.content), name="cifar-10-python.tar.gz")
    monkeypatch.setitem(KNOWN_SETS, "cifar10", (file,))
    for _ in range(2):
        splits = open_data("cifar10")
        assert splits.train.class_names == tuple(NAMES[10])
        assert [len(images) for images in splits.parts.values()] == [40, 10, 10]
    assert server.asked == [None]
    assert PublishedSet().contents("cifar10") == cache_folder() / "cifar10" / "cifar-10-python.tar.gz"


def test_a_path_has_precedence_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    write_tree(tmp_path / "mnist", {"cat": 4, "dog": 4})
    monkeypatch.chdir(tmp_path)
    assert open_data("mnist").train.class_names == ("cat", "dog")
