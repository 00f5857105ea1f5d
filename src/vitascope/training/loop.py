"""The only training loop: `train` starts a run, `resume` continues one, to the bit."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitascope.data.augment import Augmentation
from vitascope.data.datasets import ImageSet, Splits, open_data
from vitascope.data.loading import Batch, Loader
from vitascope.data.randomness import step_seed
from vitascope.errors import Interrupted, UserError
from vitascope.model.config import ViTConfig
from vitascope.model.hardware import resolve_device, resolve_precision, reuse_freed_memory, suitable_threads
from vitascope.model.vit import VisionTransformer
from vitascope.report.figures import draw_figures
from vitascope.training.checkpoint import load_checkpoint, save_checkpoint
from vitascope.training.classify import Classify
from vitascope.training.defaults import default_batch_size, resolve_config
from vitascope.training.evaluate import Evaluation, evaluate
from vitascope.training.optim import adamw, learning_rate, running_average
from vitascope.training.progress import Progress
from vitascope.training.recipes import TrainConfig
from vitascope.training.run import Recorder, create_run, open_run
from vitascope.weights.own import default_preprocess
from vitascope.weights.store import (
    from_pretrained,
    load_pretrained,
    save_pretrained,
    transfer,
)


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run has made.

    Attributes:
        run: the run folder.
        model: the finished model, in evaluation mode.
        evaluation: the model on the test split (on `val` where a data set has no test split).
        seconds: time in the loop, validation included, over all of the run's processes.
        figures: paths of the pictures, by name.
    """

    run: Path
    model: VisionTransformer
    evaluation: Evaluation
    seconds: float
    figures: dict[str, Path]


def train(config: TrainConfig) -> TrainResult:
    """Train a classifier from a configuration; what `vitascope train` calls.

    Raises:
        UserError: data, model or options that cannot be used.
        Interrupted: by SIGINT or SIGTERM, after saving a checkpoint.
    """
    splits = open_data(config.data, seed=config.seed)
    config, model_config = resolve_config(config, splits)
    run = create_run(config)
    try:
        trainer = Trainer(run, config, model_config, splits)
    except (UserError, KeyboardInterrupt):
        shutil.rmtree(run)  # a run that cannot start leaves nothing
        raise
    return trainer.fit()


def resume(run: str | os.PathLike[str]) -> TrainResult:
    """Continue a run from its newest checkpoint (from its start where there is none), to the same end.

    On the CPU the weights become bitwise those of a run that was never stopped.

    Raises:
        UserError: no run there, it has finished, no whole checkpoint, or the data are others by now.
    """
    folder, config = open_run(run)
    if (folder / "model" / "config.json").is_file():
        raise UserError(f"{run}: this run has finished; `vitascope evaluate {run}` measures it")
    splits = open_data(config.data, seed=config.seed)
    config, model_config = resolve_config(config, splits)
    trainer = Trainer(folder, config, model_config, splits)
    trainer.restore()
    return trainer.fit()


