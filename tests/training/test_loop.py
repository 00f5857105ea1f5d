"""The loop's arithmetic and the end of a run: a step in every precision, and how a run stops."""

import errno
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import small_model
from tests.training import (
    assert_bitwise,
    interrupted,
    last_state,
    let_losses_be,
    tiny_config,
    trainer_of,
    undrawn,
    write_uneven,
)
from vitascope import runs
from vitascope.cli import main
from vitascope.data.augment import Augmentation
from vitascope.data.loading import Batch
from vitascope.errors import DivergenceError, UserError
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.training import loop, results
from vitascope.training.checkpoint.folders import checkpoints, load_checkpoint_at
from vitascope.training.loop import Trainer
from vitascope.training.optimizers import layer_of
from vitascope.training.progress import Progress
from vitascope.training.run.run import Run

pytestmark = pytest.mark.usefixtures("without_figures")

EXACT: dict[str, Any] = {"precision": "fp32", "optimizer": "sgd", "lr": 0.1, "warmup_epochs": 0.0, "ema": 0.0}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Path:
    return write_uneven(tmp_path_factory.mktemp("data") / "uneven")


def steps(trainer: Trainer, epoch: int = 0) -> list[float]:
    return [float(trainer._training_step(batch, epoch)) for batch in trainer.train_loader.epoch(epoch)]


def weights_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.module.parameters()])


# A step


BALANCED = {"class_weights": "balanced", "mixup": 0.8}


@pytest.mark.parametrize("chosen", [{}, {"mixup": 0.8, "cutmix": 1.0}, BALANCED, {"sampling": "balanced"}])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_gradient_accumulation_equals_the_step_of_the_full_batch(uneven, accumulate: int, chosen) -> None:
    """20 images in batches of 11: the parts differ in size, and the last batch is smaller and odd."""
    options = EXACT | chosen | {"batch_size": 11, "clip_grad": 0.5, "crop_scale": 0.5}
    whole = trainer_of(tiny_config(uneven, **options))
    parts = trainer_of(tiny_config(uneven, accumulate=accumulate, **options))
    before = weights_of(whole).clone()
    assert steps(parts) == pytest.approx(steps(whole), rel=1e-6)
    assert not torch.equal(weights_of(whole), before)
    torch.testing.assert_close(weights_of(parts), weights_of(whole), rtol=1e-6, atol=1e-7)
    sums = {name: float(value) for name, value in whole.sums.items()}
    assert {name: float(value) for name, value in parts.sums.items()} == pytest.approx(sums, rel=1e-6)
    assert sums["count"] == 20


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_are_clipped_to_the_norm_unless_it_is_0(data, precision: str) -> None:
    changes = []
    for clip_grad in (0.01, 0.0):
        options = EXACT | {"precision": precision, "clip_grad": clip_grad, "weight_decay": 0.0}
        trainer = trainer_of(tiny_config(data, **options))
        before = weights_of(trainer).clone()
        trainer._training_step(next(trainer.train_loader.epoch()), 0)
        changes.append(float((weights_of(trainer) - before).norm() / trainer.rate))
    assert changes[0] == pytest.approx(0.01, rel=1e-3)
    assert changes[1] > 0.1


def test_unreadable_image_adds_nothing_to_the_loss(data) -> None:
    """The other images keep their weight; they do not fill up the batch."""
    trainer = trainer_of(tiny_config(data, batch_size=8, **EXACT))
    batch = next(trainer.train_loader.epoch())
    five = Batch(batch.pixels[:5], batch.targets[:5], batch.indices[:5], planned=8)
    alone = Batch(batch.pixels[:5], batch.targets[:5], batch.indices[:5], planned=5)
    gradients = []
    for each in (five, alone):
        trainer.optimizer.zero_grad()
        ((part, weight),) = trainer._parts(each)
        loss = trainer._backward(part, weight, epoch=0)
        gradients.append((loss, [p.grad.clone() for p in trainer.module.parameters() if p.grad is not None]))
    (share, ours), (mean, theirs) = gradients
    assert float(share) == pytest.approx(float(mean) * 5 / 8, rel=1e-6)
    torch.testing.assert_close(
        torch.stack([g.norm() for g in ours]) * 8 / 5, torch.stack([g.norm() for g in theirs])
    )
    assert float(trainer.sums["count"]) == 10  # the epoch's mean is of the images that were read


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "adamw"), ("fp16", "adamw"), ("fp16", "sgd")])
def test_batch_of_unreadable_images_changes_nothing(data, precision: str, optimizer: str) -> None:
    options = EXACT | {"precision": precision, "optimizer": optimizer, "ema": 0.5, "accumulate": 2}
    trainer = trainer_of(tiny_config(data, **options))
    batch = next(trainer.train_loader.epoch())
    none = Batch(batch.pixels[:0], batch.targets[:0], batch.indices[:0], planned=4)
    for _ in range(2):  # before and after there is momentum
        before = weights_of(trainer).clone()
        assert float(trainer._training_step(none, 0)) == 0
        assert torch.equal(weights_of(trainer), before)
        trainer._training_step(batch, 0)
        assert bool(torch.isfinite(weights_of(trainer)).all())
    assert trainer.step == 4


