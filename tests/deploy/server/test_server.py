"""Servers in separate processes: signals, workers, addresses."""

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.data import encoded, noise
from tests.deploy.server.readers import no_model
from tests.deploy.server.served import NAMES, PATIENCE, HeldEngine, advance, grey, listening, picture, until
from tests.models import small_model
from vitascope.deploy.server import http_server
from vitascope.deploy.server.http_server import HTTPServer
from vitascope.deploy.server.metrics import SHARED_FOLDER
from vitascope.deploy.server.server import announce, listen, read_token, supervise, threads_per_model
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError
from vitascope.models.weights.loading import save_pretrained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(small_model(class_names=NAMES), tmp_path_factory.mktemp("served") / "model")


# Clients of a busy machine may take long to send what they have begun.
PROGRAM = f"""
import sys
from vitascope.cli import main
from vitascope.deploy.server import http_server

http_server.FAREWELL = {PATIENCE}
sys.exit(main(sys.argv[1:]))
"""


class Server:
    """`vitascope serve` in a separate process, on a free port."""

    def __init__(self, model: Path, *options: str) -> None:
        patient = ["--deadline-ms", "600000", "--grace-s", "600"]
        command = [sys.executable, "-c", PROGRAM, "serve", str(model), "--port", "0", *patient, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.banner = self.process.stdout.readline()
        self.url = self.banner.partition(" at ")[2].partition(" ")[0]

    def wait_until_ready(self) -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            assert self.process.poll() is None, self.process.communicate()
            with contextlib.suppress(httpx.TransportError):
                if get(f"{self.url}/readyz").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError("it never was ready")

    def end(self, signum: int) -> tuple[int, str]:
        """Stop it; return its exit status and its standard error."""
        self.process.send_signal(signum)
        _, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, err


def get(url: str) -> httpx.Response:
    """Send a request over a new connection; `verify=False` avoids reading certificates, which takes 40 ms."""
    return httpx.get(url, verify=False, timeout=PATIENCE)


@contextlib.contextmanager
def served(model: Path, *options: str) -> Iterator[Server]:
    server = Server(model, *options)
    try:
        server.wait_until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


async def keep_asking(url: str, answers: list[int], broken: list[str], stop: asyncio.Event) -> None:
    """Send predictions one after another, each on a new connection, until the port is closed."""
    content = picture()
    while not stop.is_set():
        try:
            async with httpx.AsyncClient(timeout=PATIENCE, verify=False) as client:
                answer = await client.post(f"{url}/v1/predict?top_k=31337", content=content)
                answers.append(answer.status_code)
        except httpx.ConnectError:
            return
        except httpx.TransportError as error:
            broken.append(repr(error))
            return


def test_sigterm_under_load_loses_no_request(model: Path) -> None:
    """All get a response, 200 or, during shutdown, 503; then the port is closed and the exit status is 0.

    The log has a line per request, without its query.
    """

    async def load(server: Server) -> tuple[list[int], list[str]]:
        answers: list[int] = []
        broken: list[str] = []
        stop = asyncio.Event()
        askers = [asyncio.ensure_future(keep_asking(server.url, answers, broken, stop)) for _ in range(8)]
        while len(answers) < 30 or answers.count(200) < 8:  # a busy machine rejects more
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*askers), PATIENCE)
        return answers, broken

    with served(model, "--queue", "4") as server:
        assert server.banner.startswith(f"{model} at http://127.0.0.1:")
        answers, broken = asyncio.run(load(server))
        _, err = server.process.communicate(timeout=PATIENCE)
        assert server.process.returncode == 0, err
    assert broken == []
    assert set(answers) <= {200, 429, 503}
    assert answers.count(200) >= 8
    lines = [line for line in err.splitlines() if " 127.0.0.1 POST /v1/predict " in line]
    assert len(lines) == len(answers)
    assert "31337" not in err  # a query may hold secrets


