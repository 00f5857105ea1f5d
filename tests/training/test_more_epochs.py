import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.forked import in_group
from tests.training import let_losses_be, write_folder
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

SMALL = {"recipe": "base", "embed_dim": 16, "depth": 1, "num_heads": 2, "device": "cpu", "batch_size": 16}
SMALL |= {"image_size": 16, "patch_size": 8}
CONSTANT = {**SMALL, "batch_size": 8, "schedule": "constant", "warmup_steps": 2, "ema": 0.9, "keep": "last"}


@pytest.fixture(autouse=True, scope="module")
def _undrawn() -> Iterator[None]:
    """Figures and report take most of a tiny run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "draw_figures", lambda *_: {})
        patch.setattr(write, "write_report", lambda run, **_: run.report)
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "photos", per_class=20)


def trained(photos: Path, folder: Path, epochs: int, **options: object) -> Path:
    return train(data=photos, run=folder, epochs=epochs, **options).run


@pytest.fixture(scope="module")
def of_one_epoch(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, bool], Path]:
    """Copies of a finished run, with or without its state."""
    root = tmp_path_factory.mktemp("runs")
    for keep_state in (False, True):
        trained(photos, root / str(keep_state), 1, keep_state=keep_state, checkpoint_seconds=0.0, **SMALL)
    return lambda folder, keep_state=False: Path(shutil.copytree(root / str(keep_state), folder))


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


def test_without_a_state_the_model_goes_on_with_a_schedule_of_its_own(of_one_epoch, tmp_path: Path) -> None:
    run = of_one_epoch(tmp_path / "run")
    assert not (run / "checkpoints").exists()
    before, split = from_pretrained(run).state_dict(), Run(run).split_file.read_bytes()
    result = resume(run, epochs=2)
    after = result.model.state_dict()
    distance = sum(float((after[name] - before[name]).abs().sum()) for name in before)
    assert 0 < distance < 0.5 * sum(float(before[name].abs().sum()) for name in before)
    assert Run(run).split_file.read_bytes() == split
    assert [record["epoch"] for record in Run(run).records("epoch")] == [1, 2]
    resume(run, epochs=3)
    assert [record["epoch"] for record in Run(run).records("epoch")] == [1, 2, 3]


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
    return let_losses_be(monkeypatch)


def weights_of(model: Path) -> torch.Tensor:
    """All weights, without the temperature that the head has."""
    model = from_pretrained(model)
    state = [value.flatten() for name, value in model.state_dict().items() if not name.startswith("head")]
    return torch.cat(state)


@pytest.mark.parametrize(
    ("keep", "patience", "keep_state"),
    [("best", 0, True), ("best", 1, False), ("auto", 0, False), ("last", 1, True)],
)
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
    pass


def files_of(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and not path.name.startswith((".lock", "events"))
    }


PLACES = (
    *((more_epochs, "_write_uncalibrated", False), (Run, "record_options", True)),
    *((Trainer, "fit", False), (Trainer, "fit", True), (BestWeights, "_write", True)),
    (finishing, "save_pretrained", True),
    *((finishing, "remove_checkpoints", False), (finishing, "remove_checkpoints", True)),
)


@pytest.mark.parametrize(("owner", "place", "keep_state"), PLACES)
def test_a_continuation_that_is_killed_anywhere_leaves_a_model_and_is_resumed(
    of_one_epoch, tmp_path: Path, monkeypatch, losses, owner: object, place: str, keep_state: bool
) -> None:
    run = of_one_epoch(tmp_path / "run", keep_state)
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
    of_one_epoch, tmp_path: Path, monkeypatch, losses, keep_state: bool
) -> None:
    run = of_one_epoch(tmp_path / "run", keep_state)
    before = files_of(run)
    losses += [0.4, float("nan")]
    with pytest.raises(UserError, match="is what it was before these epochs"):
        resume(run, epochs=3, checkpoint_seconds=0.0)
    assert files_of(run) == before
    assert Run(run).finished
    monkeypatch.setattr("vitascope.training.resume.announce_run", failing)
    with pytest.raises(UserError, match="no such device"):
        resume(run, epochs=3)
    assert files_of(run) == before
    assert Run(run).finished


def test_several_processes_give_a_run_more_epochs(of_one_epoch, tmp_path: Path) -> None:
    run = of_one_epoch(tmp_path / "run")
    assert in_group(2, lambda: resume(run, epochs=2), tmp_path / "store") == [0, 0]
    assert [record["epoch"] for record in Run(run).records("epoch")] == [1, 2]
    assert Run(run).finished


def failing(trainer: object) -> None:
    raise UserError("no such device")


def interrupted(trainer: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_continuation_is_resumed_and_loses_nothing(
    of_one_epoch, tmp_path: Path, monkeypatch
) -> None:
    run = of_one_epoch(tmp_path / "run")
    finished = from_pretrained(run).state_dict()
    with monkeypatch.context() as patch:
        patch.setattr("vitascope.training.loop.Trainer.fit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resume(run, epochs=2)
    assert not Run(run).finished
    kept = from_pretrained(run / "checkpoints" / "start").state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in finished.items())
    resume(run)
    assert [record["epoch"] for record in Run(run).records("epoch")] == [1, 2]


@pytest.mark.parametrize("keep_state", [False, True])
def test_a_whitened_tokenizer_goes_on_with_and_without_its_state(photos, tmp_path, keep_state: bool) -> None:
    small = {**SMALL, "recipe": "small-data", "patch_size": None}
    run = trained(photos, tmp_path / "run", 1, keep_state=keep_state, **small)
    assert Run(run).config["whiten"] == "on"
    resume(run, epochs=2)
    assert Run(run).config["whiten"] == ("on" if keep_state else "off")
    if not keep_state:
        resume(run, epochs=3, keep_state=True)
        resume(run, epochs=4)
        assert [record["epoch"] for record in Run(run).records("epoch")] == [1, 2, 3, 4]


def test_a_state_that_is_gone_is_named(of_one_epoch, tmp_path: Path, monkeypatch) -> None:
    run = of_one_epoch(tmp_path / "run", True)
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
    run = trained(data, tmp_path / "run", 1, **SMALL)
    with pytest.raises(UserError, match="1 of its epochs are done, so epochs=1 adds none"):
        resume(run, epochs=1)
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


def test_the_configuration_of_a_longer_run_trains_it_in_one_go(of_one_epoch, tmp_path: Path) -> None:
    run, again = of_one_epoch(tmp_path / "run"), tmp_path / "again"
    assert main(["train", "--resume", str(run), "--epochs", "2"]) == 0
    assert main(["train", "--config", str(run / "config.yaml"), "--run", str(again)]) == 0
    assert [record["epoch"] for record in Run(again).records("epoch")] == [1, 2]
