"""Runs on images of several classes, from the table to the finished model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitascope as vs
from tests.models import small_model
from tests.training import tiny_config, undrawn
from vitascope.data.targets import ClassSets
from vitascope.errors import UserError
from vitascope.models.weights.loading import save_pretrained
from vitascope.runs import train
from vitascope.training.results import TrainResult
from vitascope.training.run.run import Run

CLASSES = ("left", "right", "top")


def write_table(root: Path, count: int = 60) -> Path:
    """Pictures whose halves are light for the classes that they have; a tenth has none."""
    generator = np.random.default_rng(0)
    (root / "pictures").mkdir(parents=True)
    lines = ["image,tags"]
    for number in range(count):
        has = generator.random(3) < (0.0 if number % 10 == 0 else 0.5)
        pixels = generator.normal(60, 20, (16, 16))
        pixels[:, :8] += 80 * has[0]
        pixels[:, 8:] += 80 * has[1]
        pixels[:8] += 80 * has[2]
        name = f"pictures/{number:03}.png"
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(root / name)
        lines.append(f"{name},{';'.join(np.array(CLASSES)[has])}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root / "labels.csv"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("several"))


def run(table: Path, folder: Path, **options: Any) -> TrainResult:
    with undrawn():
        return train(tiny_config(table, run=str(folder), **options))


@pytest.fixture(scope="module")
def trained(table: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return run(table, tmp_path_factory.mktemp("trained") / "run", epochs=6, lr=3e-3)


def test_a_run_ends_with_a_model_of_independent_classes_and_their_thresholds(trained: TrainResult) -> None:
    config = json.loads((trained.run / "model" / "config.json").read_text())
    assert (config["outputs"], config["class_names"]) == ("independent", list(CLASSES))
    assert len(config["thresholds"]) == 3
    found = Run(trained.run).predictions
    assert isinstance(found.targets, ClassSets)
    assert found.thresholds.tolist() == np.float32(config["thresholds"]).tolist()
    assert found.score.estimates["map"].value > found.score.estimates["map"].constant
    assert Run(trained.run).config["loss"] == "bce"


def test_evaluating_the_run_again_gives_its_result(trained: TrainResult) -> None:
    again = vs.evaluate(trained.run)
    np.testing.assert_allclose(again.probabilities, trained.evaluation.probabilities, atol=1e-6)
    assert again.summary()["map"] == pytest.approx(Run(trained.run).records("test")[0]["map"])
    assert {"map", "map_low", "map_high", "map_constant", "micro_f1", "exact"} <= again.summary().keys()
    assert "mAP" in repr(again)
    frame = again.to_dataframe()
    assert list(frame.columns) == ["labels", "predictions", "correct", *CLASSES]


def test_the_weights_of_the_highest_map_are_kept(trained: TrainResult) -> None:
    epochs = Run(trained.run).records("epoch")
    (kept,) = Run(trained.run).records("kept")
    assert kept["epoch"] == epochs[int(np.argmax([epoch["val_map"] for epoch in epochs]))]["epoch"]
    assert "the highest validation mAP" in kept["reason"]


@pytest.mark.parametrize(
    "options",
    [
        {"mixup": 0.2, "cutmix": 0.2, "label_smoothing": 0.2},
        {"class_weights": "balanced", "keep": "auto"},
        {"sampling": "balanced", "keep": "last", "patience": 1},
        {"model_options": {"head": "mlp"}},
    ],
)
def test_options_of_training_hold_for_several_classes(
    table: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    found = run(table, tmp_path / "run", epochs=2, **options)
    assert np.isfinite(found.evaluation.loss)


def test_a_model_of_several_classes_teaches_another_and_the_output_says_how_many_an_image_has(
    table: Path, tmp_path: Path, trained: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"teacher": str(trained.run), "pool": "cls", "distill": "soft"}
    found = run(table, tmp_path / "run", epochs=1, **options)
    assert "train_agree" in Run(found.run).records("epoch")[0]
    out = capsys.readouterr().out
    for words in ("separated by ';'", "classes per image, from 0 to 3", "a constant answer"):
        assert words in out


def test_a_model_of_one_class_cannot_teach_several(table: Path, tmp_path: Path) -> None:
    teacher = save_pretrained(small_model(num_classes=3, class_names=CLASSES), tmp_path / "teacher")
    with pytest.raises(UserError, match="are exclusive, those of the student independent"):
        run(table, tmp_path / "run", epochs=1, teacher=str(teacher), pool="cls")


def test_cross_entropy_is_rejected_before_a_folder_is_made(table: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="loss=cross_entropy is not for images of several classes"):
        run(table, tmp_path / "run", loss="cross_entropy")
    assert not (tmp_path / "run").exists()


def test_validation_images_of_which_only_broken_ones_have_a_class_are_rejected(tmp_path: Path) -> None:
    write_table(tmp_path)
    of_val = [f"pictures/{number:03}.png,{int(number == 0)},0,val" for number in range(20)]
    of_train = [f"pictures/{number:03}.png,1,{number % 2},train" for number in range(20, 60)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,left,right,split", *of_val, *of_train]) + "\n")
    (tmp_path / "pictures" / "000.png").write_bytes(b"broken")
    with pytest.raises(UserError, match="none of the 19 readable val images has a class"):
        run(tmp_path / "labels.csv", tmp_path / "run", epochs=1)