def decoders_of(server: Server) -> list[int]:
    pid = server.process.pid
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [child for child in children if b"server.decoder" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
def test_decoding_without_end_is_abandoned_after_a_second_signal(model: Path) -> None:
    with served(model, "--no-access-log") as server:
        while len(decoders := decoders_of(server)) < 2:
            time.sleep(0.01)
        for decoder in decoders:
            os.kill(decoder, signal.SIGSTOP)  # so that decoding never ends
        with httpx.Client(timeout=PATIENCE, verify=False) as client, ThreadPoolExecutor(1) as asking:
            waiting = asking.submit(client.post, f"{server.url}/v1/predict", content=picture())
            while "in_flight 1.0" not in get(f"{server.url}/metrics").text:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            while get(f"{server.url}/readyz").status_code != 503:
                time.sleep(0.01)
            status, err = server.end(signal.SIGHUP)
            with contextlib.suppress(httpx.TransportError):
                assert waiting.result().status_code >= 500
        assert (status, err) == (0, "vitascope: stopped; requests unanswered: 1\n")
        assert not any(Path(f"/proc/{decoder}").exists() for decoder in decoders)


async def test_request_that_does_not_end_is_abandoned_after_the_grace_period() -> None:
    engine = HeldEngine()
    async with listening(engine, grace_s=0.0) as (server, address):
        engine.hold()
        async with connected(address, prediction(1)) as waiting:
            await until(lambda: server._service.admission.taken.requests == 1)
            server.handle_exit(signal.SIGTERM, None)
            answer = await asyncio.wait_for(waiting.read(), PATIENCE)
            assert not answer.startswith(b"HTTP/1.1 200")
            assert not engine.go.is_set()


def test_workers_share_a_port_and_metrics_are_replaced_and_stop_together(model: Path) -> None:
    with served(model, "--workers", "2", "--no-access-log") as server:
        statuses, content = [], picture()
        while statuses.count(200) < 20:  # each a new connection: either may take it
            answer = httpx.post(f"{server.url}/v1/predict", content=content, verify=False, timeout=PATIENCE)
            statuses.append(answer.status_code)
            assert statuses[-1] in (200, 503)  # the first worker may still be loading
        text = get(f"{server.url}/metrics").text
        assert 'vitascope_requests_total{route="/v1/predict",status="200"} 20.0' in text
        pid = server.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        before = {child for child in children.read_text().split() if is_worker(child)}
        while len(before) < 2:
            before = {child for child in children.read_text().split() if is_worker(child)}
        second = [child for child in children.read_text().split() if child in before][-1]  # in their order
        os.kill(int(second), signal.SIGKILL)
        while is_worker(second):  # which takes connections until it has ended
            time.sleep(0.01)
        after = before
        while len(after - before) < 1 or len(after) < 2:
            assert get(f"{server.url}/livez").status_code == 200
            time.sleep(0.01)
            after = {child for child in children.read_text().split() if is_worker(child)}
        status, err = server.end(signal.SIGHUP)
    assert (status, err) == (0, "vitascope: worker 1 ended (-9); starting another\n")


def is_worker(pid: str) -> bool:
    """Whether a process is a worker of the server, not another process of multiprocessing."""
    try:
        return "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_endless_headers_are_rejected_and_use_no_memory() -> None:
    async with listening(HeldEngine()) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):  # it may close while this still sends
            for _ in range(100):
                writer.write(b"a" * 65536)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        async with connected(address, ASK) as again:
            assert (await again.readline()) == b"HTTP/1.1 200 OK\r\n"