# Trained parameters


def test_gradient_checkpointing_reaches_the_model_and_changes_no_weights(data) -> None:
    plain, checkpointed = (
        trainer_of(tiny_config(data, gradient_checkpointing=wanted, **EXACT)) for wanted in (False, True)
    )
    assert checkpointed.module.encoder.checkpointing
    assert not plain.module.encoder.checkpointing
    assert steps(checkpointed) == steps(plain)
    assert torch.equal(weights_of(checkpointed), weights_of(plain))


def test_every_parameter_group_has_its_learning_rate_in_every_step(data) -> None:
    options = EXACT | {"layer_decay": 0.5, "schedule": "linear", "lr": 0.01, "lr_batch": 8}
    trainer = trainer_of(tiny_config(data, **options | {"warmup_epochs": 0.6}))
    names = {id(parameter): name for name, parameter in trainer.module.named_parameters()}
    rates = []
    for epoch in range(3):
        for batch in trainer.train_loader.epoch(epoch):
            expected = trainer.schedule.rate(trainer.step)
            trainer._training_step(batch, epoch)
            assert trainer.rate == expected
            rates.append(expected)
            for group in trainer.optimizer.param_groups:
                for parameter in group["params"]:
                    share = 0.5 ** (3 - layer_of(names[id(parameter)], 2))
                    assert group["lr"] == pytest.approx(expected * share)
    peak = 0.01 * 4 / 8
    assert (rates[0], max(rates), rates[-1]) == pytest.approx((peak / 3, peak, peak / 12))


@pytest.mark.parametrize("ema", [None, 0.3])
def test_the_average_follows_the_weights_with_the_decay_of_the_schedule(data, ema: float | None) -> None:
    """Capped by its warm-up, and from step 0 on, which copies the weights."""
    trainer = trainer_of(tiny_config(data, **EXACT | {"ema": ema, "epochs": 100}))
    expected = None
    for epoch in range(2):
        for batch in trainer.train_loader.epoch(epoch):
            step = trainer.step
            trainer._training_step(batch, epoch)
            decay = min(1 - 1 / (500 / 50) if ema is None else ema, (1 + step) / (10 + step))
            now = weights_of(trainer).double()
            expected = now if expected is None else decay * expected + (1 - decay) * now
    average = torch.cat([parameter.flatten() for parameter in trainer.average.parameters()])
    torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_each_size_of_full_batches_is_compiled_once_and_nothing_else(
    data, tmp_path, monkeypatch, ema: float
) -> None:
    """With shorter last batches, smaller images at first, and validations."""
    graphs: list[tuple[int, ...]] = []
    compile_module = torch.nn.Module.compile

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.extend(tuple(each.shape) for each in inputs if each.ndim == 4 and not each.requires_grad)
        # The error of one more names the guard that fails.
        torch._dynamo.config.error_on_recompile = len(graphs) == 4
        return graph.forward

    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compile_module(self, backend=record, **options)
    )
    options = {"progressive": 0.75, "image_size": 32, "patch_size": 4, "depth": 1, "ema": ema}
    options |= {"batch_size": 6, "epochs": 3}
    config = tiny_config(data, run=str(tmp_path / "run"), compile="on", **options)
    torch.compiler.reset()
    with undrawn(), torch._dynamo.config.patch(error_on_recompile=False):
        runs.train(config)
    assert len(graphs) == 4
    assert {shape[0] for shape in graphs} == {6}
    assert len({shape[2:] for shape in graphs}) == 4


# fp16


