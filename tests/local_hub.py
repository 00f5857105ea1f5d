"""A stand-in for the Hugging Face hub on this machine: it accepts uploads and serves its files."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.http_server import Quiet, answering

COMMIT = "c" * 40
OWNER = "me"
"""The owner of every token."""


class Hub:
    """The repositories of a stand-in, by id and file name, and the tokens of the uploads."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.tokens: list[str | None] = []
        self.refuses = False
        self.instead: dict[str, bytes] = {}
        """What a proxy answers in the hub's place, by a part of the path."""
        self.hangs = ""
        """A part of the paths that get no answer until `released`."""
        self.released = threading.Event()

    def post(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """The answer to an upload request."""
        if self.refuses:
            return 403, {"error": "you may not write here"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or OWNER}/{asked['name']}"
            self.repositories.setdefault(repo, {})
            self.private[repo] = bool(asked.get("private")) or asked.get("visibility") == "private"
            return 200, {"url": f"{constants.ENDPOINT}/{repo}", "name": repo}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        repo, _, action = path.removeprefix("/api/models/").rpartition("/")[0].rpartition("/")
        if action == "preupload":
            files = [file["path"] for file in json.loads(body)["files"]]
            return 200, {
                "files": [{"path": file, "uploadMode": "regular", "shouldIgnore": False} for file in files]
            }
        assert action == "commit", path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                value = line["value"]
                self.repositories[repo][value["path"]] = base64.b64decode(value["content"])
        return 200, {"commitUrl": f"{constants.ENDPOINT}/{repo}/commit/{COMMIT}", "commitOid": COMMIT}

    def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """The answer to a download request: the file names of a repository, or one file."""
        if path.startswith("/api/models/"):
            repo = path.removeprefix("/api/models/").partition("/revision/")[0]
            if repo not in self.repositories:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            names = [{"rfilename": name} for name in self.repositories[repo]]
            return 200, {}, json.dumps({"id": repo, "sha": COMMIT, "siblings": names}).encode()
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        if repo not in self.repositories:  # the client asks for its own settings, too
            return 404, {}, b"{}"
        if rest.partition("/")[2] not in self.repositories[repo]:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        content = self.repositories[repo][rest.partition("/")[2]]
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, content


class Handler(Quiet, BaseHTTPRequestHandler):
    hub: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.replaced():
            return
        self.hub.tokens.append(self.headers.get("Authorization"))
        status, answer = self.hub.post(self.path.split("?")[0], body)
        self.reply(status, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def do_GET(self) -> None:
        if self.replaced():
            return
        self.reply(*self.hub.get(self.path.split("?")[0]))

    def do_HEAD(self) -> None:
        self.do_GET()

    def replaced(self) -> bool:
        """Whether somebody else answers."""
        if self.hub.hangs and self.hub.hangs in self.path:
            self.hub.released.wait()
        for part, body in self.hub.instead.items():
            if part in self.path:
                self.reply(200, {"Content-Type": "text/html"}, body)
                return True
        return False


@contextmanager
def local_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Let the hub's client talk to a stand-in, with a cache of its own."""
    hub = Hub()
    with answering(type("H", (Handler,), {"hub": hub})) as endpoint:
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        talk_to(endpoint, monkeypatch, cache)
        try:
            yield hub
        finally:
            hub.released.set()
            huggingface_hub.close_session()


def talk_to(endpoint: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let the hub's client send its requests to an address, with a cache of its own."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    move_hub(endpoint, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()


def move_hub(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the hub another address."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
