"""Runs with a frozen body: on features that are computed once, or with the body in every epoch."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training import (
    assert_bitwise,
    interrupted,
    last_state,
    tiny_config,
    trainer_of,
    write_folder,
    write_uneven,
)
from vitascope.data.loading import Loader
from vitascope.errors import UserError
from vitascope.model.configuration import traits
from vitascope.options.groups import NeedsImages
from vitascope.options.recipes import TrainConfig
from vitascope.predict.engine import TorchEngine
from vitascope.run.run import Run
from vitascope.training import body_features, loop, train
from vitascope.training.checkpoint.folders import checkpoints
from vitascope.training.plan import image_options
from vitascope.training.tasks.classify import Classify
from vitascope.weights.loading import from_pretrained, save_pretrained

PROBE: dict[str, Any] = {
    **{"freeze": True, "flip": 0.0, "crop_scale": 1.0, "color_jitter": 0.0},
    **{"precision": "fp32", "lr": 0.01, "epochs": 2, "keep": "last"},
}
ONCE, EVERY_EPOCH = "body   computed once: ", "body   computed in every epoch, "


pytestmark = pytest.mark.usefixtures("without_figures", "own_cache")


@pytest.fixture(scope="module")
def body(tmp_path_factory) -> Path:
    """A trained body, of images of its own."""
    root = tmp_path_factory.mktemp("body")
    data = write_folder(root / "data", per_class=8, classes=("a", "b", "c"))
    return train.train(tiny_config(data, run=str(root / "run"), epochs=1, dropout=0.1)).run


def probe(data: Path, body: Path, **options: Any) -> TrainConfig:
    return tiny_config(data, **{"weights": str(body)} | PROBE | options)


def trained(config: TrainConfig, run: Path) -> train.TrainResult:
    return train.train(config.replace(run=str(run)))


@pytest.fixture
def counted_images(monkeypatch) -> list[int]:
    """The numbers of images of which the body's features are computed."""
    counts, features = [], TorchEngine.features

    def counting(self, pixels, *arguments, **options):
        counts.append(len(pixels))
        return features(self, pixels, *arguments, **options)

    monkeypatch.setattr(TorchEngine, "features", counting)
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {"class_weights": "balanced", "ema": 0.0, "optimizer": "sgd", "lr": 0.1},
        {"sampling": "balanced", "label_smoothing": 0.1, "accumulate": 2, "ema": 0.9},
        {"repeats": 3, "loss": "bce", "keep": "auto"},
    ],
)
def test_head_equals_that_of_a_run_that_computes_the_body_in_every_epoch(
    body, tmp_path, monkeypatch, capsys, options: dict[str, Any]
) -> None:
    config = probe(write_uneven(tmp_path / "data"), body, **options)
    once = trained(config, tmp_path / "once")
    assert ONCE in capsys.readouterr().out
    monkeypatch.setattr(body_features, "LIMIT_GB", 0.0)
    again = trained(config, tmp_path / "again")
    printed = capsys.readouterr().out
    assert f"{EVERY_EPOCH}because all features take 0.0 GB, and at most 0 GB are kept in memory" in printed
    models = (once.model, again.model, from_pretrained(body))
    ours, theirs, start = (model.state_dict() for model in models)
    assert ours.keys() == theirs.keys() == start.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(value, start[name]) != name.startswith("head.")
    for name in ("train_loss", "val_loss", "train_accuracy", "val_accuracy"):
        values = [[record[name] for record in Run(run.run).records("epoch")] for run in (once, again)]
        assert values[0] == pytest.approx(values[1], rel=1e-4)
    assert once.evaluation.loss == pytest.approx(again.evaluation.loss, rel=1e-4)
    for run in (once.run, again.run):  # one can be resumed as the other, after a change of the limit
        assert last_state(run)["model"].keys() == start.keys()


def test_features_are_computed_once_for_all_runs(data, body, tmp_path, counted_images, capsys) -> None:
    config = probe(data, body, epochs=3)
    once = trained(config, tmp_path / "first")
    images = len(once.evaluation.labels)
    again_at_the_end = 2  # the validation images, by the whole model
    assert sum(counted_images) == 24 - images + again_at_the_end
    assert f"{ONCE}features of {24 - images} images, none of them cached" in capsys.readouterr().out
    again = trained(config.replace(lr=0.1, seed=0, epochs=1), tmp_path / "second")
    assert sum(counted_images) == 24 - images + 2 * again_at_the_end
    assert f"{ONCE}features of {24 - images} images, all of them cached" in capsys.readouterr().out
    assert not torch.equal(once.model.head.weight, again.model.head.weight)