ASK = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.asynccontextmanager
async def connected(address: tuple[str, int], *sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        for part in sent:
            writer.write(part)
            await writer.drain()
        yield reader
    finally:
        writer.close()


INCOMPLETE = {
    b"": b"",
    b"GET /livez HTTP/1.1\r\nX-Slow: ": b"HTTP/1.1 408 Request Timeout\r\n",
    b"\r\n": b"",
    ASK: b"HTTP/1.1 200 OK\r\n",
    ASK + b"\r\n": b"HTTP/1.1 200 OK\r\n",
    b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1": b"HTTP/1.1 405 ",
}


COMPLETE = [sent for sent, answered in INCOMPLETE.items() if answered and b"408" not in answered]
"""Those that are answered at once."""


async def test_connections_without_a_complete_request_are_closed() -> None:
    async with contextlib.AsyncExitStack() as stack:
        server, address = await stack.enter_async_context(listening(HeldEngine()))
        readers = [await stack.enter_async_context(connected(address, sent)) for sent in INCOMPLETE]
        await until(lambda: sum(one._in_head for one in server.connections) == 1)
        answers = [
            await reader.readline() if sent in COMPLETE else b""
            for reader, sent in zip(readers, INCOMPLETE, strict=True)
        ]
        advance(1000)
        for reader, answer, (sent, answered) in zip(readers, answers, INCOMPLETE.items(), strict=True):
            assert (answer + await asyncio.wait_for(reader.read(), PATIENCE)).startswith(answered), sent
        await until(lambda: not server.connections)


async def test_connection_whose_response_is_not_read_is_closed() -> None:
    engine = HeldEngine()
    engine.class_names = ("x" * 20_000_000,)
    async with listening(engine) as (server, address):
        asked = ASK.replace(b"/livez", b"/v1/model")
        async with connected(address, asked):
            await until(lambda: any(one.flow.write_paused for one in server.connections))
            (connection,) = server.connections
            advance(1000)
            await until(lambda: connection._unsent < math.inf)  # from now on, no byte is read
            advance(1000)
            await until(lambda: not server.connections)


async def test_half_open_connections_beyond_the_limit_are_closed_for_new_ones(caplog, monkeypatch) -> None:
    monkeypatch.setattr(http_server, "WARNING_INTERVAL", 600.0)
    async with contextlib.AsyncExitStack() as stack:
        server, address = await stack.enter_async_context(listening(HeldEngine(), max_connections=8))
        for _ in range(20):
            await stack.enter_async_context(connected(address, b"GET /livez HTTP/1.1\r\n"))
        for _ in range(3):
            async with connected(address, ASK) as reader:
                assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        await until(lambda: len(server.connections) <= 8)
    message = [record.getMessage() for record in caplog.records if record.name == "vitascope.server"]
    assert message == ["8 connections are open, which is the limit (--max-connections)"]


async def test_connection_beyond_the_limit_is_rejected_while_all_others_are_busy() -> None:
    engine = HeldEngine()
    async with contextlib.AsyncExitStack() as stack:
        server, address = await stack.enter_async_context(listening(engine, max_connections=2))
        engine.hold()
        working = [await stack.enter_async_context(connected(address, prediction(1))) for _ in range(2)]
        await until(lambda: server._service.admission.taken.requests == 2)
        async with connected(address) as reader:
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"too many connections" in answer
        engine.go.set()
        for reader in working:
            assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"


async def test_lack_of_file_descriptors_is_logged_rarely_and_recovers(caplog, monkeypatch) -> None:
    monkeypatch.setattr(http_server, "ACCEPT_PAUSE", 0.0)
    monkeypatch.setattr(http_server, "WARNING_INTERVAL", 600.0)
    failures = 0

    with caplog.at_level(logging.WARNING):
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept

        async def failing(port: socket.socket) -> tuple[socket.socket, object]:
            nonlocal failures
            failures += 1
            if failures <= 500:
                raise OSError(errno.EMFILE, "Too many open files")
            return await accept(port)

        monkeypatch.setattr(loop, "sock_accept", failing)
        async with listening(HeldEngine()) as (_, address), connected(address, ASK) as reader:
            assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
    assert failures > 500
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept a connection: Too many open files"
    ]


def prediction(brightness: int) -> bytes:
    body = grey(brightness)
    return b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def answered(server: HTTPServer, address: tuple[str, int], *parts: bytes) -> bytes:
    async with connected(address) as reader:
        await until(lambda: any(one.transport for one in server.connections))
        (connection,) = server.connections
        for part in parts:
            connection.data_received(part)
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
    await until(lambda: not server.connections)
    return answer


LARGE = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


async def test_head_is_counted_without_its_body_however_it_arrives() -> None:
    content = encoded(noise(300, 300))
    assert len(content) > 4 * http_server.MAX_HEAD
    sent = LARGE + b"Content-Length: %d\r\n\r\n" % len(content) + content
    async with listening(HeldEngine()) as listener:
        for cut in (1, 5, len(LARGE), sent.index(content) - 1, sent.index(content) + 1):
            answer = await answered(*listener, sent[:cut], sent[cut:])
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), cut


async def test_pipelined_requests_are_all_answered() -> None:
    count = 2000
    sent = ASK * (count - 1) + ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    async with listening(HeldEngine()) as listener:
        answer = await answered(*listener, sent[:50], sent[50:])
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == count


