"""Levels of 16-bit images: decided by the data or the weights, or named; kept by the run and the model."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.models import small_model, with_preprocess
from tests.training import assert_bitwise, interrupted, tiny_config, undrawn
from vitascope.cli import main
from vitascope.data.datasets import open_data
from vitascope.deploy.predict.predictor import Predictor
from vitascope.models.weights.loading import save_pretrained
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.runs import resume, train
from vitascope.training import plan as planning
from vitascope.training.building import prepare, start_model
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.plan import Plan
from vitascope.training.run.run import Run


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16-bit images of 12-bit values, of two classes, with the greatest value 4000; one of 8 bits."""
    root, random = tmp_path_factory.mktemp("scans") / "scans", np.random.default_rng(0)
    for name, level in (("dark", 300), ("light", 2000)):
        (root / name).mkdir(parents=True)
        for number in range(12):
            values = random.integers(level, level + 1000, (16, 16)).astype(np.uint16)
            values[0, 0] = 4000
            Image.fromarray(values).save(root / name / f"{number:02}.{'png' if number % 2 else 'tif'}")
        Image.fromarray((values // 16).astype(np.uint8)).save(root / name / "00.png")
    return root


def plan_of(data: Path, **options: Any) -> Plan:
    return prepare(tiny_config(data, **options), open_data(str(data))).plan


def test_the_greatest_value_of_the_training_images_is_the_upper_level_and_is_announced(scans: Path) -> None:
    plan = plan_of(scans)
    assert plan.config.levels == (0, 4000)
    assert plan.chosen["levels"] == "levels 0 to 4,000"
    assert plan.explained() == ["levels 0 to 4,000: for 22 images of about 16x16 pixels"]


def test_named_levels_count_and_no_image_is_read_for_them(scans: Path, monkeypatch) -> None:
    monkeypatch.delattr(planning, "greatest_value")
    plan = plan_of(scans, levels=[10, 4095])
    assert plan.config.levels == (10, 4095)
    assert "levels" not in plan.chosen


def test_weights_keep_their_levels_unless_others_are_named(scans: Path, tmp_path: Path) -> None:
    model = small_model()
    fit = dataclasses.replace(default_preprocess(model.config), levels=(0, 1023))
    weights = save_pretrained(with_preprocess(model, fit), tmp_path / "weights")
    for named, levels in (({}, (0, 1023)), ({"levels": (0, 2047)}, (0, 2047))):
        config = TrainConfig.from_recipe("finetune", data=str(scans), weights=str(weights), **named)
        opened = prepare(config, open_data(str(scans)))
        assert opened.plan.config.levels == start_model(opened).preprocess.levels == levels


def test_a_run_records_its_levels_resumes_and_repeats_with_them(scans: Path, tmp_path: Path) -> None:
    with undrawn():
        with interrupted(3):
            train(tiny_config(scans, run=str(tmp_path / "run")))
        resumed = resume(tmp_path / "run")
        again = tmp_path / "again"
        words = ["--config", str(tmp_path / "run/config.yaml"), "--run", str(again), "--device", "cpu"]
        assert main(["train", *words]) == 0
    for run in (tmp_path / "run", again):
        assert Run(run).config["levels"] == [0, 4000]
        assert Run(run).model().preprocess.levels == (0, 4000)
    assert_bitwise(dict(resumed.model.state_dict()), dict(Run(again).model().state_dict()))


def test_the_model_predicts_16_bit_files_as_pictures_stretched_by_hand(scans: Path, tmp_path: Path) -> None:
    with undrawn():
        predict = Predictor(train(tiny_config(scans, run=str(tmp_path / "run"), epochs=1)).run)
    file = scans / "light" / "01.png"
    values = np.asarray(Image.open(file)).astype(float)
    by_hand = np.rint(values / 4000 * 255).astype(np.uint8)
    found, expected, dark = predict([file, by_hand, np.rint(values / 257).astype(np.uint8)])
    assert found == expected
    assert found != dark
    assert found._repr_html_() == expected._repr_html_()
