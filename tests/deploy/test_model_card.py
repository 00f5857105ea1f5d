"""Pushing to the hub: the uploaded files, the model card, and loading from there."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import vitascope as vs
from tests.local_hub import Hub, local_hub
from tests.training import tiny_config, undrawn, write_folder

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
    vs.push_to_hub(model, "me/insects", private=True)
    assert hub.private["me/insects"]
    card = hub.repositories["me/insects"]["README.md"].decode()
    assert metadata_of(card)["pipeline_tag"] == "image-classification"
    assert "ant, bee, cat" in card
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
    assert f"{test['images']} test images: {test['accuracy']:.2%}" in card


def test_card_of_a_run_names_its_data_without_the_folders_above(hub: Hub, small_run: Path) -> None:
    vs.push_to_hub(small_run, "me/digits")
    card = hub.repositories["me/digits"]["README.md"].decode()
    assert "on `photos`" in card
    assert str(small_run.parent) not in card


def test_name_without_owner_uses_the_tokens_owner(hub: Hub, model) -> None:
    assert "/me/insects/commit/" in vs.push_to_hub(model, "insects")
    assert "vs.Predictor('me/insects')" in hub.repositories["me/insects"]["README.md"].decode()


def test_class_names_add_no_lines_to_the_card(hub: Hub, model) -> None:
    model.config = model.config.replace(class_names=("ant", "bee\n# Install this", "cat"))
    vs.push_to_hub(model, "me/insects")
    card = hub.repositories["me/insects"]["README.md"].decode()
    assert "ant, bee # Install this, cat" in card


def test_rejected_upload_reports_the_reason_and_advice(hub: Hub, model) -> None:
    hub.refuses = True
    with pytest.raises(vs.UserError, match=r"me/insects: the hub did not accept the model: .*hf auth login"):
        vs.push_to_hub(model, "me/insects")


def test_bad_repository_name_is_rejected_before_anything_is_sent(hub: Hub, model) -> None:
    with pytest.raises(vs.UserError, match="no/such/name"):
        vs.push_to_hub(model, "no/such/name")
    assert not hub.repositories


def test_given_token_is_used(hub: Hub, model) -> None:
    vs.push_to_hub(model, "me/insects", token="hf_given")
    assert set(hub.tokens) == {"Bearer hf_given"}