class Trainer:
    """One run: its parts, its counters, its loop."""

    def __init__(self, run: Path, config: TrainConfig, model_config: ViTConfig, splits: Splits) -> None:
        reuse_freed_memory()
        self.run, self.config, self.splits = run, config, splits
        self.batch_size = config.batch_size or default_batch_size(len(splits.train))
        self.device = resolve_device(config.device)
        self.precision = resolve_precision(
            config.precision, model_config, self.device, self.batch_size, training=True
        )
        self.model = self._start_model(model_config).to(self.device)
        self.average = running_average(self.model, config.ema) if config.ema else None
        self.optimizer = adamw(self.model, config)
        self.task = Classify(config.label_smoothing)
        self.augmentation = Augmentation(
            flip=config.flip,
            crop_scale=config.crop_scale,
            shift=config.shift,
            rotate=config.rotate,
            color_jitter=config.color_jitter,
        )
        self.train_loader = self._loader(splits.train, seed=config.seed)
        self.val_loader = self._loader(splits.val)
        self.steps_per_epoch = self.train_loader.batches_per_epoch
        self.step = 0
        self.best_loss = math.inf
        self.seconds = 0.0
        self.sums: dict[str, Tensor] = {}

    def _start_model(self, model_config: ViTConfig) -> VisionTransformer:
        """The model before the first step, and the preprocessing that belongs to it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            model = VisionTransformer(model_config)
        self.preprocess = default_preprocess(model_config)
        if self.config.weights is not None:
            loaded = load_pretrained(self.config.weights)
            notes = transfer(loaded.model, model, self.config.weights)
            print(f"weights of {self.config.weights}: {'; '.join(notes)}")
            self.preprocess = loaded.preprocess.at_size(model_config.image_hw)
        return model

    def _loader(self, images: ImageSet, seed: int | None = None) -> Loader:
        return Loader(
            images,
            self.preprocess,
            self.batch_size,
            seed=seed,
            device=self.device,
            workers=self.config.workers,
        )

    @property
    def trained(self) -> VisionTransformer:
        """The weights that are evaluated and saved: the running average where there is one."""
        model = self.model if self.average is None else self.average.module
        assert isinstance(model, VisionTransformer)
        return model

    def fit(self) -> TrainResult:
        """Train to the end, from wherever the counters stand; then test, save and draw."""
        print(self.describe(), flush=True)
        recorder = Recorder(self.run, self.step)
        images = len(self.train_loader)
        epoch, batch = divmod(self.step, self.steps_per_epoch)
        progress = Progress(self.config.epochs, images, epoch * images + batch * self.batch_size)
        try:
            threads = suitable_threads(self.model.config, self.device, self.batch_size)
            with threads, torch.random.fork_rng(devices=[]), stop_signals() as stop:
                self._loop(recorder, progress, stop)
            progress.close()
            return self._finish(recorder)
        finally:
            progress.close()
            recorder.close()

    def describe(self) -> str:
        """The run in three lines."""
        config, model = self.config, self.model.config
        size, patch = "x".join(map(str, model.image_hw)), model.patch_hw[0]
        splits = {split.name: len(split) for split in (self.splits.train, self.splits.val, self.splits.final)}
        sizes = ", ".join(f"{count:,} {name}" for name, count in splits.items())
        for path, reason in {**self.train_loader.unreadable, **self.val_loader.unreadable}.items():
            print(f"left out: {reason if path in reason else f'{path}: {reason}'}")
        start = "" if self.step == 0 else f", from step {self.step:,}"
        return (
            f"data   {config.data}: {sizes} images of {model.num_classes} classes\n"
            f"model  {model.num_parameters / 1e6:.2f} M parameters: {model.depth} blocks of width "
            f"{model.embed_dim}, {size} pixels in patches of {patch}\n"
            f"run    {self.run}: {config.epochs} epochs of {self.steps_per_epoch} steps{start}, "
            f"{str(self.precision).removeprefix('torch.')} on {self.device}"
        )

    def _loop(self, recorder: Recorder, progress: Progress, stop: Stop) -> None:
        """Epochs of steps; a checkpoint when it is due."""
        self.model.train()
        saved = clock = time.monotonic()
        while self.step < self.config.epochs * self.steps_per_epoch:
            epoch, start = divmod(self.step, self.steps_per_epoch)
            for batch in self.train_loader.epoch(epoch, start=start):
                self._training_step(batch, epoch, recorder)
                progress.advance(len(batch.labels))
                if self.step % self.steps_per_epoch == 0:
                    self._end_epoch(epoch, recorder, progress)
                now = time.monotonic()
                self.seconds, clock = self.seconds + now - clock, now
                if stop.signum is not None or now - saved >= self.config.checkpoint_seconds:
                    self.save()
                    saved = time.monotonic()
                if stop.signum is not None:
                    raise Interrupted(self.run, stop.signum)
        self.save()

    def _training_step(self, batch: Batch, epoch: int, recorder: Recorder) -> None:
        """Forward, backward, update; everything random in it is a function of the seed and the counters."""
        config = self.config
        rate = learning_rate(config, self.step, self.steps_per_epoch)
        torch.manual_seed(step_seed(config.seed, self.step))
        if len(batch.labels):
            images = self.augmentation(batch.pixels, batch.indices, seed=config.seed, epoch=epoch)
            images = self.preprocess.normalize(images)  # (B, C, H, W)
            with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
                loss, sums = self.task.loss(self.model, images, batch.labels)
            loss.backward()
            if config.clip_grad:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_grad)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.average is not None:
                self.average.update_parameters(self.model)
            self.sums = {name: self.sums.get(name, torch.zeros(())) + value for name, value in sums.items()}
        self.step += 1
        if self.step % 10 == 0 and len(batch.labels):
            value = float(loss.detach())
            self._check_finite(value)
            recorder.record("step", self.step, {"loss": value, "lr": rate})

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {self.step}: training has diverged; try a lower --lr than "
                f"{self.config.lr:g} or --precision fp32 (the run so far is in {self.run})"
            )

    def _end_epoch(self, epoch: int, recorder: Recorder, progress: Progress) -> None:
        """Validate, record, and keep the weights if they are the best so far."""
        means = {name: float(total / self.sums["count"]) for name, total in self.sums.items()}
        self._check_finite(means["loss"])
        self.sums = {}
        val = evaluate(self.trained, self.val_loader, precision=self.precision)
        progress.epoch(epoch + 1, means["loss"], val.accuracy)
        recorder.record(
            "epoch",
            self.step,
            {
                "epoch": epoch + 1,
                "train_loss": means["loss"],
                "train_accuracy": means["correct"],
                "val_loss": val.loss,
                "val_accuracy": val.accuracy,
                "images_per_second": round(progress.images_per_second, 1),
            },
        )
        if val.loss < self.best_loss:
            self.best_loss = val.loss
            save_pretrained(self.trained, self.run / "checkpoints" / "best", preprocess=self.preprocess)

    def _finish(self, recorder: Recorder) -> TrainResult:
        """The finished model, measured on what it has not seen, saved and drawn."""
        best = self.run / "checkpoints" / "best"
        model = from_pretrained(best).to(self.device) if self.config.keep == "best" else self.trained.eval()
        evaluation = evaluate(model, self._loader(self.splits.final), precision=self.precision)
        recorder.record("test", self.step, {**evaluation.summary(), "seconds": round(self.seconds, 2)})
        measured = self.splits.final.subset(evaluation.split, evaluation.indices)
        figures = draw_figures(self.run, model, self.preprocess, measured, evaluation.probabilities)
        save_pretrained(model, self.run / "model", preprocess=self.preprocess)
        return TrainResult(self.run, model.cpu(), evaluation, self.seconds, figures)

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on."""
        state: dict[str, Any] = {
            "data": self._data_identity(),
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sums": self.sums,
            "best_loss": self.best_loss,
            "seconds": self.seconds,
        }
        save_checkpoint(self.run, self.step, state)

    def restore(self) -> None:
        """Continue from the newest checkpoint, if there is one.

        Raises:
            UserError: the data are not those of the checkpoint.
        """
        shutil.rmtree(self.run / "figures", ignore_errors=True)
        found = load_checkpoint(self.run)
        if found is None:
            return
        self.step, state = found
        if state["data"] != self._data_identity():
            raise UserError(
                f"{self.config.data} has changed since the run began: it was {state['data']}, "
                f"it is {self._data_identity()}; a resumed run needs the same data"
            )
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sums, self.best_loss, self.seconds = state["sums"], state["best_loss"], state["seconds"]

    def _data_identity(self) -> str:
        classes = json.dumps(self.splits.train.class_names, ensure_ascii=False)
        return f"{len(self.train_loader):,} training images of the classes {classes}"


@dataclasses.dataclass
class Stop:
    """Which signal asked for a stop, if one did."""

    signum: int | None = None


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turn SIGINT and SIGTERM into a request to stop after the step; a second one acts at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return

    def ask(signum: int, frame: object) -> None:
        stop.signum = signum
        signal.signal(signum, previous[signal.Signals(signum)])

    previous = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    for signum in previous:
        signal.signal(signum, ask)
    try:
        yield stop
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
