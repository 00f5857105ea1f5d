"""`vitascope zero-shot` and `vitascope predict --classes`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitascope as vs
from tests.data import noise
from tests.models.text import write_clip
from vitascope.cli import main
from vitascope.models.engines.engine import TorchEngine

pytest.importorskip("transformers", reason="transformers is not installed (vitascope[text])")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run: a CLIP and a picture."""
    monkeypatch.chdir(tmp_path)
    write_clip(tmp_path / "clip")
    Image.fromarray(noise(50, 40)).save(tmp_path / "cat.jpg")
    return tmp_path


def predicted(capsys: pytest.CaptureFixture[str], *words: str) -> list[tuple[str, float]]:
    assert main(["predict", *words, "--json", "--precision", "fp32"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    return [(guess["label"], guess["score"]) for guess in row["predictions"]]


def test_named_classes_are_predicted_as_by_the_written_model(capsys) -> None:
    words = ["--classes", "a cat", "a dog", "--prompts", "photo", "{} here"]
    assert main(["zero-shot", "clip", "pets", *words]) == 0
    assert capsys.readouterr().out == "2 classes, exclusive: pets\n"
    found = predicted(capsys, "clip", "cat.jpg", *words)
    assert {label for label, _ in found} == {"a cat", "a dog"}
    again = predicted(capsys, "pets", "cat.jpg")
    assert [label for label, _ in again] == [label for label, _ in found]
    assert dict(again) == pytest.approx(dict(found), abs=1e-5)
    default = predicted(capsys, "clip", "cat.jpg", "--classes", "a cat", "a dog")
    assert dict(default) != pytest.approx(dict(found), abs=1e-4)


def test_images_are_found_by_words(capsys, folder: Path) -> None:
    (folder / "photos").mkdir()
    for number in range(4):
        Image.fromarray(noise(50 + number, 40)).save(folder / "photos" / f"{number}.png")
    assert main(["similar", "clip", "a red car", "photos", "--json", "--out", "found.png"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["picture"] == "a red car"
    assert (folder / "found.png").is_file()
    model = vs.zero_shot("clip", ["a red car"], prompts="name", outputs="independent")
    model.head.scale.data.zero_()
    pixels = [model.preprocess.pixels(folder / "photos" / f"{number}.png") for number in range(4)]
    images = model.preprocess.normalize(torch.from_numpy(np.stack(pixels)))
    with torch.no_grad():
        cosines = model(images)[:, 0].tolist()
    for row in found["nearest"]:
        assert row["similarity"] == pytest.approx(cosines[row["index"]], abs=1e-4)
    values = [row["similarity"] for row in found["nearest"]]
    assert values == sorted(values, reverse=True)


def test_words_search_features_that_are_computed(capsys, folder: Path) -> None:
    (folder / "photos").mkdir()
    Image.fromarray(noise(50, 40)).save(folder / "photos" / "one.png")
    assert main(["embed", "clip", "photos", "--out", "features.npz"]) == 0
    found = vs.similar("clip", "a red car", "features.npz")
    assert found.is_words
    assert len(found) == 1
    both = vs.similar("clip", ["a red car", "a dog"], "features.npz")
    assert [each.picture for each in both] == ["a red car", "a dog"]
    assert both[0].similarities == pytest.approx(found.similarities)


def test_classifier_of_words_shares_cached_features_with_its_model() -> None:
    body = TorchEngine(vs.from_pretrained("clip"))
    assert TorchEngine(vs.zero_shot("clip", ["a", "b"])).body_digest == body.body_digest


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["predict", "clip", "cat.jpg", "--prompts", "{}"], "--prompts needs the names that stand in them"),
        (
            ["predict", "clip", "--classes", "a", "cat.jpg"],
            "before --classes, which takes every word",
        ),
        (["predict", "clip", "cat.jpg", "--classes", "a", "a"], "class 'a' is given more than once"),
        (["predict", "cifar10", "cat.jpg", "--classes", "a", "b"], "no text model, which words need"),
        (["zero-shot", "clip", "x", "--classes", "a", "b", "--prompts", "x"], "has not one {} for the name"),
        (["zero-shot", "clip", "x"], "--classes"),
        (["similar", "clip", "a red car", ".", "--layer", "0"], "leave out layer and pool"),
        (["similar", "clip", "missing.png", "."], "missing.png: no such file"),
        (["similar", "clip", "photos/missing", "."], "photos/missing: no such file"),
        (["similar", "cifar10", "a cat", "."], "'a cat': no such file; as words: cifar10: no text model"),
    ],
)
def test_requests_that_do_not_fit_are_one_line(capsys, words: list[str], reason: str, folder: Path) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert not (folder / "x").exists()