@pytest.mark.parametrize("trailer", [b"a:\r\n" * 40_000, b"a: " + b"a" * 160_000, b"x" * 160_000])
async def test_trailers_are_within_the_limit_of_a_head_and_do_not_become_headers(trailer: bytes) -> None:
    content = grey(3)
    chunked = LARGE + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(content), content)
    async with listening(HeldEngine()) as (server, address):
        scopes: list[dict[str, object]] = []
        app = server.config.loaded_app

        async def watched(scope, *rest) -> None:
            scopes.append(scope)
            await app(scope, *rest)

        server.config.loaded_app = watched
        answer = await answered(server, address, chunked + b"0\r\nX-Late: 1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"x-late" not in dict(scopes[0]["headers"])
        for size in (1000, len(trailer)):
            parts = [trailer[start : start + size] for start in range(0, len(trailer), size)]
            answer = await answered(server, address, chunked + b"0\r\n", *parts[:80])
            assert answer.startswith(b"HTTP/1.1 400 ")


@contextlib.asynccontextmanager
async def half_closed(address: tuple[str, int], sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    writer.write_eof()
    yield reader
    writer.close()


async def test_client_that_ends_its_side_gets_the_answer_and_one_that_leaves_is_noticed() -> None:
    engine = HeldEngine()
    async with listening(engine) as (server, address):
        engine.hold()
        async with half_closed(address, prediction(1)) as waiting:
            await until(lambda: any(one._ended for one in server.connections))
            assert await asyncio.to_thread(engine.begun.wait, PATIENCE)  # alone, in a batch of its own
            async with connected(address, prediction(2)):
                await until(lambda: server._service.batcher.pending == 2)
            await until(lambda: server._service.batcher.pending == 1)
            engine.go.set()
            answer = await waiting.read()
            assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
        async with half_closed(address, prediction(1) * 3) as waiting:
            assert (await waiting.read()).count(b"HTTP/1.1 200 OK\r\n") == 3
        async with half_closed(address, prediction(1)[:-1]) as waiting:
            assert await waiting.read() == b""
        await until(lambda: not server.connections)
    assert 2 not in engine.computed()


def test_model_that_cannot_be_loaded_ends_all_workers_in_one_error(capfd: pytest.CaptureFixture[str]) -> None:
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {signum: signal.getsignal(signum) for signum in signals}
    try:
        with listen(Settings(port=0)) as port, pytest.raises(UserError, match=r"^no such model$"):
            supervise(http_server.Deployment(no_model, Settings(workers=2, access_log=False)), port)
        (stops,) = {signal.getsignal(signum).__code__ for signum in signals}  # all of them as SIGHUP
        assert "STOP" in stops.co_names
    finally:
        os.environ.pop(SHARED_FOLDER, None)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    assert capfd.readouterr().err == ""


def test_port_in_use_and_foreign_address_are_rejected_and_the_default_is_loopback() -> None:
    with listen(Settings(port=0)) as taken:
        address, port = taken.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(UserError, match=f":{port}: Address already in use"):
            listen(Settings(port=port))
    with pytest.raises(UserError, match="cannot listen on 192"):
        listen(Settings(host="192.0.2.1", port=0))


@pytest.mark.parametrize("terminal", [True, False])
def test_link_has_the_token_on_a_terminal_only_and_an_open_server_advises_one(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    settings = Settings(port=0)
    with listen(settings) as port:
        announce(["model"], settings, port, "a+b/c d&e")
        number = port.getsockname()[1]
    link = f"http://127.0.0.1:{number}" + "/#token=a%2Bb%2Fc%20d%26e" * terminal
    assert capsys.readouterr().out == f"model at {link} (once loaded; /docs for its API; Ctrl-C stops it)\n"
    settings = Settings(host="0.0.0.0", port=0)
    with listen(settings) as port:
        announce(["model"], settings, port, None)
    assert "--token-file or VITASCOPE_TOKEN" in capsys.readouterr().err


def test_threads_are_at_most_those_of_the_environment_and_a_share_of_the_cores(monkeypatch) -> None:
    monkeypatch.setattr("vitascope.deploy.server.server.usable_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (threads_per_model(1), threads_per_model(3)) == (4, 1)
    for variable, threads in (("1", 1), ("3", 3), ("8,2", 4), (" 1 ", 1), ("many", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert threads_per_model(1) == threads


def test_token_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("VITASCOPE_TOKEN", raising=False)
    assert read_token(Settings()) is None
    monkeypatch.setenv("VITASCOPE_TOKEN", " from-outside\n")
    assert read_token(Settings()) == "from-outside"
    file = tmp_path / "token"
    file.write_text("from-a-file\n")
    assert read_token(Settings(token_file=file)) == "from-a-file"
    file.write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        read_token(Settings(token_file=file))
    with pytest.raises(UserError, match=r"cannot be read: .*No such file"):
        read_token(Settings(token_file=tmp_path / "nothing"))
