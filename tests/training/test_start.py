from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants

from tests.forked import in_group
from tests.local_hub import local_hub
from tests.models import small_config, small_model
from tests.training import write_folder
from tests.training.test_several_labels import write_table
from vitascope import runs
from vitascope.cli import main
from vitascope.data.datasets import open_data
from vitascope.data.label_measures import LabelScore
from vitascope.data.measures import AccuracyScore
from vitascope.deploy.predict.predictor import Predictor
from vitascope.errors import UserError
from vitascope.models.ensemble import Ensemble
from vitascope.models.sizes import named_config
from vitascope.models.weights.loading import save_pretrained
from vitascope.training import building, start
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.plan import Plan, Request, Start
from vitascope.training.run.run import Run
from vitascope.training.start import BodyScore, best_start, decide


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and caches of the test's own."""
    monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "features"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def started(data: Path | str, **options: Any) -> Start:
    images = open_data(str(data)).identified().train
    named = options.pop("named", False)
    config = TrainConfig(data=str(data), weights="auto", workers=0, **options)
    return best_start(config, images, len(images), named=named, device="cpu", began=start.time.monotonic())


def body(right: int, **options: Any) -> BodyScore:
    """A body whose features classify `right` of 100 images, of five equally frequent classes."""
    config = options.pop("config", small_config(num_classes=2, class_names=("cat", "dog")))
    score = AccuracyScore(right=right, total=100, balanced=0.5, macro_f1=0.5, majority=0.2)
    return BodyScore(name="body", config=config, score=score, guessing=0.2, seconds=0.01, **options)


NOTHING = Start(weights="body", recipe="finetune", reasons=(), fits_head=True)
LARGE = named_config("vit_s16")


@pytest.mark.parametrize(
    ("found", "classes", "images", "shown", "recipe", "reason"),
    [
        (body(60), ("dog", "cat"), 500, math.inf, "head", "the body knows all classes"),
        (body(95), ("a", "b"), 500, math.inf, "head", "94% of the way from guessing (20.0%)"),
        (body(60), ("a", "b"), 500, math.inf, "small-finetune", "no limit of time"),
        (body(60), ("a", "b"), 100, math.inf, "finetune", "tuned, by finetune"),
        (body(60), ("a", "b"), 500, 4_001, "small-finetune", "time for 4,001 images, with repetitions"),
        (body(60), ("a", "b"), 500, 3_900, "head", "time for 3,900 images, with repetitions"),
        (body(60, config=LARGE), ("a", "b"), 500, 9_900, "head", "and more needs 10,000"),
        (body(61, config=LARGE), ("a", "b"), 5_000, 39_000, "lora", "less than 40,000 images"),
        (body(60, config=LARGE), ("a", "b"), 500, math.inf, "lora", "few images for 22.1 M parameters"),
        (body(61, config=LARGE), ("a", "b"), 5_000, math.inf, "finetune", "no limit of time"),
        (body(60), ("dog", "cat"), 5_000, math.inf, "small-finetune", "no limit of time"),
        (body(59), ("a", "b"), 5_000, math.inf, "small-data", "49% of the way from guessing"),
        (body(59), ("a", "b"), 5_000, 39_000, "small-finetune", "time for 39,000 images"),
        (body(61), ("a", "b"), 5_000, math.inf, "small-finetune", "no limit of time"),
    ],
)
def test_classes_images_and_time_decide_what_is_trained(
    found: BodyScore, classes: tuple[str, ...], images: int, shown: float, recipe: str, reason: str
) -> None:
    chosen = decide(found, classes, images, shown=shown * found.seconds, quickest=found.seconds)
    assert ("head" if chosen.fits_head else chosen.recipe) == recipe
    assert chosen.weights == (None if recipe == "small-data" else "body")
    assert reason in chosen.reasons[-1]
    assert len(chosen.reasons) == (1 if recipe == "small-data" else 2)