@pytest.mark.parametrize("cache", ["kept", "lost"])
def test_stopped_run_resumes_bitwise(data, body, tmp_path, monkeypatch, cache: str) -> None:
    config = probe(data, body, ema=0.9, accumulate=2)
    whole = trained(config, tmp_path / "whole")
    run = tmp_path / "stopped"
    with interrupted(7):
        trained(config, run)
    assert len(checkpoints(run)) == 1
    if cache == "lost":
        monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "another"))
    resumed = train.resume(run)
    assert_bitwise(last_state(run), last_state(whole.run))
    assert_bitwise(resumed.model.state_dict(), whole.model.state_dict())


CHANGES = {"flip": 0.5, "crop_scale": 0.9, "shift": 0.1, "rotate": 5.0, "color_jitter": 0.1, "erase": 0.1}
CHANGES |= {"three_augment": True, "randaugment": 1, "mixup": 0.2, "cutmix": 1.0, "progressive": 0.5}


def test_every_option_that_changes_images_is_known_and_named(data, body) -> None:
    assert traits(TrainConfig, NeedsImages).keys() - {"teacher"} == CHANGES.keys()
    for name, value in CHANGES.items():
        assert image_options(probe(data, body, **{name: value})) == [f"{name}={value}"]


def test_option_that_changes_images_has_the_body_compute_in_every_epoch(
    data, body, counted_images, capsys
) -> None:
    trainer = trainer_of(probe(data, body, flip=0.5, shift=0.1))
    printed = capsys.readouterr().out
    assert f"{EVERY_EPOCH}for flip=0.5, shift=0.1; the recipe linear-probe" in printed
    assert trainer.features is None
    assert type(trainer.task) is Classify
    assert next(trainer.train_loader.epoch()).pixels.ndim == 4
    assert counted_images == []


def test_training_reads_no_image_again(data, body, tmp_path, monkeypatch) -> None:
    """Neither from a split in memory nor by workers."""
    trainer = trainer_of(probe(data, body))
    monkeypatch.setattr(Loader, "_cache", lambda self: pytest.fail("images were read"))
    monkeypatch.setattr(Loader, "_streamed", lambda *_: pytest.fail("images were read"))
    for batch in trainer.train_loader.epoch(0):
        trainer._training_step(batch, 0)
    trainer.task.validate(trainer.trained, trainer.val_loader, trainer.precision)


def test_unreadable_images_are_left_out_and_named(body, tmp_path, capsys) -> None:
    for part, count in (("train", 15), ("val", 4), ("test", 4)):
        write_folder(tmp_path / "data" / part, per_class=count)
    broken = [tmp_path / "data" / part / "light" / "002.png" for part in ("train", "val")]
    for path in broken:
        path.write_bytes(b"not a picture")
    config = probe(tmp_path / "data", body)
    once = trained(config, tmp_path / "once")
    printed = capsys.readouterr()
    assert all((printed.out + printed.err).count(str(path)) == 1 for path in broken)
    assert f"{ONCE}features of 36 images, " in printed.out
    trainer = trainer_of(config)
    order = [int(index) for batch in trainer.train_loader.epoch() for index in batch.indices]
    assert sorted(order) == [index for index in range(30) if index != 17]
    assert once.evaluation.unreadable == ()


def test_features_that_are_no_numbers_name_the_image(data, body, tmp_path) -> None:
    model = from_pretrained(body)
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    broken = save_pretrained(model, tmp_path / "broken")
    with pytest.raises(UserError, match=r"image 0, .*\.png: its features .* are not finite in fp32"):
        trained(probe(data, broken), tmp_path / "run")


def test_minutes_count_the_body_for_the_final_test(data, body, tmp_path, monkeypatch) -> None:
    seconds = itertools.count(0, 0.02)
    for module in (loop, train, body_features):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    config = probe(data, body, minutes=0.05, epochs=None)
    trainer = trainer_of(config)
    assert trainer.features is not None
    # One look at the clock before, and one after: a tick for all the timed images.
    assert trainer.features.seconds_per_image == pytest.approx(0.02 / len(trainer.splits.val.sources[:8]))
    run = Run(trained(config, tmp_path / "run").run)
    # A validation takes some ticks.
    assert run.records("test")[0]["seconds"] == pytest.approx(60 * 0.05, rel=0.15)
    assert run.records("epoch")[-1]["step"] == run.config["lengths"][-1][1]


def test_head_computes_in_fp32_unless_another_precision_is_named(data, body, monkeypatch) -> None:
    monkeypatch.setattr("vitascope.training.placement.resolve_precision", lambda asked, *_, **__: asked)
    assert trainer_of(probe(data, body, precision="auto")).precision == "fp32"
    assert trainer_of(probe(data, body, precision="bf16")).precision == "bf16"
    assert trainer_of(probe(data, body, precision="auto", flip=0.5)).precision == "auto"
