"""Fetching checkpoints: the real clients against a server in this process, and a cache in a folder."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from tests.http_server import Quiet, answering
from tests.local_hub import move_hub, talk_to
from vitascope.models.weights import hub
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.hub import (
    fetch_hub,
    fetch_torchvision,
    is_hub_id,
    torchvision_file,
    weights_name,
)

OLD, NEW = "1a2b3c4" + "0" * 33, "9f8e7d6" + "0" * 33
INDEX = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).encode()


class FakeHub:
    """The answers of the hub's server: commits with files, branches, and errors by address."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {NEW: {"config.json": b"{}", "model.safetensors": b"new"}}
        self.branches = {"main": NEW}
        self.errors: dict[str, tuple[int, dict[str, str]]] = {}  # part of "METHOD /path" to an answer
        self.pages: dict[str, bytes] = {}  # part of "METHOD /path" to what a proxy answers
        self.cut: set[str] = set()  # files that are sent only in part
        self.requests: list[str] = []
        self.answers = threading.Event()
        """Unset while requests hang."""
        self.answers.set()

    def answer(self, request: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a request such as "GET /api/models/o/n/revision/main"."""
        self.requests.append(request)
        if not self.answers.is_set():
            self.answers.wait()
            return 404, {}, b""
        for part, (status, headers) in self.errors.items():
            if part in request:
                return status, headers, b"{}"
        for part, page in self.pages.items():
            if part in request:
                return 200, {}, page
        words = request.split(" ", 1)[1].strip("/").split("/")
        if words[0] == "files":
            return 200, {}, self.commits["files"][words[1]]
        if words[:2] == ["api", "models"]:
            commit = self.branches.get(words[-1], words[-1])
            if commit not in self.commits:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            names = [{"rfilename": name} for name in self.commits[commit]]
            return 200, {}, json.dumps({"id": "o/n", "sha": commit, "siblings": names}).encode()
        commit = self.branches.get(words[3], words[3])  # owner/name/resolve/revision/file
        content = self.commits[commit].get(words[4])
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, content


class Handler(Quiet, BaseHTTPRequestHandler):
    fake: FakeHub

    def do_GET(self) -> None:
        status, headers, body = self.fake.answer(f"{self.command} {self.path.split('?')[0]}")
        cut = self.path.rsplit("/", 1)[-1] in self.fake.cut
        self.reply(status, headers, body, len(body) // 2 if cut else None)

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub on this machine and an empty cache; the client reads its constants at each call."""
    fake = FakeHub()
    with answering(type("H", (Handler,), {"fake": fake})) as endpoint:
        talk_to(endpoint, monkeypatch, tmp_path / "cache")
        monkeypatch.setattr(hub, "TORCHVISION_URL", f"{endpoint}/files/")
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client's pauses between its attempts
        try:
            yield fake
        finally:
            fake.answers.set()
            huggingface_hub.close_session()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def unplug(monkeypatch: pytest.MonkeyPatch) -> None:
    move_hub("http://127.0.0.1:1", monkeypatch)


def cache(
    tmp_path: Path, files: dict[str, bytes], repo_id: str = "o/n", commit: str = OLD, ref: str = "main"
) -> Path:
    folder = tmp_path / "cache" / f"models--{repo_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        for path in (blob, snapshot / name):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    if ref:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return snapshot


WHOLE = {"config.json": b"{}", "preprocessor_config.json": b"{}", "model.safetensors": b"old"}


def fetch_error(repo_id: str = "o/n", revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        fetch_hub(repo_id, revision)
    message = str(caught.value)
    assert message.startswith(f"{repo_id}: ")
    assert message.isprintable()
    return message


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


HUB_IDS = ("google/vit-base-patch16-224", "timm/vit_base_patch16_224.augreg_in21k", "hf-hub:vit_tiny")
HUB_IDS += ("hf-hub:timm/vit_tiny", "hf_hub:timm/vit_tiny")
PATHS = ("vit_b16", "a/b/c", "runs/flowers/", "../models/vit", "./vit", "/models/vit", "x" * 5000 + "/y")
PATHS += ("owner/na me", "owner/a--b", "runs/model.safetensors", "runs/model.ckpt", "torchvision/vit_b_16")


def test_a_hub_id_is_distinguished_from_a_path() -> None:
    assert [ref for ref in HUB_IDS + PATHS if is_hub_id(ref)] == list(HUB_IDS)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["pytorch_model.bin", "model.safetensors"], "model.safetensors"),
        (["model.safetensors.index.json", "pytorch_model.bin"], "model.safetensors.index.json"),
        (["pytorch_model.bin.index.json", "pytorch_model.bin"], "pytorch_model.bin"),
        (["B_16.npz", "vit.pth", "onnx/model.safetensors"], "vit.pth"),
        (["B_16.npz", "README.md"], "B_16.npz"),
        (["README.md", "model.h5"], None),
        ([".vit.pth", "B_16.npz"], "B_16.npz"),  # a leftover of an interrupted download
    ],
)
def test_the_safest_form_of_the_weights_is_chosen(names: list[str], expected: str | None) -> None:
    assert weights_name("o/n", names) == expected


