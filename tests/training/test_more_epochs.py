import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.forked import in_group
from tests.training import write_folder
from vitascope.analysis.report import figures, write
from vitascope.cli import main
from vitascope.errors import UserError
from vitascope.models.weights.loading import from_pretrained
from vitascope.runs import resume, train
from vitascope.training import finishing, more_epochs
from vitascope.training.background import BestWeights
from vitascope.training.loop import Trainer
from vitascope.training.options.groups import Optimization
from vitascope.training.run.run import Run
from vitascope.training.schedule import Schedule
from vitascope.training.tasks.classify import Classify

SMALL = {"recipe": "base", "embed_dim": 16, "depth": 1, "num_heads": 2, "device": "cpu", "batch_size": 8}
CONSTANT = {**SMALL, "schedule": "constant", "warmup_steps": 2, "ema": 0.9, "keep": "last"}


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures and report take most of a tiny run's time."""
    monkeypatch.setattr(figures, "draw_figures", lambda *_: {})
    monkeypatch.setattr(write, "write_report", lambda run, **_: run.report)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "photos", per_class=20)


def trained(photos: Path, folder: Path, epochs: int, **options: object) -> Path:
    return train(data=photos, run=folder, epochs=epochs, **options).run


def test_more_epochs_of_a_constant_rate_from_the_kept_state_are_bitwise_one_run(
    photos: Path, tmp_path: Path, capsys
) -> None:
    run = trained(photos, tmp_path / "two", 2, keep_state=True, **CONSTANT)
    assert " MB, for --resume with more epochs" in capsys.readouterr().out
    resume(run, epochs=4)
    whole = trained(photos, tmp_path / "four", 4, **CONSTANT)
    ours, wanted = (from_pretrained(folder).state_dict() for folder in (run, whole))
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    epochs = [record["epoch"] for record in Run(run).records("epoch")]
    assert epochs == [1, 2, 3, 4]
    assert len(Run(run).records("test")) == 1
    assert not (run / "checkpoints" / "finished").exists()
    assert not (run / "checkpoints" / "start").exists()


def test_without_a_state_the_model_goes_on_with_a_schedule_of_its_own(photos: Path, tmp_path: Path) -> None:
    run = trained(photos, tmp_path / "run", 2, **SMALL)
    assert not (run / "checkpoints").exists()
    before, split = from_pretrained(run).state_dict(), Run(run).split_file.read_bytes()
    result = resume(run, epochs=3)
    after = result.model.state_dict()
    distance = sum(float((after[name] - before[name]).abs().sum()) for name in before)
    assert 0 < distance < 0.5 * sum(float(before[name].abs().sum()) for name in before)
    assert Run(run).split_file.read_bytes() == split
    assert [record["epoch"] for record in Run(run).records("epoch")] == [1, 2, 3]
    resume(run, epochs=4)
    assert [record["epoch"] for record in Run(run).records("epoch")] == [1, 2, 3, 4]


def test_a_schedule_begins_anew_with_warm_up_and_ends_at_its_end() -> None:
    options = Optimization(lr=1.0, schedule="linear", warmup_steps=2, epochs=40, lengths=((20, 40),))
    schedule = Schedule.of(options, 8, 1)
    rates = [schedule.rate(step) for step in range(20, 40)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 18)
    alone = Schedule.of(Optimization(lr=1.0, schedule="linear", warmup_steps=2, epochs=20), 8, 1)
    assert rates == pytest.approx([alone.rate(step) for step in range(20)])
    assert schedule.average_decay == alone.average_decay


@pytest.fixture
def losses(monkeypatch) -> list[float]:
    """The validation losses of the epochs to come."""
    validate, script = Classify.validate, []
    monkeypatch.setattr(
        Classify, "validate", lambda *arguments: {**validate(*arguments), "loss": script.pop(0)}
    )
    return script