def test_fp16_resumes_bitwise_with_its_scaler_state(data, tmp_path) -> None:
    options = {"precision": "fp16", "checkpoint_seconds": 0.0, "keep_checkpoints": 100, "ema": 0.5}
    whole, again = tmp_path / "whole", tmp_path / "again"
    runs.train(tiny_config(data, run=str(whole), epochs=2, **options))
    at_seven = whole / "checkpoints" / "step-00000007"
    again.mkdir()
    for name in ("config.yaml", "plan.json", "split.jsonl.gz"):
        shutil.copy(whole / name, again)
    shutil.copytree(at_seven, again / "checkpoints" / at_seven.name)
    runs.resume(again)
    assert_bitwise(last_state(again), last_state(whole))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_fp16_overflow_skips_one_step_only(data, optimizer: str) -> None:
    options = EXACT | {"precision": "fp16", "optimizer": optimizer}
    trainer = trainer_of(tiny_config(data, **options))
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28)
    first, *others = trainer.train_loader.epoch()
    before = weights_of(trainer).clone()
    trainer._training_step(first, 0)
    assert torch.equal(weights_of(trainer), before)
    assert trainer.scaler.get_scale() == 2.0**27
    for _ in range(20):
        trainer._training_step(others[0], 0)
    assert not torch.equal(weights_of(trainer), before)
    assert bool(torch.isfinite(weights_of(trainer)).all())


@pytest.mark.parametrize(("begun", "resumed"), [("fp32", "fp16"), ("fp16", "bf16")])
def test_run_resumes_in_another_precision(data, tmp_path, begun: str, resumed: str) -> None:
    run = tmp_path / "run"
    with interrupted(3):
        runs.train(tiny_config(data, run=str(run), precision=begun, epochs=1))
    runs.resume(run, precision=resumed)
    assert Run(run).metrics[-1]["kind"] == "test"


# Uneven classes


def test_balanced_sampling_is_of_the_training_images_alone_and_class_weights_reach_the_task(uneven) -> None:
    sampled = trainer_of(tiny_config(uneven, sampling="balanced"))
    assert (sampled.train_loader.balanced, sampled.val_loader.balanced) == (True, False)
    assert sampled.task.class_weights is None
    weighted = trainer_of(tiny_config(uneven, class_weights="balanced"))
    assert not weighted.train_loader.balanced
    assert weighted.task.class_weights.tolist() == pytest.approx([20 / (2 * 14), 20 / (2 * 6)])


def test_repetitions_of_an_image_are_augmented_differently(uneven) -> None:
    trainer = trainer_of(tiny_config(uneven, sampling="balanced", batch_size=20, erase=1.0))
    (batch,) = trainer.train_loader.epoch()
    assert len(batch.indices) == 20 > len(set(batch.indices % 20))
    images = trainer._examples(batch, 0).images.flatten(1)
    assert len(images.unique(dim=0)) == 20


def test_the_estimate_of_the_time_left_follows_the_schedule(data, tmp_path, monkeypatch) -> None:
    """Smaller images at first: the rest takes longer than its share of the images."""
    slowdowns, plan = [], Progress.plan

    def planned(self: Progress, epochs: int, images: int, slowdown: float, *rest: Any) -> None:
        slowdowns.append(slowdown)
        plan(self, epochs, images, slowdown, *rest)

    monkeypatch.setattr(Progress, "plan", planned)
    config = tiny_config(data, run=str(tmp_path / "run"), progressive=0.5, image_size=32, epochs=2)
    schedule = trainer_of(config).schedule
    runs.train(config)
    assert slowdowns == [schedule.slowdown(step) for step in (0, 5)]


# Early stopping


@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_run_ends_after_epochs_without_a_lower_validation_loss(
    data, tmp_path, monkeypatch, capsys, keep: str
) -> None:
    let_losses_be(monkeypatch, 3.0, 2.0, 2.5, 1.5, 1.5, 1.6)
    config = tiny_config(data, run=str(tmp_path / "run"), epochs=9, patience=2, keep=keep, ema=0.0)
    run = Run(runs.train(config).run)
    out = capsys.readouterr().out
    assert out.count("stopped after epoch 6: the lowest validation loss, 1.500, was that of epoch 4") == 1
    assert f"the weights of epoch {4 if keep == 'best' else 6} are kept: " in out
    assert len(run.records("epoch")) == 6
    assert run.records("stop") == [{"kind": "stop", "step": 30, "epoch": 6, "best_epoch": 4}]
    last = last_state(run.path, "model")["model"]
    expected = from_pretrained(run.best).state_dict() if keep == "best" else last
    assert_bitwise(dict(run.model().state_dict()), dict(expected))
    assert run.best.exists() == (keep == "best")