@pytest.mark.usefixtures("without_figures")
def test_from_the_command_to_a_model(tmp_path, capsys, monkeypatch) -> None:
    """The head is the probe's, the plan has the reasons, and the configuration repeats the run bitwise."""
    monkeypatch.chdir(tmp_path)
    data = write_folder(tmp_path / "photos")
    words = ["train", "--data", str(data), "--weights", "auto", "--minutes", "1"]
    words += ["--run", "run", "--workers", "0"]
    assert main([*words, "--device", "cpu", "--bodies", str(save_pretrained(small_model(), "small"))]) == 0
    out = capsys.readouterr().out
    run = Run(Path("run"))
    reasons = run.plan["start"]
    assert all(reason in out for reason in reasons)
    assert "the best of 2 bodies" in reasons[0]
    assert "not random weights: 24 images" in reasons[1]
    assert run.plan["asked"]["options"]["weights"] == "auto"
    assert run.config["weights"] in ("cifar10", str(tmp_path / "small"))
    assert (run.config["bodies"], run.config["minutes"]) == ([], None)
    assert (run.config["freeze"], run.config["steps"], run.config["epochs"]) == (True, 0, None)
    assert (run.records("step"), run.records("epoch"), run.records("test")[0]["step"]) == ([], [], 0)
    assert Plan.of_run(run, TrainConfig.from_dict(run.config)).start == tuple(reasons)
    assert main(["train", "--config", "run/config.yaml", "--run", "again", "--workers", "0"]) == 0
    weights = [Path(folder, "model", "model.safetensors").read_bytes() for folder in ("run", "again")]
    assert weights[0] == weights[1]
    assert Predictor("run")(data / "light" / "000.png").best.label == "light"


@pytest.mark.usefixtures("without_figures")
def test_fitted_head_is_logistic_regression_on_frozen_features(data, tmp_path) -> None:
    """No step changes it; few validation images set no temperature. It gets no more epochs."""
    options = {"data": str(data), "weights": "cifar10", "freeze": True, "steps": 0, "device": "cpu"}
    result = runs.train(run=str(tmp_path / "run"), workers=0, **options)
    config, splits = TrainConfig.from_recipe(**options), open_data(str(data))
    body = building.start_model(building.prepare(config, splits))
    weight, bias = start.fitted_head(body, splits.train, config)
    head = result.model.state_dict()
    np.testing.assert_allclose(head["head.weight"].numpy(), weight, atol=1e-4)
    np.testing.assert_allclose(head["head.bias"].numpy(), bias, atol=1e-4)
    others = {name: value for name, value in body.state_dict().items() if not name.startswith("head.")}
    assert all(torch.equal(head[name], value) for name, value in others.items())
    assert Run(result.run).planned_epochs == 0
    with pytest.raises(UserError, match="its head is fitted, without epochs"):
        runs.resume(result.run, epochs=2)


def test_named_way_to_train_is_kept_and_a_resumed_run_compares_nothing(data, tmp_path, unfit, capsys) -> None:
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        runs.train(data=str(data), weights="auto", lora=2, epochs=1, run=str(run), workers=0)
    assert (Run(run).config["lora"], Run(run).config["weights"]) == (2, "cifar10")
    (reason,) = Run(run).plan["start"]
    assert "body   cifar10: " in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        runs.resume(run)
    out = capsys.readouterr().out
    assert reason in out
    assert "body   cifar10: " not in out


def test_class_weights_are_not_lost_in_a_fitted_head(data, tmp_path) -> None:
    known = tmp_path / "known"
    save_pretrained(small_model(num_classes=2, class_names=("dark", "light")), known)
    found = started(data, bodies=(str(known),), class_weights=("dark=2",))
    assert found.recipe == "finetune"
    assert "counts all images alike" in found.reasons[-2]
    with pytest.raises(UserError, match="steps=0 fits a head that counts all images alike"):
        runs.train(data=str(data), weights="cifar10", freeze=True, steps=0, class_weights=["dark=2"])


def test_best_body_is_taken_by_cross_validation_and_one_line_says_how_each_did(
    data, tmp_path, capsys, caplog
) -> None:
    """A body of constant features guesses, one of five channels reads no pictures."""
    blind = small_model()
    with torch.no_grad():
        for parameter in blind.parameters():
            parameter.zero_()
    save_pretrained(blind, tmp_path / "blind")
    save_pretrained(small_model(in_channels=5), tmp_path / "five")
    save_pretrained(Ensemble.of([small_model(), small_model()]), tmp_path / "several")
    bodies = tuple(str(tmp_path / name) for name in ("blind", "five", "several"))
    found = started(data, bodies=bodies)
    assert found.weights == "cifar10"
    out = capsys.readouterr().out
    assert "body   cifar10: " in out
    assert f"body   {tmp_path / 'blind'}: 50.0% (" in out
    assert f"{tmp_path / 'five'} is left out: pictures have 1 or 3 channels, and it reads 5" in caplog.text
    assert (
        f"{tmp_path / 'several'} is left out: it is an ensemble of 2 models: name one of them" in caplog.text
    )


