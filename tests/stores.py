"""Servers on this machine in place of a store and of a web server, with the faults of real ones."""

from __future__ import annotations

import dataclasses
import hashlib
import mimetypes
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from werkzeug import Request, Response
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Server:
    """A server whose answers can be made to fail.

    Attributes:
        url: its address.
        requests: method and path of each request so far.
        every_third_fails: whether every third request is answered with status 500.
        seconds: that each answer takes.
        cut: the number of answers that break off in the middle, from now on.
        drips: whether files come a byte at a time from now on, until this is reset.
        dripping: set while one does.
        gone: whether connections are closed without an answer.
        expired: whether every request is answered with the error for expired credentials.
    """

    def __init__(self, application: Application, url: str) -> None:
        self.url = url
        self.requests: list[str] = []
        self.every_third_fails = False
        self.seconds = 0.0
        self.cut = 0
        self.drips, self.dripping = False, threading.Event()
        self.gone = False
        self.expired = False
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            fails = self.every_third_fails and len(self.requests) % 3 == 0
            cuts = self.cut > 0 and environ["REQUEST_METHOD"] == "GET"
            self.cut -= cuts
        time.sleep(self.seconds)
        if self.gone:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        if self.expired:
            return Response(EXPIRED, 403, mimetype="application/xml")(environ, start_response)
        if fails:
            return Response("the server is out of order", 500)(environ, start_response)
        answer = self._application(environ, start_response)
        if self.drips and environ["REQUEST_METHOD"] == "GET" and "." in environ["PATH_INFO"]:
            return self._dripped(answer)
        return _half(answer, environ["werkzeug.socket"]) if cuts else answer

    def _dripped(self, answer: Iterable[bytes]) -> Iterator[bytes]:
        self.dripping.set()
        for byte in b"".join(answer):
            yield bytes([byte])
            pause = time.monotonic() + 0.05
            while self.drips and time.monotonic() < pause:
                time.sleep(0.01)


def _half(answer: Iterable[bytes], connection: socket.socket) -> Iterator[bytes]:
    content = b"".join(answer)
    yield content[: len(content) // 2]
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: object, **__: object) -> None:
        """Print nothing."""


@contextmanager
def serving(application: Application) -> Iterator[Server]:
    """A server with this application on a free port of the loopback interface."""
    server = Server(application, "")
    listening = make_server("127.0.0.1", 0, server, threaded=True, request_handler=_Quiet)
    server.url = f"http://127.0.0.1:{listening.port}"
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)  # ends soon
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@dataclasses.dataclass
class Store:
    """A store with a folder, beside a local folder of the same files."""

    server: Server
    url: str
    folder: Path
    put: Callable[[Path, str], None]
    """Write a file into the store, by its name there."""

    def add(self, name: str) -> str:
        """Copy a file or a folder to the store; returns its URL."""
        for path in sorted([self.folder / name, *(self.folder / name).rglob("*")]):
            if path.is_file():
                self.put(path, path.relative_to(self.folder).as_posix())
        return f"{self.url}/{name}"


@pytest.fixture(params=["http", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    """A web server, and S3."""
    found: Store = request.getfixturevalue("web_store" if request.param == "http" else "s3_store")
    return found


@pytest.fixture
def web_store(tmp_path: Path, _quick: None) -> Iterator[Store]:
    """A web server, which is read only."""
    pytest.importorskip("aiohttp")
    root = tmp_path / "web"

    def put(path: Path, name: str) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / name)

    with serving(files_of(root)) as server:
        yield Store(server, server.url, tmp_path, put)


@pytest.fixture
def s3_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _quick: None) -> Iterator[Store]:
    """moto's S3 with an empty bucket, and an environment that leads there."""
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    with serving(moto.DomainDispatcherApplication(moto.create_backend_app)) as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": str(tmp_path / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        }.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # those of another server
        client = pytest.importorskip("boto3").client("s3")
        client.create_bucket(Bucket=BUCKET)

        def put(path: Path, name: str) -> None:
            client.put_object(Bucket=BUCKET, Key=f"team/{name}", Body=path.read_bytes())

        yield Store(server, f"s3://{BUCKET}/team", tmp_path, put)
        pytest.importorskip("moto.backends").get_backend("s3").reset()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def _quick(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, and short pauses before a request is repeated."""
    monkeypatch.setattr("vitascope.remote.stores.PAUSE", 0.01)
    monkeypatch.setattr("vitascope.remote.stores.LONGEST_PAUSE", 0.05)


def files_of(root: Path, *, ranges: bool = True, versions: bool = True) -> Application:
    """A web server of the files below a folder, with lists of names and parts of files."""

    @Request.application
    def answer(request: Request) -> Response:
        path = root / request.path.strip("/")
        if path.is_dir():
            names = [f"{each.name}/" if each.is_dir() else each.name for each in sorted(path.iterdir())]
            links = "".join(f'<a href="{name}">{name}</a>' for name in ["../", "?C=N;O=D", *names])
            return Response(f"<html>{links}</html>", mimetype="text/html")
        if not path.is_file():
            return Response("no such file", 404)
        content = path.read_bytes()
        response = Response(content, mimetype=mimetypes.guess_type(path)[0] or "application/octet-stream")
        if versions:
            response.set_etag(hashlib.sha256(content).hexdigest())
        if ranges:
            response.make_conditional(request, accept_ranges=True, complete_length=len(content))
        return response

    return answer
