"""Pushing to the hub: the uploaded files, the model card, and loading from there."""

import dataclasses
import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import vitascope as vs
from tests.local_hub import Hub, local_hub
from tests.training import tiny_config, undrawn, write_folder
from vitascope.deploy.model_card import model_card

NAMES = ("ant", "bee", "cat")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with local_hub(monkeypatch, tmp_path / "cache") as found:
        yield found


@pytest.fixture
def model() -> vs.VisionTransformer:
    torch.manual_seed(0)
    made = vs.create_model(
        "vit_ti16", image_size=32, patch_size=16, depth=1, num_classes=3, class_names=NAMES
    ).eval()
    made.preprocess = dataclasses.replace(made.preprocess, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    return made


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on eight pictures, without figures."""
    root = tmp_path_factory.mktemp("card")
    data = write_folder(root / "photos", per_class=10, side=8, classes=("dark", "light"))
    with undrawn():
        return Path(vs.train(tiny_config(data, run=str(root / "run"), epochs=1)).run)


def metadata_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_pushed_model_loaded_from_the_hub_has_equal_predictions(hub: Hub, model) -> None:
    url = vs.push_to_hub(model, "me/insects")
    assert url.endswith(f"/me/insects/commit/{'c' * 40}")
    assert set(hub.repositories["me/insects"]) >= {
        "README.md", "config.json", "model.safetensors", "preprocessor_config.json",
    }  # fmt: skip
    there = vs.from_pretrained("me/insects")
    assert there.preprocess == model.preprocess
    picture = np.random.default_rng(0).integers(0, 256, (40, 50, 3), "uint8")
    assert vs.Predictor("me/insects")(picture) == vs.Predictor(model)(picture)


def test_card_lists_classes_preprocessing_and_how_to_load(hub: Hub, model) -> None:
    model.config = model.config.replace(class_names=("ant", "bee\n# Install this", "cat"))
    vs.push_to_hub(model, "me/insects", private=True, token="hf_given")
    assert hub.private["me/insects"]
    assert set(hub.tokens) == {"Bearer hf_given"}
    card = hub.repositories["me/insects"]["README.md"].decode()
    assert metadata_of(card)["pipeline_tag"] == "image-classification"
    assert "ant, bee # Install this, cat" in card  # no line of its own
    assert "mean:\n- 0.1\n- 0.2\n- 0.3\n" in card
    assert "vs.Predictor('me/insects')" in card
    assert "model-index" not in metadata_of(card)  # nothing was measured


def test_card_of_a_run_has_its_test_accuracy(hub: Hub, small_run: Path) -> None:
    vs.push_to_hub(small_run, "me/digits")
    card = hub.repositories["me/digits"]["README.md"].decode()
    test = vs.Run(small_run).records("test")[-1]
    (index,) = metadata_of(card)["model-index"]
    (metric,) = index["results"][0]["metrics"]
    assert metric == {"type": "accuracy", "value": round(test["accuracy"], 4)}
    assert "Trained for 1 epoch on `photos`" in card
    assert str(small_run.parent) not in card
    assert f"{test['images']} test images: {test['accuracy']:.2%}" in card


@pytest.mark.parametrize("target", ["mean_color", "mae"])
def test_card_of_a_pretraining_claims_no_classes(hub: Hub, small_run, tmp_path, target: str) -> None:
    data = small_run.parent / "photos"
    with undrawn():
        run = vs.pretrain(
            tiny_config(data, task="masked", target=target, run=str(tmp_path / "body"), epochs=1)
        ).run
    vs.push_to_hub(run, "me/body")
    card = hub.repositories["me/body"]["README.md"].decode()
    (test,) = vs.Run(run).records("test")
    assert f"Loss for hidden patches of {test['images']} test images: {test['loss']:.3f}." in card
    assert (
        f"Pre-trained without labels for 1 epoch on `photos`: it predicted hidden patches (target `{target}`)"
        in card
    )
    assert metadata_of(card)["pipeline_tag"] == "image-feature-extraction"
    assert "## Classes\n\nNone: the model returns features.\n" in card
    for claim in ("ccuracy", "model-index", "classification", "Predictor"):
        assert claim not in card


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 3}, "Trained for 0.75 epochs on"),
        ({"epochs": 9, "patience": 1, "lr": 1e-12}, "for 2 epochs on `photos`, when early stopping ended"),
    ],
)
def test_card_states_the_epochs_that_a_run_took(small_run: Path, tmp_path: Path, options, words: str) -> None:
    with undrawn():
        run = vs.train(tiny_config(small_run.parent / "photos", run=str(tmp_path / "run"), **options)).run
    assert words in model_card(vs.from_pretrained(run), "me/x", vs.Run(run))


def test_card_that_cannot_be_written_creates_no_repository(hub: Hub, small_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(small_run, run)
    (run / "metrics.jsonl").write_text('{"kind": 3}\n{}\n')
    with pytest.raises(vs.UserError, match=r"metrics\.jsonl is broken"):
        vs.push_to_hub(run, "me/digits")
    assert not hub.repositories


def test_name_without_owner_uses_the_tokens_owner(hub: Hub, model) -> None:
    assert "/me/insects/commit/" in vs.push_to_hub(model, "insects")
    assert "vs.Predictor('me/insects')" in hub.repositories["me/insects"]["README.md"].decode()


def test_rejected_upload_reports_the_reason_and_advice(hub: Hub, model) -> None:
    hub.refuses = True
    with pytest.raises(vs.UserError, match=r"me/insects: the model was not uploaded: .*hf auth login"):
        vs.push_to_hub(model, "me/insects")


@pytest.mark.parametrize("where", ["create", "preupload", "commit"])
def test_answer_that_is_not_the_hubs_is_named(hub: Hub, model, where: str) -> None:
    for body in (b"<html>Log in</html>", b"", b"[]", b'{"url": 5}'):
        hub.instead[where] = body
        with pytest.raises(vs.UserError, match=r"does not answer as a hub does \(.*a wrong HF_EN") as raised:
            vs.push_to_hub(model, "me/insects")
        assert "hf auth login" not in str(raised.value)


@pytest.mark.parametrize("url", ["https://example.com/me/insects", "me/others", "/"])
def test_model_is_not_uploaded_to_another_repository(hub: Hub, model, url: str) -> None:
    hub.repositories["me/others"] = {}
    hub.instead["create"] = json.dumps({"url": url}).encode()
    with pytest.raises(vs.UserError, match=r"me/insects: .*does not answer as a hub does"):
        vs.push_to_hub(model, "me/insects")
    assert hub.repositories == {"me/others": {}}


@pytest.mark.parametrize("where", ["create", "preupload", "commit"])
def test_hub_that_does_not_answer_is_given_up(hub: Hub, model, monkeypatch, where: str) -> None:
    monkeypatch.setattr("vitascope.network.LIMIT", 0.5)
    monkeypatch.setattr("vitascope.network.SLOWEST", 1e9)
    hub.hangs = where
    with pytest.raises(
        vs.UserError, match=r"me/insects: .* http://.* did not answer within 0.5 s; try again"
    ):
        vs.push_to_hub(model, "me/insects")
    hub.released.set()


def test_full_temporary_folder_is_named(hub: Hub, model, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(
        vs.UserError, match=r"No space left on device .*set TMPDIR to another folder"
    ) as raised:
        vs.push_to_hub(model, "me/insects")
    assert "hf auth login" not in str(raised.value)
    assert not hub.repositories


def test_bad_repository_name_is_rejected_before_anything_is_sent(hub: Hub, model) -> None:
    with pytest.raises(vs.UserError, match="no/such/name"):
        vs.push_to_hub(model, "no/such/name")
    assert not hub.repositories
