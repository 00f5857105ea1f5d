"""Runs whose images are not square: training, and the exported file."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import noise
from tests.training import undrawn
from vitascope.deploy.export.export import export
from vitascope.predict.predictor import Predictor
from vitascope.run.run import Run
from vitascope.training.train import pretrain, train

TINY = {"embed_dim": 16, "depth": 1, "num_heads": 2, "epochs": 2, "batch_size": 8, "device": "cpu"}
EVERY_CHANGE = {
    "crop_scale": 0.5,
    "shift": 0.2,
    "rotate": 20.0,
    "color_jitter": 0.2,
    "three_augment": True,
    "randaugment": 2,
    "erase": 1.0,
    "mixup": 0.4,
    "cutmix": 0.5,
}


@pytest.fixture(scope="module")
def wide(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on images of 16x32 pixels, with every augmentation and progressive resizing."""
    with undrawn():
        return train(
            recipe="small-data",
            data=str(data),
            run=str(tmp_path_factory.mktemp("wide") / "run"),
            image_size=(16, 32),
            **TINY,
            **EVERY_CHANGE,
        ).run


def test_the_onnx_file_of_a_run_that_is_not_square_equals_its_model(wide: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs vitascope[onnx]")
    pytest.importorskip("onnxruntime", reason="needs vitascope[onnx]")
    pictures = [noise(height, width) for height, width in ((16, 32), (40, 40), (90, 30), (33, 120))]
    model = Run(wide).model()
    path = tmp_path / "model.onnx"
    export(model, path, images=pictures)
    ours, theirs = Predictor(model, precision="fp32"), Predictor(path, precision="fp32")
    assert theirs.preprocess.image_size == (16, 32)
    for picture in pictures:
        expected, found = ({p.index: p.score for p in each(picture)} for each in (ours, theirs))
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("target", ["mean_color", "mae"])
def test_masked_pre_training_that_is_not_square_starts_a_classifier(
    data: Path, tmp_path: Path, target: str
) -> None:
    options = {**TINY, "data": str(data), "image_size": (16, 32), "patch_size": (4, 8), "epochs": 1}
    with undrawn():
        first = pretrain(run=str(tmp_path / "masked"), target=target, **options)
        tuned = train(
            recipe="finetune",
            weights=str(first.run),
            data=str(data),
            run=str(tmp_path / "tuned"),
            epochs=1,
            device="cpu",
        )
    assert tuned.model.config.image_hw == (16, 32)
    assert tuned.model.config.grid == (4, 4)


def test_what_the_model_does_not_see_is_announced_with_the_size_that_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(20):
        path = tmp_path / "data" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.roll(noise(20, 44 if index < 2 else 40), index)).save(path)
    for size, announced in ((None, True), ((20, 40), False)):
        run = tmp_path / f"run-{announced}"
        options = TINY | {"epochs": 1, "patch_size": 4, "weights": None, "image_size": size}
        with undrawn():
            train(data=str(tmp_path / "data"), run=str(run), **options)
        text = capsys.readouterr().out
        assert ("sees 50% of the median image of 20x40 pixels" in text) == announced
        assert ("--image-size 20 40 would keep all" in text) == announced