def test_images_of_several_classes_are_compared_by_map(tmp_path, monkeypatch) -> None:
    found: list[BodyScore] = []
    monkeypatch.setattr(start, "decide", lambda best, *_, **__: found.append(best) or NOTHING)
    started(table := write_table(tmp_path / "several"))
    shares = open_data(str(table)).train.labels.mean(axis=0)
    assert isinstance(found[0].score, LabelScore)
    assert found[0].guessing == pytest.approx(shares.mean())
    assert found[0].value == found[0].score.estimates["map"].value > found[0].guessing


def test_public_bodies_are_fetched_where_there_is_a_network_and_cached_ones_without(
    data, tmp_path, monkeypatch, capsys, caplog
) -> None:
    monkeypatch.setattr(start, "PUBLIC", {"me/absent": "1 MB, MIT", "me/small": "2 MB, MIT"})
    save_pretrained(small_model(), tmp_path / "small")
    files = {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()}
    with local_hub(monkeypatch, tmp_path / "hub") as hub:
        hub.repositories["me/small"] = files
        started(data)
    out = capsys.readouterr().out
    assert "body   me/small from the hub: 2 MB, MIT" in out
    assert "body   me/small: " in out
    (warning,) = [line for line in caplog.messages if "left out" in line]
    assert warning.startswith("body me/absent is left out: no such model on the hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "the best of 2 bodies" in started(data).reasons[0]
    assert "from the hub" not in capsys.readouterr().out


def test_time_is_shared_and_without_any_the_start_is_the_usual_one(data, monkeypatch, caplog) -> None:
    named = Request.of(None, None, {"data": str(data)})
    usual = TrainConfig(**Start.usual(named, 20, 3).over(named))
    for options, reason in (
        ({"minutes": 1e-9}, "left out: 25% of the minutes are over"),
        ({"minutes": 1.0}, "the features of 20 images take 0:03:20, too long"),
    ):
        request = Request.of(None, None, {"data": str(data), "weights": "auto", **options})
        assert TrainConfig(**started(data, **options).over(request)) == usual.replace(**options)
        assert reason in caplog.text
        assert "takes the usual start: no body at hand can compute the features" in caplog.text
        assert started(data, named=True, **options).weights == "cifar10"
        monkeypatch.setattr(start, "_seconds_per_image", lambda engine, images: 10.0)


def test_rare_classes_are_left_out_of_the_comparison_and_of_a_fitted_head(tmp_path, monkeypatch) -> None:
    fitted: list[bool] = []
    monkeypatch.setattr(start, "decide", lambda *_, fits, **__: fitted.append(fits) or NOTHING)
    started(data := write_folder(tmp_path / "data"))
    write_folder(data, per_class=3, classes=("rare",))
    assert np.bincount(open_data(str(data)).train.labels).min() == 1
    started(data)
    assert fitted == [True, False]


@pytest.mark.usefixtures("without_figures")
def test_first_of_several_processes_decides_for_all(data, tmp_path) -> None:
    def begin() -> None:
        runs.train(data=str(data), weights="auto", run=str(tmp_path / "run"), workers=0, epochs=1)

    assert in_group(2, begin, tmp_path / "store") == [0, 0]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["start"]


def test_options_that_do_not_go_together_are_one_line(data) -> None:
    for options, message in (
        ({"bodies": ["cifar10"]}, "bodies are compared by weights=auto"),
        ({"weights": "auto", "model": "vit_s16"}, "weights=auto chooses the model"),
        ({"weights": "auto", "task": "masked"}, "pre-training has none"),
        ({"weights": "auto", "bodies": ["nowhere/at/all"]}, "nowhere/at/all"),
        ({"freeze": True, "steps": 0, "weights": "none"}, "freeze needs a body that is trained already"),
        ({"steps": 0}, "steps=0 trains nothing"),
    ):
        with pytest.raises(UserError, match=message):
            (runs.pretrain if "task" in options else runs.train)(data=str(data), **options)
