import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.forked import ending, fork
from tests.training import tiny_config, undrawn, write_folder
from vitascope.cli import main
from vitascope.errors import Interrupted, UserError
from vitascope.options.recipes import TrainConfig
from vitascope.run.run import Run
from vitascope.training import loop, train
from vitascope.training.checkpoint.folders import checkpoints
from vitascope.training.schedule import Schedule
from vitascope.weights.loading import from_pretrained


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "greys")


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> train.TrainResult:
    run = tmp_path_factory.mktemp("runs") / "finished"
    return train.train(tiny_config(data, run=str(run), epochs=4, lr=3e-3))


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return from_pretrained(run).state_dict()


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_run_learns_separable_classes(finished) -> None:
    assert finished.evaluation.accuracy == 1.0
    epochs = [record for record in Run(finished.run).metrics if record["kind"] == "epoch"]
    assert len(epochs) == 4
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]


def test_run_folder_holds_all_documented_files(finished) -> None:
    run = finished.run
    names = {path.name.split(".")[0] for path in run.iterdir() if not path.name.startswith(".")}
    assert names == {
        *("config", "plan", "environment", "split", "metrics", "events"),
        *("model", "predictions", "figures", "report"),
    }
    assert {path.name for path in (run / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }
    figures = {"curves", "confusion", "predictions", "attention", "positions", "filters"}
    assert set(finished.figures) == figures
    for path in finished.figures.values():
        with Image.open(path) as image:
            assert min(image.size) > 100


def test_saved_model_is_the_tested_model(finished) -> None:
    model = from_pretrained(finished.run)
    assert model.config.class_names == ("dark", "light")
    for name, tensor in finished.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert from_pretrained(finished.run).preprocess.image_size == (16, 16)
    last = Run(finished.run).metrics[-1]
    assert (last["kind"], last["split"], last["accuracy"]) == ("test", "test", finished.evaluation.accuracy)


def test_the_written_configuration_reproduces_the_run(finished, tmp_path) -> None:
    config = TrainConfig.from_yaml(finished.run / "config.yaml")
    with undrawn():
        again = train.train(config.replace(run=str(tmp_path / "again")))
    assert_same_weights(finished.run, again.run)


def test_another_seed_produces_other_weights(finished, data, tmp_path) -> None:
    with undrawn():
        other = train.train(tiny_config(data, run=str(tmp_path / "other"), epochs=4, lr=3e-3, seed=1))
    assert not torch.equal(
        weights_of(finished.run)["positions.weight"], weights_of(other.run)["positions.weight"]
    )


def test_run_killed_in_mid_epoch_resumes_to_bitwise_identical_weights(data, tmp_path) -> None:
    """In bf16; test_resume compares runs in fp32."""
    options = {"drop_path": 0.2, "dropout": 0.1, "checkpoint_seconds": 0.0, "precision": "bf16"}
    with undrawn():
        whole = train.train(tiny_config(data, run=str(tmp_path / "whole"), **options))
    killed = tmp_path / "killed"
    _run_and_signal(tiny_config(data, run=str(killed), **options), signal.SIGKILL, at_step=8)
    assert not (killed / "model").exists()
    with undrawn():
        resumed = train.resume(killed)
    assert resumed.run == killed
    assert_same_weights(whole.run, killed)
    kinds = [(record["kind"], record["step"]) for record in Run(killed).metrics]
    assert kinds == [(record["kind"], record["step"]) for record in Run(whole.run).metrics]
    for ours, theirs in zip(Run(killed).metrics, Run(whole.run).metrics, strict=True):
        assert ours.get("train_loss") == theirs.get("train_loss")
        assert ours.get("loss") == theirs.get("loss")


def test_stopped_run_leaves_a_checkpoint_and_prints_how_to_resume(data, tmp_path) -> None:
    """By SIGTERM; test_train_finish sends both signals to the command line."""
    run, signum, status = tmp_path / "stopped", signal.SIGTERM, 143
    code, message = _run_and_signal(tiny_config(data, run=str(run)), signum, at_step=3)
    assert code == status
    assert f"vitascope train --resume {run}" in message
    assert "Traceback" not in message
    assert len(checkpoints(run)) == 1
    with pytest.raises(Interrupted):
        _resume_and_stop(run)


def _resume_and_stop(run: Path) -> None:
    """Resume in this process and request a stop at its first step."""
    step = loop.Trainer._training_step

    def stop_at_once(self, *args):
        os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args)

    loop.Trainer._training_step = stop_at_once
    try:
        train.resume(run)
    finally:
        loop.Trainer._training_step = step