@pytest.mark.parametrize(("trained", "lowest", "epochs"), [(True, 2, 8), (True, 1, 6), (False, 2, 10)])
def test_a_run_with_minutes_from_trained_weights_ends_when_more_time_does_not_help(
    data, tmp_path, monkeypatch, trained: bool, lowest: int, epochs: int
) -> None:
    """Three times the epochs before the lowest loss, or five, pass without a lower one."""
    monkeypatch.setattr(loop, "LEAST_PATIENCE", 5)
    body = save_pretrained(small_model(image_size=16, patch_size=8, depth=2), tmp_path / "body")
    let_losses_be(monkeypatch, *[3.0] * (lowest - 1), 1.0, *[2.0] * 10)
    budget = {
        "batch_size": 10,
        "lengths": ((0, 20),),
        "validations": 10,
        "minutes": 1.0,
    }  # recorded: no speed is measured
    config = tiny_config(data, run=str(tmp_path / "run"), weights=str(body) if trained else None, **budget)
    result = runs.train(config.replace(epochs=None))
    assert len(Run(result.run).records("epoch")) == epochs


# The end of a run


def all_numbers(run: Path) -> bool:
    states = [load_checkpoint_at(folder)[1]["model"] for folder in checkpoints(run)]
    states += [from_pretrained(path.parent).state_dict() for path in run.rglob("model.safetensors")]
    return all(bool(torch.isfinite(tensor).all()) for state in states for tensor in state.values())


