"""Servers in processes of their own: signals, workers, addresses."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.server.served import NAMES, picture
from tests.model import small_model
from vitascope.deploy.server.serving import announce, listen, read_token
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError
from vitascope.weights.store import save_pretrained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return save_pretrained(small_model(class_names=NAMES), tmp_path_factory.mktemp("served") / "model")


class Server:
    """`vitascope serve` in a process of its own, at a free port."""

    def __init__(self, model: Path, *options: str) -> None:
        command = [sys.executable, "-m", "vitascope.cli", "serve", str(model), "--port", "0", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        self.url = self.said.partition(" at ")[2].partition(" ")[0]

    def wait_until_ready(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            assert self.process.poll() is None, self.process.communicate()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/readyz").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError("it never was ready")

    def end(self, signum: int) -> tuple[int, str]:
        """Stop it; returns its exit status and what it said on standard error."""
        self.process.send_signal(signum)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


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
    """Predictions one after the other, each on a new connection, until the port is closed."""
    content = picture()
    while not stop.is_set():
        try:
            async with httpx.AsyncClient(timeout=30) as client:
                answers.append(
                    (await client.post(f"{url}/v1/predict?key=secret", content=content)).status_code
                )
        except httpx.ConnectError:
            return
        except httpx.TransportError as error:
            broken.append(repr(error))
            return


def test_sigterm_under_load_loses_no_request(model: Path) -> None:
    """All get an answer, 200 or, once it stops, 503; then the port is closed and it ends with 0.

    Its log has a line for each, and no secrets.
    """

    async def load(server: Server) -> tuple[list[int], list[str]]:
        answers: list[int] = []
        broken: list[str] = []
        stop = asyncio.Event()
        askers = [asyncio.ensure_future(keep_asking(server.url, answers, broken, stop)) for _ in range(8)]
        while len(answers) < 30:
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*askers), 60)
        return answers, broken

    with served(model, "--queue", "4") as server:
        assert server.said.startswith(f"{model} at http://127.0.0.1:")
        answers, broken = asyncio.run(load(server))
        _, err = server.process.communicate(timeout=60)
        assert server.process.returncode == 0, err
    assert broken == []
    assert set(answers) <= {200, 429, 503}
    assert answers.count(200) >= 8
    lines = [line for line in err.splitlines() if " 127.0.0.1 POST /v1/predict " in line]
    assert len(lines) == len(answers)
    assert "secret" not in err


def test_workers_share_a_port_add_up_their_numbers_and_stop_together(model: Path) -> None:
    with served(model, "--workers", "2", "--no-access-log") as server:
        statuses = []
        while statuses.count(200) < 20:  # each a new connection: either may take it
            statuses.append(httpx.post(f"{server.url}/v1/predict", content=picture()).status_code)
            assert statuses[-1] in (200, 503)  # the first worker may still be loading
        text = httpx.get(f"{server.url}/metrics").text
        assert 'vitascope_requests_total{route="/v1/predict",status="200"} 20.0' in text
        status, err = server.end(signal.SIGTERM)
    assert (status, err) == (0, "")


def test_killed_worker_is_replaced_and_the_others_answer_meanwhile(model: Path) -> None:
    with served(model, "--workers", "2", "--no-access-log") as server:
        pid = server.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        before = {child for child in children.read_text().split() if is_worker(child)}
        while len(before) < 2:
            before = {child for child in children.read_text().split() if is_worker(child)}
        os.kill(int(max(before, key=int)), signal.SIGKILL)
        after = before
        while len(after - before) < 1 or len(after) < 2:
            assert httpx.get(f"{server.url}/livez").status_code == 200
            after = {child for child in children.read_text().split() if is_worker(child)}
        status, err = server.end(signal.SIGTERM)
    assert (status, err) == (0, "vitascope: worker 1 ended (-9); starting another\n")


def is_worker(pid: str) -> bool:
    """Whether a process is a server's, and not what multiprocessing starts beside it."""
    try:
        return "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_headers_without_end_are_refused_and_take_no_memory(model: Path) -> None:
    with served(model, "--no-access-log") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
            with contextlib.suppress(ConnectionError):  # it may close while this still sends
                for _ in range(100):
                    client.sendall(b"a" * 65536)
                    time.sleep(0.001)
            with contextlib.suppress(ConnectionError):
                assert client.recv(1000).startswith(b"HTTP/1.1 400 ")
        assert httpx.get(f"{server.url}/livez").status_code == 200


def test_model_that_cannot_be_loaded_ends_the_server_in_one_line(tmp_path: Path) -> None:
    server = Server(tmp_path, "--workers", "2")
    _, err = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    assert err.startswith("vitascope: error: ")
    assert err.count("\n") == 1


def test_port_in_use_and_foreign_address_are_refused() -> None:
    with listen(Settings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f":{port}: Address already in use"):
            listen(Settings(port=port))
    with pytest.raises(UserError, match="cannot listen on 192"):
        listen(Settings(host="192.0.2.1", port=0))


def test_default_address_is_reached_from_this_machine_only() -> None:
    with listen(Settings(port=0)) as port:
        assert port.getsockname()[0] == "127.0.0.1"
        assert port.family == socket.AF_INET


@pytest.mark.parametrize("terminal", [True, False])
def test_link_carries_the_token_on_a_terminal_and_in_no_log(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    settings = Settings(port=0)
    with listen(settings) as port:
        announce("model", settings, port, "a+b/c d&e")
        number = port.getsockname()[1]
    link = f"http://127.0.0.1:{number}" + "/#token=a%2Bb%2Fc%20d%26e" * terminal
    assert capsys.readouterr().out == f"model at {link} (/docs for its API; Ctrl-C stops it)\n"


def test_open_server_names_both_ways_to_set_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(host="0.0.0.0", port=0)
    with listen(settings) as port:
        announce("model", settings, port, None)
    assert "--token-file or VITASCOPE_TOKEN" in capsys.readouterr().err


def test_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_token(Settings(token_file=tmp_path / "nothing"))
