import errno
import gzip
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.analysis.report import leave_empty
from tests.training import assert_bitwise, last_state, run_of, signalled, tiny_config, write_folder
from vitascope import runs
from vitascope.analysis.evaluate import evaluate
from vitascope.analysis.report import classification, figures, internals, overview, write
from vitascope.cli import main
from vitascope.data.formats import digits
from vitascope.errors import UserError
from vitascope.models.weights.loading import from_pretrained
from vitascope.training import finishing
from vitascope.training.loop import Trainer
from vitascope.training.run.run import Run
from vitascope.training.tasks.classify import Classify


@pytest.fixture
def no_pictures(monkeypatch) -> None:
    monkeypatch.setattr(figures, "draw_figures", lambda *_: {})
    monkeypatch.setattr(figures, "draw_masked_patches", lambda *_: {})
    monkeypatch.setattr(write, "write_report", lambda run, **_: run.report)


@pytest.mark.parametrize(("keep", "ema"), [("best", 0.0), ("best", 0.5), ("last", 0.5)])
def test_saved_model_has_the_selected_weights_and_the_average_if_there_is_one(
    data, tmp_path, no_pictures, monkeypatch, keep: str, ema: float
) -> None:
    """The best weights are those of the first epoch."""
    end = Trainer._validate

    def ended(self: Trainer, *arguments) -> None:
        self.best_value = self.best_value if self.step == self.steps_per_epoch else -1.0
        end(self, *arguments)

    monkeypatch.setattr(Trainer, "_validate", ended)
    monkeypatch.setattr(finishing, "remove_checkpoints", lambda run, **_: None)
    run = Run(tmp_path / "run")
    result = runs.train(tiny_config(data, run=str(run.path), keep=keep, ema=ema, lr=0.01, epochs=2))
    state, kept = last_state(run.path), dict(run.model().state_dict())
    last, best = state["average" if ema else "model"], run.best
    assert best.exists() == (keep == "best")
    assert_bitwise(kept, last if keep == "last" else dict(from_pretrained(best).state_dict()))
    assert not torch.equal(kept["head.weight"], last["head.weight"]) or keep == "last"
    assert not ema or not torch.equal(state["model"]["head.weight"], state["average"]["head.weight"])
    assert_bitwise(kept, dict(result.model.state_dict()))
    assert not result.model.training


def test_model_is_measured_once_on_the_held_out_test_images(data, tmp_path, no_pictures, monkeypatch) -> None:
    splits = []
    test = Classify.test

    def watched(self: Classify, finished):
        splits.append(finished.loader.images.name)
        return test(self, finished)

    monkeypatch.setattr(Classify, "test", watched)
    run = tmp_path / "run"
    result = runs.train(tiny_config(data, run=str(run), epochs=1, precision="fp32"))
    assert splits == ["test"]
    again = evaluate(run, precision="fp32")
    assert (again.accuracy, again.loss) == (result.evaluation.accuracy, pytest.approx(result.evaluation.loss))


@pytest.mark.parametrize("options", [{"keep": "best"}, {"keep": "last"}, {"task": "masked"}])
def test_finished_run_has_its_model_and_last_its_report_and_only_the_users_files_beside(
    data, tmp_path, no_pictures, monkeypatch, options
) -> None:
    seen, save = [], finishing.save_pretrained

    def watched(run: Run, *, splits, device: str) -> Path:
        seen.append((run.finished, splits.measured.name, device))
        return run.report

    def and_put(model, folder: Path, **options):
        (folder.parent / "checkpoints" / "notes.txt").write_text("mine")
        return save(model, folder, **options)

    with monkeypatch.context() as patch:
        patch.setattr(write, "write_report", watched)
        patch.setattr(finishing, "save_pretrained", and_put)
        run = run_of(
            tiny_config(data, run=str(tmp_path / "run"), epochs=1, checkpoint_seconds=0.0, **options)
        )
    assert seen == [(True, "test", "cpu")]
    assert (run / "model" / "model.safetensors").is_file()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match=f"has finished; `vitascope train --resume {run} --epochs MORE`"):
        runs.resume(run)
    if options == {"keep": "best"}:
        tuned = tiny_config(data, run=str(tmp_path / "tuned"), epochs=1, weights=str(run))
        assert not (runs.train(tuned).run / "checkpoints").exists()  # nor the initial weights