def weights_of(model: Path) -> torch.Tensor:
    """All weights, without the temperature that the head has."""
    model = from_pretrained(model)
    state = [value.flatten() for name, value in model.state_dict().items() if not name.startswith("head")]
    return torch.cat(state)


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize(("keep", "patience"), [("best", 0), ("best", 1), ("auto", 0), ("last", 1)])
def test_after_any_continuations_the_model_is_the_best_of_all_epochs_by_its_rule(
    photos: Path, tmp_path: Path, losses: list[float], keep: str, patience: int, keep_state: bool
) -> None:
    options = {**SMALL, "keep": keep, "patience": patience}
    losses += [0.9, 0.5, 0.7]
    run = trained(photos, tmp_path / "run", 2 if patience else 3, keep_state=keep_state, **options)
    first, seconds = weights_of(run), Run(run).records("test")[-1]["seconds"]
    losses[:] = [0.8, 0.6]
    resume(run, epochs=4, keep_state=keep_state)
    done = [record["epoch"] for record in Run(run).records("epoch")]
    assert done == ([1, 2, 3] if patience else [1, 2, 3, 4])  # those before it do not count
    (kept,) = Run(run).records("kept")
    assert kept["epoch"] == {"best": 2, "auto": 4, "last": 3}[keep]
    assert torch.equal(weights_of(run), first) == (keep == "best")
    assert keep != "best" or "the lowest validation loss, 0.500" in kept["reason"]
    assert Run(run).records("test")[-1]["seconds"] > seconds
    losses[:] = [0.4]
    resume(run, epochs=done[-1] + 1)
    assert Run(run).records("kept")[0]["epoch"] == done[-1] + 1
    assert not torch.equal(weights_of(run), first)


class Killed(BaseException):
    """In the place of SIGKILL."""


def files_of(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and not path.name.startswith((".lock", "events"))
    }


PLACES = (
    (more_epochs, "_write_uncalibrated"),
    (Run, "record_options"),
    (Trainer, "fit"),
    (BestWeights, "_write"),
    (finishing, "save_pretrained"),
    (finishing, "remove_checkpoints"),
)


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize(("owner", "place"), PLACES, ids=[name for _, name in PLACES])
def test_a_continuation_that_is_killed_anywhere_leaves_a_model_and_is_resumed(
    photos: Path, tmp_path: Path, monkeypatch, losses, owner: object, place: str, keep_state: bool
) -> None:
    losses += [0.5]
    run = trained(photos, tmp_path / "run", 1, keep_state=keep_state, checkpoint_seconds=0.0, **SMALL)
    first = weights_of(run)
    action = getattr(owner, place)
    for after in (False, True):  # twice
        with monkeypatch.context() as patch:

            def killed(*arguments, after=after, **options):
                if after:
                    action(*arguments, **options)
                raise Killed

            patch.setattr(owner, place, killed)
            losses[:] = [0.4]
            with suppress(Killed, UserError):  # the second time, it may have finished
                resume(run, epochs=2)
        assert weights_of(run) is not None  # of the one or the other end
    losses[:] = [0.4]
    with suppress(UserError):  # where it has finished
        resume(run, epochs=2)
    assert Run(run).finished
    assert not (run / "checkpoints" / "finished").exists()
    assert Run(run).records("kept")[0]["epoch"] == 2
    assert not torch.equal(weights_of(run), first)


@pytest.mark.parametrize("keep_state", [False, True])
def test_a_continuation_that_fails_leaves_the_run_as_it_was(
    photos: Path, tmp_path: Path, monkeypatch, losses, keep_state: bool
) -> None:
    losses += [0.9, 0.5]
    run = trained(photos, tmp_path / "run", 2, keep_state=keep_state, **SMALL)
    before = files_of(run)
    losses[:] = [0.4, float("nan")]
    with pytest.raises(UserError, match="is what it was before these epochs"):
        resume(run, epochs=4, checkpoint_seconds=0.0)
    assert files_of(run) == before
    assert Run(run).finished
    monkeypatch.setattr("vitascope.training.resume.announce_run", failing)
    with pytest.raises(UserError, match="no such device"):
        resume(run, epochs=4)
    assert files_of(run) == before
    assert Run(run).finished


