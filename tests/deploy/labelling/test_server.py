"""The local server: who may ask it, what it answers to anything else, and a whole session in a process."""

import contextlib
import http.client
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from PIL import Image

from tests.cli import colours, exit_status
from tests.data import write_picture
from vitascope.analysis.labelling.table import LabelTable
from vitascope.data.all_images import all_images
from vitascope.data.table_options import AS_RECOGNIZED
from vitascope.deploy.labelling.label import labelling
from vitascope.deploy.labelling.server import LabelServer
from vitascope.serialization import parse_json

JSON = {"Content-Type": "application/json"}
Ask = Callable[..., tuple[int, dict[str, str], bytes]]


def asking(server_port: int, token: str) -> Ask:
    """Requests with the token as the browser sends it, unless fields say something else."""

    def ask(
        path: str, body: object = None, method: str | None = None, **fields: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server_port, timeout=30)
        cookie = {"Cookie": f"vitascope-label-{server_port}={token}"}
        sent = {
            **cookie,
            **(JSON if body is not None else {}),
            **{n.replace("_", "-"): v for n, v in fields.items()},
        }
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method or ("GET" if body is None else "POST"), path, content, sent)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    return ask


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LabelServer]:
    """Four pictures of which one is broken, without threads that learn."""
    for number in range(3):
        write_picture(tmp_path / "photos" / f"{number}.png", size=(60, 40), seed=number)
    (tmp_path / "photos" / "broken.png").write_bytes(b"none")
    with labelling(
        str(tmp_path / "photos"), tmp_path / "labels.csv", several=False, port=0, table=AS_RECOGNIZED
    ) as opened:
        threading.Thread(target=opened.serve_forever, args=(0.05,), daemon=True).start()
        yield opened
        opened.session.stop()
        opened.shutdown()


@pytest.fixture
def ask(server: LabelServer) -> Ask:
    return asking(server.server_port, server.token)