# Printed output and its order


@pytest.fixture
def printed_before(monkeypatch, capsys) -> dict[str, str]:
    seen: dict[str, str] = {}

    def begin(name: str, made: object):
        seen[name] = capsys.readouterr().out
        return made

    monkeypatch.setattr(figures, "draw_figures", lambda *_: begin("figures", {}))
    monkeypatch.setattr(write, "write_report", lambda run, **_: begin("report", run.report))
    return seen


def test_the_result_is_printed_before_anything_is_drawn(data, tmp_path, printed_before) -> None:
    config = tiny_config(data, run=str(tmp_path / "run"), epochs=1)
    result = runs.train(config)
    score = result.evaluation.score
    *_, measuring, answers, lacking, first, compared, _, drawing = printed_before["figures"].splitlines()
    assert measuring == "evaluating 2 test images"
    assert answers.startswith("answers temperature ")
    assert lacking.strip().startswith("sets of 95% need 19 validation images")
    assert first.startswith(f"test   {score.right / 2:.2%} right: {score.right} of 2 images, after ")
    assert compared.strip() == score.compared()
    assert drawing == "drawing the figures"
    assert printed_before["report"] == "writing the report\n"


def test_model_no_better_than_the_most_frequent_class_gets_a_hint(tmp_path, no_pictures, capsys) -> None:
    """All images are the same but for one pixel, so that there is nothing to learn."""
    same = write_folder(tmp_path / "same", per_class=12)
    for number, path in enumerate(sorted(same.rglob("*.png"))):
        pixels = np.zeros((16, 16, 3), np.uint8)
        pixels[0, 0] = number % 12, number // 12, 0
        Image.fromarray(pixels).save(path)
    runs.train(tiny_config(same, run=str(tmp_path / "run"), epochs=1))
    out = capsys.readouterr().out
    assert "no better than always guessing the most frequent class, as far as 2 images show" in out
    assert "few images need trained weights: --weights cifar10" in out


# Signals and full disks at the end of a run


OWNERS = {"test": Classify, "draw_figures": figures, "draw_masked_patches": figures, "write_report": write}