def _run_and_signal(config: TrainConfig, signum: int, at_step: int) -> tuple[int, str]:
    """Run `vitascope train` in a forked process, which gets a signal at a step.

    Returns its exit code, as subprocess does, and what it wrote to stderr.
    """
    file, errors = Path(f"{config.run}.yaml"), Path(f"{config.run}.err")
    file.write_text(config.to_yaml())
    step = loop.Trainer._training_step

    def and_signal(self, *args):
        if self.step == at_step:
            os.kill(os.getpid(), signum)
        return step(self, *args)

    def begin() -> int:
        with errors.open("w") as stderr, contextlib.redirect_stderr(stderr):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            loop.Trainer._training_step = and_signal
            return main(["train", "--config", str(file)])

    return ending(fork(begin)), errors.read_text()


def test_a_finished_run_is_not_resumed(finished) -> None:
    with pytest.raises(UserError, match="finished"):
        train.resume(finished.run)


def test_resume_with_other_data_is_rejected(data, tmp_path, monkeypatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    folder, run = write_folder(tmp_path / "data"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_training_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train.train(tiny_config(folder, run=str(run)))
    for image in sorted((folder / "dark").iterdir())[:6]:
        image.unlink()
    with pytest.raises(UserError, match=r"cannot be resumed: .* 6 missing \(5 train, 1 val\)"):
        train.resume(run)


def test_a_run_that_cannot_start_leaves_no_folder(data, tmp_path) -> None:
    run = tmp_path / "run"
    for options in ({"model": "vit_b61"}, {"image_size": 30}, {"num_heads": 3}, {"device": "nonsense"}):
        with pytest.raises(UserError):
            train.train(tiny_config(data, run=str(run), **options))
        assert not run.exists()


def test_divergence_stops_with_a_diagnosis(data, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Schedule, "rate", lambda *_: 1e38)
    config = tiny_config(data, run=str(tmp_path / "run"), clip_grad=0.0, warmup_epochs=0.0)
    with pytest.raises(UserError, match=r"diverged.*lower lr"):
        train.train(config)


def test_fine_tuning_starts_from_the_weights_with_a_new_head(finished, tmp_path, capsys) -> None:
    folder = write_folder(tmp_path / "three", classes=("a", "b", "c"))
    config = TrainConfig().replace(
        data=str(folder),
        weights=str(finished.run),
        image_size=32,
        epochs=1,
        lr=1e-30,
        run=str(tmp_path / "tuned"),
    )
    with undrawn():
        result = train.train(config)
    message = capsys.readouterr().out
    assert "positions interpolated from 2x2 to 4x4" in message
    assert "left out the head for 2 classes; initialized one for 3" in message
    old, new = weights_of(finished.run), weights_of(result.run)
    assert torch.equal(old["encoder.blocks.0.mlp.fc1.weight"], new["encoder.blocks.0.mlp.fc1.weight"])
    assert new["head.weight"].shape == (3, 16)


def test_training_does_not_change_torchs_generator(data, tmp_path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with undrawn():
        train.train(tiny_config(data, run=str(tmp_path / "run"), epochs=1))
    assert torch.equal(torch.rand(3), expected)


def test_broken_images_are_named_and_left_out(tmp_path, capsys) -> None:
    folder = write_folder(tmp_path / "data")
    broken = folder / "dark" / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0 no picture")
    with undrawn():
        train.train(tiny_config(folder, run=str(tmp_path / "run"), epochs=1))
    assert f"left out: {broken}" in capsys.readouterr().out


def test_metrics_are_plain_numbers(finished) -> None:
    for line in (finished.run / "metrics.jsonl").read_text().splitlines():
        assert all(isinstance(value, int | float | str) for value in json.loads(line).values())