def test_settings_and_one_form_of_the_weights_are_fetched(fake: FakeHub) -> None:
    others = {"pytorch_model.bin": b"x", "README.md": b"x", "tf_model.h5": b"x"}
    fake.commits[NEW] |= {"preprocessor_config.json": b'{"a": 1}', **others}
    folder = fetch_hub("hf-hub:o/n")
    assert folder.name == NEW
    assert names_in(folder) == {"config.json", "preprocessor_config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"new"


def test_the_tokenizer_beside_the_weights_is_fetched(fake: FakeHub) -> None:
    fake.commits[NEW] = {
        "config.json": b"{}",
        "open_clip_config.json": b"{}",
        "open_clip_pytorch_model.bin": b"less safe",
        "open_clip_model.safetensors": b"new",
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "special_tokens_map.json": b"{}",
        "spiece.model": b"SigLIP",
    }
    folder = fetch_hub("o/n")
    assert names_in(folder) == fake.commits[NEW].keys() - {"open_clip_pytorch_model.bin"}


@pytest.mark.parametrize("revision", [None, "main", NEW])
def test_fetched_files_are_used_without_the_hub(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, revision: str | None
) -> None:
    folder = fetch_hub("o/n", revision)
    unplug(monkeypatch)
    assert fetch_hub("o/n", revision) == folder
    warnings = [record.getMessage() for record in caplog.records if record.name == hub.__name__]
    assert len(warnings) == 1
    assert warnings[0].startswith("o/n: ")
    assert NEW in warnings[0]


def test_only_the_shards_of_the_index_are_fetched(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = {"1.safetensors": b"1", "2.safetensors": b"2"}
    fake.commits[NEW] = {"model.safetensors.index.json": INDEX, "3.safetensors": b"3", **shards}
    folder = fetch_hub("o/n")
    assert names_in(folder) == {"model.safetensors.index.json", *shards}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_hub("o/n") == folder


@pytest.mark.parametrize("status", [408, 429, 500])
def test_cached_files_are_used_if_the_hub_is_busy(fake: FakeHub, tmp_path: Path, status: int) -> None:
    snapshot = cache(tmp_path, WHOLE)
    fake.errors["api/models"] = (status, {})
    assert fetch_hub("o/n") == snapshot


@pytest.mark.parametrize(
    ("request_part", "status", "code", "reason"),
    [
        ("api/models", 404, "RepoNotFound", "no such model on the hub"),
        ("api/models", 401, "RepoNotFound", "a private one looks the same: `hf auth login`"),
        ("api/models", 404, "RevisionNotFound", "no revision 'main'"),
        ("api/models", 401, "", "unset HF_TOKEN"),
        ("HEAD", 403, "GatedRepo", "https://huggingface.co/o/n, then log in with `hf auth login`"),
        ("api/models", 403, "", "cannot be fetched"),
        ("api/models", 503, "", "the hub answers 503"),
        ("GET /o/n/resolve", 500, "", "the hub answers 500, and revision '9f8e7d6' is not complete"),
    ],
)
def test_http_errors_of_the_hub_are_explained(
    fake: FakeHub, request_part: str, status: int, code: str, reason: str
) -> None:
    fake.errors[request_part] = (status, {"X-Error-Code": code})
    assert reason in fetch_error()


@pytest.mark.parametrize("code", ["RepoNotFound", "GatedRepo"])
def test_without_access_cached_files_are_not_used_but_named(fake: FakeHub, tmp_path: Path, code: str) -> None:
    cache(tmp_path, WHOLE)
    fake.errors["api/models"] = (403, {"X-Error-Code": code})
    assert fetch_error().endswith("; in the cache: revision 1a2b3c4 (main)")


@pytest.mark.parametrize("fault", ["error", "cut"])
def test_an_interrupted_download_names_the_older_snapshot_and_keeps_it_usable(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    old = cache(tmp_path, WHOLE)
    if fault == "error":
        fake.errors["GET /o/n/resolve"] = (500, {})
    else:
        fake.cut.add("model.safetensors")
        monkeypatch.setattr(time, "sleep", lambda seconds: unplug(monkeypatch))
    assert fetch_error().endswith("; in the cache: revision 1a2b3c4 (main)")
    unplug(monkeypatch)
    assert fetch_hub("o/n") == old


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("revision", [None, "main", OLD, OLD[:7]])
def test_offline_the_cached_revision_is_used(
    fake: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture, revision: str | None
) -> None:
    snapshot = cache(tmp_path, WHOLE)
    assert fetch_hub("o/n", revision) == snapshot
    assert not caplog.records
    assert not fake.requests


@pytest.mark.usefixtures("offline")
def test_offline_a_setting_that_was_never_requested_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = cache(tmp_path, {"config.json": b"{}", "model.safetensors": b"old"})
    assert fetch_hub("o/n") == snapshot
    assert "preprocessor_config.json" in caplog.records[0].getMessage()


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "files", [{"config.json": b"{}"}, {"model.safetensors.index.json": INDEX, "1.safetensors": b"1"}]
)
def test_offline_a_partial_snapshot_is_not_used(tmp_path: Path, files: dict[str, bytes]) -> None:
    cache(tmp_path, files)
    message = fetch_error()
    assert "revision 'main' is not complete in the cache, and HF_HUB_OFFLINE is set" in message
    assert "in the cache:" not in message


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("revision", ["v2", NEW, "1a2b"])
def test_offline_another_revision_is_named_and_not_used(tmp_path: Path, revision: str) -> None:
    cache(tmp_path, WHOLE)
    assert fetch_error(revision=revision).endswith("; in the cache: revision 1a2b3c4 (main)")


@pytest.mark.usefixtures("offline")
def test_offline_similar_cached_models_are_named(tmp_path: Path) -> None:
    cache(tmp_path, WHOLE, repo_id="google/vit-base-patch16-224")
    cache(tmp_path, {"config.json": b"{}"}, repo_id="google/vit-base-patch16-384")
    assert fetch_error("google/vit-base-patch16-22").endswith("; cached models: google/vit-base-patch16-224")
    assert "cached models" not in fetch_error("microsoft/beit")


@pytest.mark.parametrize(
    "page", [b"<html>Log in</html>", b"", b"{}", b"[]", b"null", b'{"id": "o/n"}', b"[" * 100_000]
)
def test_an_answer_that_is_not_the_hubs_is_named_or_the_cache_is_used(
    fake: FakeHub, tmp_path: Path, page: bytes
) -> None:
    fake.pages["api/models"] = page
    assert re.search(
        r"http://\S+ does not answer as a hub does \(.*a wrong HF_ENDPOINT\), and revision", fetch_error()
    )
    cached = cache(tmp_path, WHOLE)
    assert fetch_hub("o/n") == cached


@pytest.mark.parametrize(
    ("ref", "file"),
    [
        ("torchvision/vit_b_16", "vit_b_16-c867db91.pth"),
        ("torchvision/vit_h_14", "vit_h_14_swag-80465313.pth"),
        ("torchvision/vit_l_16.IMAGENET1K_SWAG_LINEAR_V1", "vit_l_16_lc_swag-4d563306.pth"),
        ("ViT_B_32_Weights.IMAGENET1K_V1", "vit_b_32-d86f8d99.pth"),
        ("ViT_B_32_Weights.DEFAULT", "vit_b_32-d86f8d99.pth"),
        ("google/vit-base-patch16-224", None),
        ("vit_b_16", None),
    ],
)
def test_references_to_torchvision_are_understood(ref: str, file: str | None) -> None:
    assert torchvision_file(ref) == file


def test_unknown_weights_of_torchvision_are_rejected() -> None:
    for ref in ("torchvision/vit_b_17", "ViT_H_14_Weights.IMAGENET1K_V1", "torchvision/resnet18"):
        with pytest.raises(CheckpointError, match=f"^{ref}: torchvision has no such ViT"):
            torchvision_file(ref)


def test_a_file_of_torchvision_is_fetched_once_and_checked(fake: FakeHub, tmp_path: Path) -> None:
    name = f"vit-{hashlib.sha256(b'weights').hexdigest()[:8]}.pth"
    fake.commits["files"] = {name: b"weights"}
    path = fetch_torchvision(name)
    assert path == tmp_path / "torch" / "checkpoints" / name
    assert path.read_bytes() == b"weights"
    assert fetch_torchvision(name) == path
    assert len(fake.requests) == 1


@pytest.mark.parametrize("cut", [False, True])
def test_other_content_is_not_kept(fake: FakeHub, tmp_path: Path, cut: bool) -> None:
    good = hashlib.sha256(b"weights").hexdigest()[:8]
    name = f"vit-{good if cut else '00000000'}.pth"
    fake.commits["files"] = {name: b"weights"}
    fake.cut |= {name} if cut else set()
    with pytest.raises(CheckpointError, match="cannot be fetched: invalid hash value"):
        fetch_torchvision(name)
    assert names_in(tmp_path / "torch" / "checkpoints") == set()


def test_a_server_that_does_not_answer_is_given_up(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers.clear()
    monkeypatch.setattr(hub, "TIMEOUT", 0.2)
    with pytest.raises(CheckpointError, match=r"vit-00000000\.pth: cannot be fetched: .*timed out"):
        fetch_torchvision("vit-00000000.pth")
    assert names_in(tmp_path / "torch" / "checkpoints") == set()