@pytest.mark.parametrize(
    ("task", "place", "command", "signum"),
    [
        ("classify", "test", "vitascope train --resume {run}", signal.SIGTERM),
        ("classify", "draw_figures", "vitascope report {run}", signal.SIGTERM),
        ("classify", "write_report", "vitascope report {run}", signal.SIGINT),
        ("masked", "draw_masked_patches", "vitascope train --resume {run}", signal.SIGINT),
    ],
)
def test_signal_while_finishing_prints_how_to_resume(
    data, tmp_path, no_pictures, monkeypatch, capsys, task: str, place: str, command: str, signum: int
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signum)
        raise AssertionError("the signal did not act")

    run, handlers = tmp_path / "run", [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    file = tmp_path / "config.yaml"
    file.write_text(tiny_config(data, run=str(run), steps=2, task=task, keep="last").to_yaml())
    begin = ["pretrain" if task == "masked" else "train", "--config", str(file)]
    with monkeypatch.context() as patch:
        patch.setattr(OWNERS[place], place, interrupted)
        assert main(begin) == 128 + signum
    message, following = capsys.readouterr().err.splitlines()
    assert f"stopped by {signal.Signals(signum).name}; " in message
    assert message.endswith(f"continue with `{command.format(run=run)}`")
    assert following == f"next   {command.format(run=run)}"
    assert ("the model is saved in" in message) == (run / "model" / "config.json").is_file()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    if place != "write_report":
        leave_empty(monkeypatch, overview, classification, internals)
        again = following.split()[2:]
        assert main([*again, "--device", "cpu"]) == 0


def test_full_disk_while_finishing_names_the_file_and_how_to_resume(
    data, tmp_path, no_pictures, monkeypatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, place, what, way_on in (
        (Run, "save_predictions", "the finished model", "train --resume"),
        (figures, "draw_figures", "the figures", "report"),
        (write, "write_report", "the report", "report"),
    ):
        run = tmp_path / place
        with monkeypatch.context() as patch:
            patch.setattr(owner, place, full)
            with pytest.raises(UserError) as rejected:
                runs.train(tiny_config(data, run=str(run), steps=2))
        message = str(rejected.value)
        assert message.startswith(f"{run}: {what} cannot be written: No space left on device (")
        assert message.endswith(f"make room, then run `vitascope {way_on} {run}`")
        assert (run / "model" / "config.json").is_file() == (way_on == "report")


@pytest.mark.parametrize(
    ("task", "place", "name"),
    [
        ("classify", Run, "save_predictions"),
        ("classify", finishing, "save_pretrained"),
        ("masked", finishing, "save_pretrained"),
    ],
)
def test_interrupted_finish_is_repeated_and_recorded_once(
    data, tmp_path, no_pictures, monkeypatch, task: str, place, name: str
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(place, name, stop)
        with pytest.raises(KeyboardInterrupt):
            run_of(tiny_config(data, run=str(run), steps=2, task=task))
    assert not (run / "model").exists()
    runs.resume(run)
    assert [record["kind"] for record in Run(run).metrics] == ["epoch", "kept", "test"]
    assert (run / "model" / "config.json").is_file()


# Pre-training by the command line: to its end, and resumed


TINY = ["--image-size", "16", "--patch-size", "8", "--embed-dim", "16", "--depth", "1", "--num-heads", "2"]
TINY += ["--batch-size", "8", "--device", "cpu"]


def test_pre_training_on_grey_images_provides_weights_for_both_commands(
    tmp_path, no_pictures, monkeypatch, capsys
) -> None:
    body, few = tmp_path / "body", tmp_path / "digits.csv"
    few.write_bytes(b"\n".join(gzip.decompress(digits._file().read_bytes()).splitlines()[:200]))
    monkeypatch.setattr(digits, "_file", lambda: few)
    small = ["--data", "digits", "--steps", "3", "--device", "cpu"]
    sizes = [*TINY, "--image-size", "8", "--patch-size", "4", "--batch-size", "32"]
    assert main(["pretrain", "--run", str(body), *small, *sizes]) == 0
    assert from_pretrained(body).config.in_channels == 1
    assert Run(body).metrics[-1]["split"] == "test"
    for name, further, *pool in (("more", "pretrain"), ("mean", "train", "--pool", "mean")):
        options = ["--weights", str(body), "--run", str(tmp_path / name), "--lr", "1e-30", *pool]
        assert main([further, *options, *small]) == 0
        message = capsys.readouterr().out
        assert f"start  from {body}: " in message
        assert ("it has no head; initialized one for 10" in message) == (further == "train")
        ours, theirs = (from_pretrained(folder).state_dict() for folder in (tmp_path / name, body))
        for key in theirs.keys() & ours.keys():
            torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-25)
        assert ("head.weight" in ours) == (further == "train")


@pytest.mark.parametrize(("begun", "command"), [("pretrain", "train"), ("train", "pretrain")])
def test_both_commands_resume_runs_of_both(
    data, tmp_path, no_pictures, capsys, begun: str, command: str
) -> None:
    run = tmp_path / "run"
    recipe = [] if begun == "pretrain" else ["--recipe", "base"]
    words = [begun, "--data", str(data), "--run", str(run), "--epochs", "2", *recipe, *TINY]
    with signalled(4):
        assert main(words) == 143
    capsys.readouterr()
    assert main([command, "--resume", str(run)]) == 0
    message = capsys.readouterr().out
    assert ", from step 5," in message
    assert ("hidden patches" in message) == (begun == "pretrain")
    assert from_pretrained(run).config.gives_classes == (begun == "train")