def spoil_augmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second epoch on, augmentation returns NaN."""
    augment = Augmentation.__call__

    def spoilt(self: Augmentation, pixels: torch.Tensor, indices: Any, **keywords: Any) -> torch.Tensor:
        images = augment(self, pixels, indices, **keywords)
        return images * math.nan if keywords["epoch"] >= 1 else images

    monkeypatch.setattr(Augmentation, "__call__", spoilt)


def test_nan_inputs_stop_the_run_and_keep_the_last_good_checkpoint(
    data, tmp_path, monkeypatch, capsys
) -> None:
    run, file = tmp_path / "run", tmp_path / "config.yaml"
    config = tiny_config(data, run=str(run), epochs=2, ema=0.5, checkpoint_seconds=0.0)
    whole = runs.train(config.replace(run=str(tmp_path / "whole"))).run
    file.write_text(config.to_yaml())
    with monkeypatch.context() as patch:
        spoil_augmentation(patch)
        assert main(["train", "--config", str(file)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 2  # the error, and how to find the step
    for part in ("diverged", "step 6", "lower lr", str(run), "newest checkpoint is step-00000005"):
        assert part in message
    assert [path.name for path in checkpoints(run)] == ["step-00000004", "step-00000005"]
    assert all_numbers(run)
    assert not (run / "diverged" / "model.safetensors").exists()
    runs.resume(run)
    assert not (run / "diverged").exists()  # it came by the step
    assert_bitwise(last_state(run), last_state(whole))


def test_resumed_run_that_diverges_again_records_the_first_step_and_the_model_before_it(
    data, tmp_path, monkeypatch
) -> None:
    """The first loss that is read is that of step 10; step 6 is the first whose loss is not finite."""
    spoil_augmentation(monkeypatch)
    run, trained = tmp_path / "run", Trainer._training_step
    taken: list[tuple[list[int], torch.Tensor]] = []

    def step(self: Trainer, batch: Batch, epoch: int) -> torch.Tensor:
        taken.append((batch.indices.tolist(), weights_of(self)))
        return trained(self, batch, epoch)

    monkeypatch.setattr(Trainer, "_training_step", step)
    config = tiny_config(data, run=str(run), checkpoint_seconds=1e9)
    with pytest.raises(DivergenceError, match=re.escape(f"`vitascope train --resume {run}` finds")):
        runs.train(config)
    assert json.loads((run / "diverged" / "step.json").read_text()) == {"step": 10}
    with pytest.raises(
        DivergenceError, match=r"at step 6, .*the model before step 6 and its images are in .*diverged"
    ):
        runs.resume(run)
    record = json.loads((run / "diverged" / "step.json").read_text())
    indices, weights = taken[5]
    assert (record["step"], record["epoch"], record["seed"], record["indices"]) == (6, 1, 0, indices)
    assert [Path(image).is_file() for image in record["images"]] == [True] * len(indices)
    assert taken[-1][0] == indices
    model = from_pretrained(run / "diverged")
    assert torch.equal(torch.cat([weight.detach().flatten() for weight in model.parameters()]), weights)
    assert not taken[6][1].isfinite().all()  # without the check


def test_nan_weights_are_never_written_even_before_the_loss_is_checked(data, tmp_path, monkeypatch) -> None:
    """When the checkpoint is due, the loss is still finite, and its next check is seven steps away."""
    step = Trainer._training_step

    def spoiling(self: Trainer, *arguments):
        loss = step(self, *arguments)
        if self.step == 3:
            torch.nn.init.constant_(self.module.head.bias, math.nan)
            self.config = self.config.replace(checkpoint_seconds=0.0)
        return loss

    monkeypatch.setattr(Trainer, "_training_step", spoiling)
    with pytest.raises(UserError, match=r"a weight is nan at step 3,.*it has no checkpoint yet"):
        runs.train(tiny_config(data, run=str(tmp_path / "run"), ema=0.9))
    assert not checkpoints(tmp_path / "run")


def test_recorded_metrics_have_the_documented_names_and_means_of_their_epoch(
    data, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(loop, "RECORD_EVERY", 1)
    run = runs.train(tiny_config(data, run=str(tmp_path / "run"), mixup=0.8)).run
    names = {record["kind"]: list(record)[2:] for record in Run(run).metrics}
    means = ["train_loss", "train_accuracy", "val_loss", "val_accuracy"]
    means += ["val_balanced_accuracy", "val_majority"]
    trust = ["calibration_error", "calibration_error_low", "calibration_error_high", "risk_coverage_area"]
    test = ["split", "images", "unreadable", "correct", "accuracy", "accuracy_low", "accuracy_high"]
    assert names == {
        "step": ["loss", "lr"],
        "epoch": ["epoch", *means, "images_per_second", "seconds"],
        "kept": ["weights", "epoch", "reason"],
        "test": [*test, "balanced_accuracy", "macro_f1", "majority", "loss", *trust, "seconds"],
    }
    (tested,) = Run(run).records("test")
    for name in ("accuracy", "calibration_error"):
        assert tested[f"{name}_low"] < tested[f"{name}_high"]
        assert tested[f"{name}_low"] <= tested[name] <= tested[f"{name}_high"]
    right = 20 * Run(run).records("epoch")[-1]["train_accuracy"]
    assert right == pytest.approx(round(right))
    losses = [record["loss"] for record in Run(run).records("step")]
    for number, epoch in enumerate(Run(run).records("epoch")):
        assert epoch["train_loss"] == pytest.approx(sum(losses[5 * number : 5 * number + 5]) / 5, rel=1e-5)


def test_run_killed_after_the_last_step_only_finishes(data, tmp_path, monkeypatch) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("vitascope.training.train.finish", lambda *_: None)
        runs.train(tiny_config(data, run=str(run)))
    monkeypatch.setattr(Trainer, "_training_step", lambda *_: pytest.fail("a step"))
    result = runs.resume(run)
    assert (run / "model" / "config.json").is_file()
    assert isinstance(result, results.TrainResult)


def test_broken_or_unwritten_record_of_a_diverged_step_has_a_way_out(data, tmp_path, monkeypatch) -> None:
    spoil_augmentation(monkeypatch)
    run = tmp_path / "a run"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_json", full)
        with pytest.raises(UserError, match=f"--resume '{run}'"):
            runs.train(tiny_config(data, run=str(run), checkpoint_seconds=1e9, epochs=2))
    for text in ("", "[]", '{"images": []}', '{"step": "6"}', "[" * 100_000):
        (run / "diverged" / "step.json").write_text(text)
        with pytest.raises(UserError, match=r"step\.json is broken: .*; remove it"):
            runs.resume(run)
    (run / "diverged" / "step.json").unlink()
    with pytest.raises(DivergenceError, match=re.escape(f"`vitascope train --resume '{run}'` finds")):
        runs.resume(run)