def test_several_processes_give_a_run_more_epochs(photos: Path, tmp_path: Path) -> None:
    run = trained(photos, tmp_path / "run", 1, **SMALL)
    assert in_group(2, lambda: resume(run, epochs=2), tmp_path / "store") == [0, 0]
    assert [record["epoch"] for record in Run(run).records("epoch")] == [1, 2]
    assert Run(run).finished


def failing(trainer: object) -> None:
    raise UserError("no such device")


def interrupted(trainer: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_continuation_is_resumed_and_loses_nothing(
    photos: Path, tmp_path: Path, monkeypatch
) -> None:
    run = trained(photos, tmp_path / "run", 2, **SMALL)
    finished = shutil.copytree(run / "model", tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr("vitascope.training.loop.Trainer.fit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resume(run, epochs=3)
    assert not Run(run).finished
    kept = from_pretrained(run / "checkpoints" / "start").state_dict()
    assert all(
        torch.equal(value, kept[name]) for name, value in from_pretrained(finished).state_dict().items()
    )
    resume(run)
    assert [record["epoch"] for record in Run(run).records("epoch")] == [1, 2, 3]


def test_a_whitened_tokenizer_goes_on_with_and_without_its_state(photos: Path, tmp_path: Path) -> None:
    small = {"recipe": "small-data", "device": "cpu", "batch_size": 8, "image_size": 16, "depth": 1}
    for name, keep in (("with", True), ("without", False)):
        run = trained(photos, tmp_path / name, 1, keep_state=keep, **small)
        assert Run(run).config["whiten"] == "on"
        resume(run, epochs=2)
        assert Run(run).config["whiten"] == ("on" if keep else "off")
        resume(run, epochs=3, keep_state=True)
        resume(run, epochs=4)
        assert [record["epoch"] for record in Run(run).records("epoch")] == [1, 2, 3, 4]


def test_a_state_that_is_gone_is_named(photos: Path, tmp_path: Path, monkeypatch) -> None:
    run = trained(photos, tmp_path / "run", 1, keep_state=True, **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr("vitascope.training.loop.Trainer.fit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resume(run, epochs=3)
    for folder in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"begin with is gone; the run is finished, as before"):
        resume(run)
    assert Run(run).finished
    assert from_pretrained(run)


def test_what_adds_no_epochs_or_changed_is_one_line(photos: Path, tmp_path: Path, capsys) -> None:
    data = Path(shutil.copytree(photos, tmp_path / "photos"))
    run = trained(data, tmp_path / "run", 2, **SMALL)
    with pytest.raises(UserError, match="2 of its epochs are done, so epochs=2 adds none"):
        resume(run, epochs=2)
    for wrong in (2.5, "3", 10**30, [3]):
        with pytest.raises(UserError, match="epochs"):
            resume(run, epochs=wrong)
        assert Run(run).finished
    metrics = Run(run).metrics_file.read_text()
    Run(run).metrics_file.write_text("")
    with pytest.raises(UserError, match="does not say how many epochs are done"):
        resume(run, epochs=3)
    Run(run).metrics_file.write_text(metrics)
    photo = next(data.rglob("*.png"))
    content = photo.read_bytes()
    photo.unlink()
    with pytest.raises(UserError, match="cannot be resumed"):
        resume(run, epochs=3)
    photo.write_bytes(content)
    with pytest.raises(UserError, match="lr cannot change"):
        resume(run, epochs=3, lr=0.1)
    assert Run(run).finished
    assert main(["train", "--resume", str(run)]) == 2
    assert "--epochs MORE` goes on" in capsys.readouterr().err


def test_the_configuration_of_a_longer_run_trains_it_in_one_go(photos: Path, tmp_path: Path) -> None:
    run = trained(photos, tmp_path / "run", 1, **SMALL)
    assert main(["train", "--resume", str(run), "--epochs", "2"]) == 0
    again = ["train", "--config", str(run / "config.yaml"), "--run", str(tmp_path / "again")]
    assert main(again) == 0
    records = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records if record["kind"] == "epoch"] == [1, 2]
