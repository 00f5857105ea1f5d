from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training import tiny_config, write_folder
from vitascope.cli import main
from vitascope.report.records import load_predictions, read_metrics
from vitascope.training import finish, train
from vitascope.training.checkpoint import checkpoints, load_checkpoint
from vitascope.training.evaluate import evaluate_pretrained
from vitascope.training.loop import Trainer
from vitascope.weights.store import from_pretrained


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "greys", per_class=20)


@pytest.fixture
def no_pictures(monkeypatch) -> None:
    monkeypatch.setattr(finish, "draw_figures", lambda *_: {})
    monkeypatch.setattr(finish, "draw_masked", lambda *_: {})
    monkeypatch.setattr(finish, "write_report", lambda run, **_: run / "report.html")


@pytest.fixture
def worse_from_the_second_epoch_on(monkeypatch) -> None:
    """The best weights are those of the first epoch."""
    end = Trainer._end_epoch

    def ended(self: Trainer, epoch: int, *arguments) -> None:
        self.best_loss = self.best_loss if epoch == 0 else -1.0
        end(self, epoch, *arguments)

    monkeypatch.setattr(Trainer, "_end_epoch", ended)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(from_pretrained(folder).state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("ema", [0.0, 0.5])
@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_model_is_the_kept_weights_averaged_where_there_is_an_average(
    data, tmp_path, no_pictures, worse_from_the_second_epoch_on, keep: str, ema: float
) -> None:
    run = tmp_path / "run"
    result = train.train(tiny_config(data, run=str(run), keep=keep, ema=ema, lr=0.01))
    state = load_checkpoint(run)[1]
    last = state["average" if ema else "model"]
    assert same(weights(run / "model"), last) == (keep == "last")
    assert same(weights(run / "model"), weights(run / "checkpoints" / "best")) == (keep == "best")
    if ema:
        assert not same(state["model"], state["average"])
    assert same(weights(run / "model"), dict(result.model.state_dict()))
    assert not result.model.training


def test_it_is_measured_once_on_the_images_that_nothing_has_seen(
    data, tmp_path, no_pictures, monkeypatch
) -> None:
    splits = []
    measure = finish.evaluate

    def watched(model, loader, **options):
        splits.append(loader.images.name)
        return measure(model, loader, **options)

    monkeypatch.setattr(finish, "evaluate", watched)
    run = tmp_path / "run"
    result = train.train(tiny_config(data, run=str(run), epochs=1, precision="fp32"))
    assert splits == ["test"]
    again = evaluate_pretrained(run, precision="fp32")
    assert (again.accuracy, again.loss) == (result.evaluation.accuracy, pytest.approx(result.evaluation.loss))


def test_its_answers_are_kept_as_they_were_measured(data, tmp_path, no_pictures) -> None:
    result = train.train(tiny_config(data, run=str(tmp_path / "run"), epochs=1))
    kept = load_predictions(result.run)
    assert kept is not None
    assert (kept.split, kept.class_names) == ("test", ("dark", "light"))
    for name in ("indices", "labels", "probabilities"):
        np.testing.assert_array_equal(getattr(kept, name), getattr(result.evaluation, name))
    assert kept.right.mean() == result.evaluation.accuracy


@pytest.mark.parametrize("task", ["classify", "masked"])
def test_the_report_comes_last_with_the_data_that_are_open(
    data, tmp_path, no_pictures, monkeypatch, task: str
) -> None:
    seen = []

    def watched(run: Path, *, splits, device: str) -> Path:
        seen.append(((run / "model" / "config.json").is_file(), splits.final.name, device))
        return run / "report.html"

    monkeypatch.setattr(finish, "write_report", watched)
    run = tmp_path / "run"
    result = (train.pretrain if task == "masked" else train.train)(
        tiny_config(data, run=str(run), epochs=1, task=task)
    )
    assert seen == [(True, "test", "cpu")]
    assert result.report == run / "report.html"


def test_a_report_that_fails_leaves_a_finished_run(data, tmp_path, no_pictures, monkeypatch) -> None:
    monkeypatch.setattr(finish, "write_report", stop)
    with pytest.raises(KeyboardInterrupt):
        train.train(tiny_config(data, run=str(tmp_path / "run"), epochs=1))
    assert from_pretrained(tmp_path / "run").config.num_classes == 2
    assert load_predictions(tmp_path / "run") is not None


@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_finished_run_holds_its_model_once_beside_the_best(data, tmp_path, no_pictures, keep: str) -> None:
    run = train.train(tiny_config(data, run=str(tmp_path / "run"), epochs=1, keep=keep)).run
    (newest,) = checkpoints(run)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best", newest.name}


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def stop_at_the_model(self: Trainer, folder: Path) -> None:
    if folder.name == "model":
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("task", "place", "name", "broken"),
    [
        ("classify", finish, "draw_figures", stop),
        ("classify", finish, "save_pretrained", stop),
        ("masked", finish, "draw_masked", stop),
        ("masked", Trainer, "save_model", stop_at_the_model),
    ],
)
def test_an_ending_that_was_broken_off_is_done_again_and_recorded_once(
    data, tmp_path, no_pictures, monkeypatch, task: str, place, name: str, broken
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(place, name, broken)
        with pytest.raises(KeyboardInterrupt):
            (train.pretrain if task == "masked" else train.train)(
                tiny_config(data, run=str(run), epochs=1, task=task)
            )
    assert not (run / "model").exists()
    train.resume(run)
    assert [record["kind"] for record in read_metrics(run)] == ["epoch", "test"]
    assert (run / "model" / "config.json").is_file()


# Pre-training, to its end and on from a stop, by the command line


TINY = ["--image-size", "16", "--patch-size", "8", "--embed-dim", "16", "--depth", "1", "--num-heads", "2"]
TINY += ["--batch-size", "8", "--device", "cpu"]


def test_pre_training_takes_grey_images_and_its_weights_start_either_command(
    tmp_path, no_pictures, capsys
) -> None:
    """The digits have one channel."""
    body = tmp_path / "body"
    sizes = [*TINY, "--image-size", "8", "--patch-size", "4", "--batch-size", "128"]
    small = ["--data", "digits", "--epochs", "1", "--device", "cpu"]
    assert main(["pretrain", "--run", str(body), *small, *sizes]) == 0
    assert from_pretrained(body).config.in_channels == 1
    assert read_metrics(body)[-1]["split"] == "test"
    for name, further in (("more", "pretrain"), ("tuned", "train")):
        options = ["--weights", str(body), "--run", str(tmp_path / name), "--lr", "0"]
        assert main([further, *options, *small]) == 0
        assert f"weights of {body}: " in capsys.readouterr().out
        ours, theirs = weights(tmp_path / name), weights(body)
        assert all(torch.equal(ours[key], value) for key, value in theirs.items() if key in ours)
    assert {"head.weight", "head.bias"} <= weights(tmp_path / "tuned").keys()
    assert weights(tmp_path / "more").keys() == weights(body).keys()


@pytest.mark.parametrize("command", ["pretrain", "train"])
@pytest.mark.parametrize("begun", ["pretrain", "train"])
def test_either_command_resumes_a_run_of_either(
    data, tmp_path, no_pictures, monkeypatch, capsys, begun: str, command: str
) -> None:
    run, step = tmp_path / "run", Trainer._training_step

    def and_stop(self: Trainer, *arguments):
        if self.step == 5:
            raise KeyboardInterrupt
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_training_step", and_stop)
        options = ["--epochs", "2", "--checkpoint-seconds", "0"]
        recipe = [] if begun == "pretrain" else ["--recipe", "base"]
        assert main([begun, "--data", str(data), "--run", str(run), *options, *recipe, *TINY]) == 130
    capsys.readouterr()
    assert main([command, "--resume", str(run)]) == 0
    said = capsys.readouterr().out
    assert ", from step 5," in said
    assert ("hidden patches" in said) == (begun == "pretrain")
    assert from_pretrained(run).config.gives_classes == (begun == "train")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--keep", "best"], "keeps its last weights; leave out --keep"),
        (["--freeze"], "leave it out"),
        (["--mixup", "0.8"], "mixup and cutmix mix labels too"),
        (["--recipe", "deit"], "the recipe deit is for `vitascope train`"),
        (["--model", "resnet29_w32_cifar"], "a CNN, which has no patches to hide"),
    ],
)
def test_what_pre_training_would_ignore_is_refused(data, tmp_path, capsys, options, said: str) -> None:
    sizes = [] if "--model" in options else TINY
    assert main(["pretrain", "--data", str(data), "--run", str(tmp_path / "run"), *options, *sizes]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