def test_address_gives_the_page_its_token_as_a_cookie(server: LabelServer, ask: Ask) -> None:
    assert set(parse_qs(urlsplit(server.address).query)) == {"token"}
    status, fields, _ = ask(f"/?token={server.token}", Cookie="")
    assert (status, fields["Location"]) == (303, "/")
    assert "HttpOnly; SameSite=Strict" in fields["Set-Cookie"]
    status, fields, content = ask("/", Cookie=fields["Set-Cookie"].partition(";")[0])
    assert (status, fields["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"web/label.js" in content
    assert "script-src 'self'" in fields["Content-Security-Policy"]


@pytest.mark.parametrize(
    "fields",
    [
        {"Cookie": ""},
        {"Cookie": "vitascope-label-1=x"},
        {"Host": "evil.example:80"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ],
)
def test_others_may_neither_read_nor_change(fields: dict[str, str], server: LabelServer, ask: Ask) -> None:
    for path, body in (("/api/state", None), ("/picture/0", None), ("/", None), ("/api/undo", {})):
        status, _, content = ask(path, body, **fields)
        assert status == 403
        assert json.loads(content)["error"]
    assert ask("/?token=wrong")[0] == 403
    assert not server.session.table.labels


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/decide", b"{"),
        ("/api/decide", b"\xff"),
        ("/api/decide", b"[" * 100_000),
        ("/api/decide", []),
        ("/api/decide", {}),
        ("/api/decide", {"decisions": 3}),
        ("/api/decide", {"decisions": [3]}),
        ("/api/decide", {"decisions": [{"id": 0}]}),
        ("/api/decide", {"decisions": [{"id": 0, "labels": "cat"}]}),
        ("/api/decide", {"decisions": [{"id": -1, "labels": ["cat"]}]}),
        ("/api/decide", {"decisions": [{"id": 4, "labels": ["cat"]}]}),
        ("/api/skip", {"ids": ["a"]}),
        ("/api/skip", {"ids": [4]}),
        ("/api/skip", {"ids": [-1]}),
        ("/api/skip", {"ids": [10**400]}),
        ("/api/decide", {"decisions": [{"id": 0, "labels": ["x" * 200_000]}]}),
        ("/api/decide", {"decisions": [{"id": 0, "labels": ["a\0b"]}]}),
        ("/picture/" + 5000 * "9", None),
        ("//[", None),
        ("/api/classes", {"name": ""}),
        ("/api/accept", {"label": "cat", "fit": 9}),
        ("/api/nothing", {}),
        ("/api/nothing", None),
        ("/picture/4", None),
        ("/picture/x", None),
        ("/picture/0?side=x", None),
        ("/api/pictures?view=x", None),
        ("/web/../server.py", None),
        ("/web/%2e%2e/server.py", None),
        ("/web/nothing.js", None),
    ],
)
def test_impossible_requests_get_a_reason_and_change_nothing(
    path: str, body: object, server: LabelServer, ask: Ask
) -> None:
    status, _, content = ask(path, body)
    assert 400 <= status < 500
    assert json.loads(content)["error"]
    assert not server.session.table.labels


def test_cookies_of_other_servers_of_this_machine_do_not_hide_the_token(
    server: LabelServer, ask: Ask
) -> None:
    own = f"vitascope-label-{server.server_port}={server.token}"
    for others in ('a={"x": 1}', "b[c]=d", '"', "=", "e", 'f="1,2"'):
        assert ask("/api/state", Cookie=f"{others}; {own}")[0] == 200
        assert ask("/api/state", Cookie=f"{own}; {others}")[0] == 200
        assert ask("/api/state", Cookie=others)[0] == 403


def test_a_body_that_was_not_read_is_no_request(server: LabelServer) -> None:
    hidden = b"GET /api/state HTTP/1.1\r\n\r\n"
    for path in (b"/api/undo", b"/api/nothing"):
        head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1:1\r\nContent-Length: %d\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as client:
            client.sendall(head % (path, len(hidden)) + hidden)
            with client.makefile("rb") as answers:
                assert answers.read().count(b"HTTP/1.1 ") == 1


def test_a_page_that_has_gone_prints_nothing(server: LabelServer, capsys) -> None:
    for size in (b"9", b"900"):
        with socket.create_connection(("127.0.0.1", server.server_port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"POST /api/undo HTTP/1.1\r\nHost: a\r\nContent-Length: " + size + b"\r\n\r\n{")
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_changes_of_another_type_or_without_a_length_are_rejected(server: LabelServer, ask: Ask) -> None:
    change = b'{"decisions": [{"id": 0, "labels": ["cat"]}]}'
    assert ask("/api/decide", change, Content_Type="text/plain")[0] == 422
    assert ask("/api/decide", change, Content_Length=str(2**40))[0] == 422
    assert ask("/api/decide", change, method="PUT")[0] == 501
    assert not server.session.table.labels


def test_pictures_are_small_and_a_broken_or_deleted_one_is_an_error(
    server: LabelServer, ask: Ask, tmp_path: Path
) -> None:
    numbers = {Path(name).name: number for number, name in enumerate(server.session.names)}
    status, fields, content = ask(f"/picture/{numbers['0.png']}?side=32")
    assert (status, fields["Content-Type"]) == (200, "image/jpeg")
    assert max(Image.open(io.BytesIO(content)).size) == 32
    (tmp_path / "photos" / "1.png").unlink()
    for name in ("broken.png", "1.png"):
        assert ask(f"/picture/{numbers[name]}")[0] == 422
    state = json.loads(ask("/api/decide", {"decisions": [{"id": numbers["1.png"], "labels": ["cat"]}]})[2])
    assert state["labelled"] == 1


def test_a_waiting_page_hears_of_a_change(server: LabelServer, ask: Ask) -> None:
    version = json.loads(ask("/api/state")[2])["version"]
    threading.Timer(0.2, lambda: server.session.add_class("cat")).start()
    assert json.loads(ask(f"/api/state?after={version}")[2])["classes"] == [{"name": "cat", "count": 0}]


def test_second_server_of_a_table_is_told_the_address_of_the_first(
    server: LabelServer, tmp_path: Path, capsys
) -> None:
    assert (
        exit_status("label", str(tmp_path / "photos"), "--out", str(tmp_path / "labels.csv"), "--no-open")
        == 2
    )
    assert f"vitascope label at 127.0.0.1:{server.server_port};" in capsys.readouterr().err
    assert server.token not in (tmp_path / ".labels.csv.lock").read_text()


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Ask]]:
    """The command in a process of its own, and requests to it."""
    words = [sys.executable, "-m", "vitascope", "label", *arguments, "--no-open", "--workers", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = urlsplit(process.stdout.readline().split(" at ")[1].split()[0])
            assert address.port is not None
            yield process, asking(address.port, parse_qs(address.query)["token"][0])
        finally:
            process.kill()


def until(ask: Ask, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The first state of which something is true."""
    state = parse_json(ask("/api/state")[2].decode())
    while not condition(state):
        state = parse_json(ask(f"/api/state?after={state['version']}")[2].decode())
    return state


@pytest.mark.usefixtures("own_cache")
def test_labels_lead_to_a_classifier_and_a_killed_server_goes_on(tmp_path: Path) -> None:
    colours(tmp_path / "sorted", {"red": (200, 40, 40), "blue": (40, 40, 200)}, count=9)
    photos, out = tmp_path / "photos", tmp_path / "labels.csv"
    photos.mkdir()
    for number, file in enumerate(sorted((tmp_path / "sorted").rglob("*.png"))):
        os.rename(file, photos / f"{number}_{file.parent.name}.png")
    with command(str(photos), "--out", str(out)) as (process, ask):
        until(ask, lambda state: state["read"] == 18)
        for _ in range(12):
            (picture,) = json.loads(ask("/api/pictures?view=next&count=1")[2])["pictures"]
            name = picture["name"].rpartition("_")[2].removesuffix(".png")
            ask("/api/decide", {"decisions": [{"id": picture["id"], "labels": [name]}]})
        state = until(ask, lambda state: (state["fit"] or {"labels": 0})["labels"] == 12)
        assert state["fit"]["value"] == 1
        process.kill()
    labels = {Path(place).name: label.names[0] for place, label in LabelTable(out).labels.items()}
    assert len(labels) == 12
    assert all(name.endswith(f"_{label}.png") for name, label in labels.items())
    with command(str(photos), "--out", str(out)) as (process, ask):
        assert until(ask, lambda state: state["fit"])["labelled"] == 12
        suggestions = json.loads(ask("/api/pictures?view=next&count=18")[2])["pictures"]
        assert all(f"_{each['suggestion']['label']}." in each["name"] for each in suggestions)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
        assert process.returncode == 0
    assert printed.splitlines()[-1] == f"12 labels in {out}"
    assert f"next   vitascope train --data {out}" in errors
    assert all_images(str(out)).class_names == ("blue", "red")


@pytest.mark.usefixtures("own_cache")
def test_an_impossible_body_ends_the_command_with_a_reason(tmp_path: Path, capsys) -> None:
    write_picture(tmp_path / "photos" / "a.png", seed=0)
    out = tmp_path / "labels.csv"
    assert (
        exit_status("label", str(tmp_path / "photos"), "--out", str(out), "--body", "nothing", "--no-open")
        == 2
    )
    assert "nothing" in capsys.readouterr().err


def test_data_without_image_files_are_rejected(tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    for data in (str(tmp_path / "empty"), "digits"):
        assert exit_status("label", data, "--out", str(tmp_path / "labels.csv"), "--no-open") == 2
    assert exit_status("label", str(tmp_path), "--out", "labels.txt", "--no-open") == 2
    assert not (tmp_path / "labels.csv").exists()


def test_names_of_cameras_are_no_classes_and_those_of_folders_are(tmp_path: Path) -> None:
    for number, name in enumerate(("IMG_1", "IMG_2", "DSC_3", "DSC_4")):
        write_picture(tmp_path / "photos" / f"{name}.png", seed=number)
        write_picture(tmp_path / "sorted" / ("cat", "dog")[number % 2] / f"{name}.png", seed=number)
    options: dict[str, Any] = {"several": False, "port": 0, "table": AS_RECOGNIZED}
    with labelling(str(tmp_path / "photos"), tmp_path / "a.csv", **options) as opened:
        assert opened.session.state()["labelled"] == 0
    with labelling(str(tmp_path / "sorted"), tmp_path / "b.csv", **options) as opened:
        assert {c["name"]: c["count"] for c in opened.session.state()["classes"]} == {"cat": 2, "dog": 2}
    with labelling(str(tmp_path / "b.csv"), tmp_path / "c.csv", **options) as opened:
        assert opened.session.state()["given"] == 4
