"""A MODEL in a store: only what belongs to it is copied, once, and the answers are those of the disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import small_model
from tests.stores import Store
from tests.training import assert_bitwise
from vitascope.models.engines.runtimes import open_engine
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.stored_model import _copied, local_model
from vitascope.remote import cache
from vitascope.remote.stores import StoreError


@pytest.fixture(autouse=True)
def _one_look_per_test() -> Iterator[None]:
    yield
    _copied.cache_clear()


def names_of(place: object) -> list[str]:
    return sorted(path.relative_to(str(place)).as_posix() for path in Path(str(place)).rglob("*"))


def test_only_one_form_of_the_weights_is_copied(web_store: Store) -> None:
    folder = web_store.folder / "model"
    save_pretrained(small_model(), folder)
    for name in ("pytorch_model.bin", "old.pth", "README.md"):
        (folder / name).write_bytes(b"x")
    url = web_store.add("model")
    assert names_of(local_model(url)) == [
        *("README.md", "config.json", "model.safetensors", "preprocessor_config.json")
    ]
    expected = small_model()
    assert_bitwise(from_pretrained(url).state_dict(), expected.state_dict())
    engine = open_engine(f"{url}/", device="cpu")
    assert engine.name == "model"
    assert engine.preprocess == expected.preprocess
    assert len([each for each in web_store.server.requests if "pytorch_model.bin" in each]) == 1  # its size


def test_file_has_its_settings_beside_it(web_store: Store) -> None:
    save_pretrained(small_model(), web_store.folder / "model")
    (web_store.folder / "model" / "other.json").write_text("{}")
    url = f"{web_store.add('model')}/model.safetensors"
    local = Path(local_model(url))
    assert local.name == "model.safetensors"
    assert names_of(local.parent) == ["config.json", "model.safetensors", "preprocessor_config.json"]
    assert_bitwise(from_pretrained(url).state_dict(), small_model().state_dict())


def test_run_is_copied_without_its_checkpoints_and_figures(web_store: Store) -> None:
    run = web_store.folder / "run"
    save_pretrained(small_model(), run / "model")
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/step-1/state.pt", "figures/a.png"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(b"task: classify\n")
    found = names_of(local_model(web_store.add("run")))
    assert {"config.yaml", "metrics.jsonl", "model/config.json", "model/model.safetensors"} < set(found)
    assert not any(name.startswith(("checkpoints", "figures")) for name in found)


def test_unfinished_run_and_missing_model_are_one_line(web_store: Store) -> None:
    (web_store.folder / "run").mkdir()
    (web_store.folder / "run" / "config.yaml").write_text("task: classify\n")
    with pytest.raises(CheckpointError, match="this run has no finished model"):
        from_pretrained(web_store.add("run"))
    with pytest.raises(StoreError, match=r"/none: no such object, folder or bucket$"):
        from_pretrained(f"{web_store.url}/none")


def test_model_larger_than_the_cache_is_rejected(web_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pretrained(small_model(), web_store.folder / "model")
    monkeypatch.setattr(cache, "BLOCK", 2**6)
    monkeypatch.setenv("VITASCOPE_REMOTE_GB", "2e-6")
    with pytest.raises(ValueError, match="raise VITASCOPE_REMOTE_GB"):
        from_pretrained(web_store.add("model"))


def test_models_of_the_hub_keep_their_own_cache() -> None:
    assert local_model("hf://owner/name") == "hf-hub:owner/name"
    assert local_model("hf://owner/name@v1") == "hf-hub:owner/name@v1"
    assert local_model("owner/name") == "owner/name"
    assert local_model(Path("runs/a")) == Path("runs/a")
