"""The training loop: steps, validation, checkpoints; the same for all tasks."""

import copy
import dataclasses
import functools
import itertools
import math
import shlex
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.data.augment import Augmentation
from vitascope.data.contents import image_name
from vitascope.data.loading import Batch, Loader, even_cuts, seconds_to_read
from vitascope.data.mixing import Mixing
from vitascope.data.randaugment import RandAugment
from vitascope.data.randomness import step_seed
from vitascope.data.splits import ImageSet, Splits
from vitascope.errors import DivergenceError, Interrupted, UserError
from vitascope.formatting import counted
from vitascope.layout import DIVERGED, has_model
from vitascope.models.hardware import room_for_images, suitable_threads
from vitascope.models.lora import merged
from vitascope.models.vision_model import VisionModel, build, evaluation_mode
from vitascope.models.weights.loading import save_pretrained
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.serialization import check_record, explaining_faults, parse_json
from vitascope.storage import explaining_failure, make_folder, write_json
from vitascope.training import distributed
from vitascope.training.background import BestWeights, CheckpointWriter, StepLosses
from vitascope.training.checkpoint.folders import checkpoints, to_resume
from vitascope.training.checkpoint.state import (
    all_finite,
    model_state,
    optimizer_state,
    restore_model,
    restore_optimizer,
)
from vitascope.training.evaluation.calibrate import images_to_know
from vitascope.training.identity import check_identity, run_identity
from vitascope.training.more_epochs import best_before, seconds_before
from vitascope.training.optimizers import freeze_body, optimizer_of, train_mode, update_average
from vitascope.training.options.recipes import GROUP_OF, TrainConfig
from vitascope.training.placement import Placement, compile_module, eager_unless, images_at_once
from vitascope.training.plan import Plan
from vitascope.training.progress import Progress
from vitascope.training.run.metrics import MetricsWriter
from vitascope.training.run.run import Run
from vitascope.training.schedule import FIRST_LENGTH, SIDES, Schedule, TimeBudget, resized
from vitascope.training.signals import Stop, interruptible, stop_signals, until_stopped
from vitascope.training.tasks.task import Examples, Sums, Task
from vitascope.training.whitening import TokenizerNorm, without_norms

MEASURED_SECONDS, MOST_MEASURED = 0.5, 100
"""Seconds of measuring steps at most, if two fit in, and their most: two short steps say little."""
LEAST_PATIENCE = 20
"""Epochs without a lower validation loss before a run with a budget of minutes ends early."""
RECORD_EVERY = 10
"""Steps between two recorded losses; all processes add up theirs."""


LENGTHENED = ("epochs", "steps", "minutes", "warmup_steps", "warmup_epochs", "progressive", "whiten")
"""Options that change if a finished run gets more epochs."""


class Trainer:
    """A run in this process: its parts, its counters, its loop.

    Each of several processes has a trainer and does the same steps; the first one writes and prints.
    """

    def __init__(
        self, run: Run, plan: Plan, model: VisionModel, task: Task, splits: Splits, placement: Placement
    ) -> None:
        self.run, self.plan, self.task, self.splits = run, plan, task, splits
        self.config = config = plan.config
        self.device, self.precision = device, precision = placement.device, placement.precision
        self.model_config, self.preprocess = model.config, preprocess_of(model)
        options, execution = config.optimization, config.execution
        self.batch_size, self.parts = int(config.option("batch_size")), placement.parts
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.module = task.module(model).to(device)
        self.average = copy.deepcopy(self.module).requires_grad_(False).eval() if options.ema != 0 else None
        if options.freeze:
            freeze_body(model)
        self.parallel = distributed.spread(self.module, execution, device, precision)
        if self.average is not None and self.parallel is self.module and distributed.world_size() > 1:
            distributed.shard(self.average, device, precision)
        self.optimizer = optimizer_of(self.module, options)
        self.augmentation, self.mixing = augmentation_of(config)

        self.room = room_for_images(device, distributed.processes_sharing(device))
        self.train_loader = self.loader(splits.train, seed=config.seed)
        if self.train_loader.crops:
            self.augmentation = self.augmentation.without_crop()
        self.val_loader = self.loader(splits.val)
        self.steps_per_epoch = self.train_loader.batches_per_epoch
        self.schedule = Schedule.of(
            options,
            self.batch_size,
            self.steps_per_epoch,
            epochs_per_validation=max(1, math.ceil(len(splits.val) / len(splits.train))),
        )
        self.compiled = execution.compile == "on"
        if self.compiled:
            compile_module(self.module)
        self.budget: TimeBudget | None = None
        self.size = model.config.image_hw  # of the next step
        self.exchange = distributed.Exchange()
        self.best_weights = BestWeights(functools.partial(self._write_model, run.best))
        self.checkpoint_writer = CheckpointWriter(run, execution.keep_checkpoints)
        self.identity = run_identity(config, self.model_config)
        self.step, self.seconds = 0, 0.0
        self.diverged = run.path / DIVERGED / "step.json"
        self.doubtful = 0  # the step up to which all are checked before they change a weight
        self.validated, self.best_step, self.best_value = 0, 0, task.monitor.worst
        self.sums: Sums = {}
        self.recorder: MetricsWriter | None = None
        self.losses = StepLosses(self._record_loss)

    def loader(self, images: ImageSet, seed: int | None = None) -> Loader:
        """Batches of a split; with a seed for training: shuffled, and cropped if workers read the images.

        Other batches are as large as the parts of a training batch.
        """
        loader = Loader(
            images,
            self.preprocess,
            self.batch_size if seed is not None else max(1, self.batch_size // self.parts),
            seed=seed,
            device=self.device,
            workers=self.config.execution.workers,
            part=(distributed.rank(), distributed.world_size()),
            # A crop before the resize would have other proportions, so the fitted picture is cropped later.
            crop_scale=1.0
            if seed is None or self.config.fit in ("pad", "squash")
            else self.config.option("crop_scale"),
            repeats=self.config.augmentation.repeats,
            balanced=seed is not None and self.config.balance.sampling == "balanced",
            streams=self.config.streams or 1,
            room=self.room,
        )
        self.room = max(0, self.room - loader.kept_bytes)
        return loader

    def known_images(self) -> Loader:
        """The training images that tell the model what is familiar, as they are."""
        train = self.splits.train
        return self.loader(train.subset(train.name, images_to_know(train)))

    def start_budget(self, minutes: float, spent: float) -> None:
        """Set the length of a run of `minutes`, of which `spent` seconds are over, by measured steps.

        Raises:
            UserError: the time is too short for a few steps, or most of it would go to measuring.
        """
        if self.config.optimization.lengths:  # resumed
            over, validations = self.schedule.progress(self.step), self.schedule.validations
            self.budget = TimeBudget(60 * minutes - spent, 0.0, validations=validations, progress=over)
            return
        began, progressive = time.monotonic(), self.config.optimization.progressive
        with self._one_thread_if_small(), torch.random.fork_rng(devices=[]):
            whole, forward = self._measured_step()
            smaller = [self._measured_step(side)[0] for side in SIDES[:-1] if progressive]
        spent += time.monotonic() - began  # with compilation, where there is any
        per_step = progressive * statistics.mean(smaller or [whole]) + (1 - progressive) * whole
        (spent, per_step) = distributed.largest(spent, per_step)
        validation, end = distributed.largest(*self._seconds_to_measure(forward))
        measuring = validation + end
        least = max(FIRST_LENGTH * per_step, measuring)
        if 60 * minutes - spent - measuring < least:
            val, test = self.splits.val, self.splits.measured
            together = 1 if self.config.fold is None else self.config.folds or 1  # they share the minutes
            share = f", shared by {together} folds," if together > 1 else ""
            raise UserError(
                f"minutes={together * minutes:g}{share} is too short: opening data and building the model "
                f"take {spent:.1f} s, measuring by {counted(len(val), 'validation image')} and "
                f"{counted(len(test), f'{test.name} image')} {measuring:.1f} s, and {FIRST_LENGTH} steps "
                f"{FIRST_LENGTH * per_step:.1f} s; set minutes to at least "
                f"{math.ceil(together * (spent + measuring + least) / 6) / 10:g}"
            )
        self.budget = TimeBudget(60 * minutes - spent - end, validation)
        self.schedule = dataclasses.replace(self.schedule, validations=self.budget.validations)
        self._set_length(0, self.budget.first_length(per_step))

    def _seconds_to_measure(self, forward: float) -> tuple[float, float]:
        """Seconds of a validation, and of all that follows the last step, at `forward` seconds per image."""
        train, val, test = self.splits.train, self.splits.val, self.splits.measured
        read = seconds_to_read(test, self.preprocess) / max(1, self.val_loader.workers)
        validation = (forward + read * (self.val_loader.kept_bytes == 0)) * len(val)
        whole = forward + read
        again, known = 0, 0
        if self.config.task == "classify":  # its calibration, and the choice of weights
            trusted = train.truth.trusted
            again = trusted + 1 + 2 * (self.config.optimization.keep == "auto")
            known = len(images_to_know(train)) if trusted else 0
        return validation, again * validation + whole * (len(test) + known)

    def _measured_step(self, side: float = 1.0) -> tuple[float, float]:
        """Seconds of a training step, and of a forward pass per image, after warming up; nothing changes."""
        train_mode(self.module, frozen=self.config.optimization.freeze)
        self.size, self.rate = resized(self.model_config, side), 0.0  # a rate of zero updates no weight
        times: list[float] = []
        count, seconds = 3, min(MEASURED_SECONDS, 0.01 * 60 * (self.config.optimization.minutes or 0))
        epochs = map(self.train_loader.epoch, itertools.repeat(0, MOST_MEASURED))
        for batch in itertools.chain.from_iterable(epochs):
            if len(times) == 2:  # a short step is measured more often, by all processes as often
                (step,) = distributed.largest(times[1])
                count = max(count, min(MOST_MEASURED, int(seconds / max(step, 1e-6))))
            if len(times) >= count:
                break
            began = time.monotonic()
            torch.manual_seed(self.config.seed)
            losses = [self._backward(part, weight, 0) for part, weight in self._parts(batch)]
            self._update()
            weight = distributed.shard_of(next(self.module.parameters()).detach())
            float(sum(losses) + weight.sum())  # waits for the device
            times.append(time.monotonic() - began)
        self.optimizer = optimizer_of(self.module, self.config.optimization)  # without moments
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.scaler.is_enabled())
        self.sums = {}
        for part in self.module.modules():
            if isinstance(part, TokenizerNorm):
                part.reset()
        return statistics.median(times[1:] or times), self._measured_forward(batch)

    @torch.no_grad()
    def _measured_forward(self, batch: Batch) -> float:
        """Seconds per image, over all processes, in which a validation computes a batch."""
        seconds, images = 0.0, 1
        autocast = torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32)
        with evaluation_mode(self.trained), eager_unless(not self.compiled), autocast:
            for part, _ in 2 * self._parts(batch)[:1]:
                examples, began = self._examples(part, 0), time.monotonic()
                float(self.task.loss(self.trained, examples)[0])  # waits for the device
                seconds, images = time.monotonic() - began, len(part.indices)
        distributed.reshard(self.trained)
        return seconds / images / distributed.world_size()

    def _set_length(self, step: int, total: int) -> None:
        """Set the length of the run from a step on, and record it."""
        self.schedule = self.schedule.correct(step, total)
        if distributed.is_first():
            lengths = [list(pair) for pair in self.schedule.lengths]
            self.run.record_options(lengths=lengths, validations=self.schedule.validations)

    def _one_thread_if_small(self) -> AbstractContextManager[None]:
        images = images_at_once(self.batch_size, self.parts)
        return suitable_threads(self.model_config, self.device, images)

    @property
    def trained(self) -> nn.Module:
        """The module with the weights to evaluate and save: their moving average if there is one."""
        return self.module if self.average is None else self.average

    @property
    def out_of_patience(self) -> bool:
        """Whether the validation loss has not fallen for so many epochs that the run ends early: those of the
        option or, with a budget of minutes and trained weights, three times those before the lowest loss.
        Those before a finished run got more epochs do not count."""
        patience = self.config.optimization.patience * self.steps_per_epoch
        if not patience and self.schedule.validations and self.config.weights is not None:
            patience = max(3 * self.best_step, LEAST_PATIENCE * self.steps_per_epoch)
        return 0 < patience <= self.validated - max(self.best_step, self.schedule.begun)

    def fit(self) -> None:
        """Train to the end of the last epoch, or until patience runs out, starting at `self.step`."""
        schedule = self.schedule
        progress = Progress(
            schedule.epochs,
            self._images_until(schedule.total(self.step)),
            self._images_until(self.step),
            uneven=self.splits.train.uneven,
            within_epochs=schedule.validations > 0,
            shown=distributed.is_first(),
        )
        self._plan(progress)
        progress.left_out(self._unreadable())
        self.recorder = self.run.write_metrics(self.step) if distributed.is_first() else None
        stopping = stop_signals(patient=distributed.world_size() > 1)
        try:
            with self._one_thread_if_small(), torch.random.fork_rng(devices=[]), stopping as stop:
                self._loop(progress, stop)
        finally:
            self.checkpoint_writer.close()
            progress.close()
            if self.recorder is not None:
                self.recorder.close()
            self.best_weights.write()

    def _loop(self, progress: Progress, stop: Stop) -> None:
        train_mode(self.module, frozen=self.config.optimization.freeze)
        saved = clock = time.monotonic()
        if self.step > self.validated and self.schedule.validates(self.step):  # where a signal stopped it
            self._validate(progress, stop)
        while self.step < self.schedule.total(self.step) and not self.out_of_patience:
            epoch, start = divmod(self.step, self.steps_per_epoch)
            batches = self.train_loader.epoch(epoch, start=start)
            for batch in until_stopped(batches, stop) if distributed.world_size() == 1 else batches:
                loss = self._training_step(batch, epoch)
                progress.advance(batch.planned)
                self.losses.read()  # of the step before, if it is recorded
                if self.step % RECORD_EVERY == 0:
                    self.losses.add(self.step, self.rate, loss)
                now = time.monotonic()
                stepped, clock = now - clock, now
                self.seconds += stepped
                ended = self.step == self.schedule.total(self.step)
                if self.schedule.validates(self.step):
                    self._validate(progress, stop)
                now = time.monotonic()
                self.seconds, clock = self.seconds + now - clock, now
                if self.budget is not None and not ended:
                    self._keep_to_budget(self.budget, stepped, progress)
                due = now - saved >= self.config.execution.checkpoint_seconds
                failed = self.checkpoint_writer.failed
                save, signum = self.exchange.largest(due or failed, stop.signum)
                if signum:
                    self._stop(int(signum))
                if save:
                    self.exchange.forget()
                    self.save()
                    saved = time.monotonic()
                if ended or self.out_of_patience:
                    break
            else:
                if stop.signum and distributed.world_size() == 1:  # while it waited for a batch
                    self._stop(stop.signum)
        self.exchange.forget()
        self.save()
        self.checkpoint_writer.wait()
        if self.budget is not None and self.seconds > 1.1 * self.budget.seconds:
            distributed.print_first(
                f"training took {self.seconds / 60:.1f} instead of {self.budget.seconds / 60:.1f} minutes: "
                "the machine became slower near the end"
            )

    def _stop(self, signum: int, cause: BaseException | None = None) -> NoReturn:
        self.exchange.forget()
        self.save()
        self.checkpoint_writer.wait()
        raise Interrupted(self.run.path, signum) from cause

    def _keep_to_budget(self, budget: TimeBudget, stepped: float, progress: Progress) -> None:
        """Count a step of so many seconds, and correct the length of the run if that is due."""
        budget.stepped(stepped, self.schedule.side(self.step - 1) ** 2)
        total = budget.correction(self.schedule, self.step, self.seconds)
        if total is not None:
            (total,) = map(int, distributed.largest(total))
            self._set_length(self.step, total)
            self._plan(progress)

    def _plan(self, progress: Progress) -> None:
        schedule = self.schedule
        total = self._images_until(schedule.total(self.step))
        left = None if self.budget is None else self.budget.seconds - self.seconds
        progress.plan(schedule.epochs, total, schedule.slowdown(self.step), left)

    def _images_until(self, step: int) -> int:
        """The number of images of the steps before one."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return epoch * len(self.train_loader) + batch * self.batch_size

    def _training_step(self, batch: Batch, epoch: int) -> Tensor:
        """Forward, backward, update; returns this process's share of the global batch's mean loss."""
        # All randomness is a function of the seed and the counters.
        draw = self.step * distributed.world_size() + distributed.rank()
        torch.manual_seed(step_seed(self.config.seed, draw))
        schedule = self.schedule
        self.rate = schedule.rate(self.step)
        self.size = resized(self.model_config, schedule.side(self.step))
        parts = self._parts(batch)
        losses = []
        for number, (part, weight) in enumerate(parts):
            with distributed.reducing(self.parallel, number == len(parts) - 1):
                losses.append(self._backward(part, weight, epoch))
        loss = sum(losses[1:], start=losses[0]) if losses else torch.zeros((), device=self.device)
        if self.step < self.doubtful:
            self._check_step(loss, batch, epoch)
        if parts:  # otherwise no image of the batch could be read
            self._update()
        self.step += 1
        return loss

    def _check_step(self, loss: Tensor, batch: Batch, epoch: int) -> None:
        """Check a step of a diverged run before it changes a weight; record the first that is not finite."""
        values = [loss, *(weight.grad for weight in self.module.parameters() if weight.grad is not None)]
        # Scaled gradients of fp16 that overflow are no fault: the scaler leaves the step out.
        finite = all(
            bool(value.isfinite().all()) for value in values[: 1 if self.scaler.is_enabled() else None]
        )
        (broken,) = distributed.largest(not finite)
        if broken:
            state = model_state(self.module)  # by all processes, as the indices
            indices = list(itertools.chain(*distributed.gather(batch.indices.tolist())))
            if distributed.is_first():
                self._write_model(self.run.path / DIVERGED, state)
                images = [image_name(self.splits.train.sources[index], None) for index in indices]
                known = {"epoch": epoch, "seed": self.config.seed, "indices": indices, "images": images}
                self._record_diverged(self.step + 1, **known)
            self._check_finite(math.nan, "the loss or a gradient", step=self.step + 1)
        elif self.step + 1 == self.doubtful and distributed.is_first():
            shutil.rmtree(self.diverged.parent)

    def _parts(self, batch: Batch) -> list[tuple[Batch, float]]:
        """Parts for gradient accumulation, as many in each process, with their shares of the global batch."""
        # Shares of the planned images: the weight of an image does not depend on unreadable others.
        split = batch.split(self.parts) if len(batch.indices) else []
        parts = [(part, len(part.indices) / batch.planned) for part in split]
        if distributed.world_size() > 1:  # for collective operations, if need be with a black image
            pixels, targets = (rows.new_zeros(1, *rows.shape[1:]) for rows in (batch.pixels, batch.targets))
            black = dataclasses.replace(batch, pixels=pixels, targets=targets, indices=np.zeros(1, np.int64))
            parts += [(black, 0.0)] * (self.parts - len(parts))
        return parts

    def _backward(self, part: Batch, weight: float, epoch: int) -> Tensor:
        """Add a part's gradients, weighted by its share of the global batch; returns the weighted loss."""
        examples = self._examples(part, epoch)
        with (
            eager_unless(not self.compiled or len(part.indices) in self._full_parts),
            torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32),
        ):
            loss, sums = self.task.loss(self.parallel, examples)
        # The gradients are averaged over the processes, hence the factor.
        self.scaler.scale(loss * (weight * distributed.world_size())).backward()
        images = 1.0 if weight else 0.0
        self.sums = {name: self.sums.get(name, 0.0) + images * value for name, value in sums.items()}
        return loss.detach() * weight

    @functools.cached_property
    def _full_parts(self) -> frozenset[int]:
        """The numbers of images in this process's parts of a full batch."""
        cuts = even_cuts(self.batch_size, distributed.world_size())
        share = cuts[distributed.rank() + 1] - cuts[distributed.rank()]
        return frozenset(end - start for start, end in itertools.pairwise(even_cuts(share, self.parts)))

    def _examples(self, part: Batch, epoch: int) -> Examples:
        """Augment, a function of (seed, epoch, index), mix, a function of (seed, step), and resize."""
        seed, targets = self.config.seed, part.targets
        images = self.augmentation(part.pixels, part.indices, seed=seed, epoch=epoch)  # (B, C, H, W)
        if self.mixing is not None:
            targets = self.splits.train.truth.shares(targets)  # (B, K)
            images, targets = self.mixing(images, targets, seed=seed, step=self.step)
        if images.shape[2:] != self.size:
            images = F.interpolate(images, self.size, mode="bilinear", antialias=True)
        return Examples(
            images=images, labels=part.targets, targets=targets, indices=part.indices, seed=seed, epoch=epoch
        )

    def _update(self) -> None:
        """Clip the gradients, step, update the average."""
        options = self.config.optimization
        if options.clip_grad:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), options.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * group["lr_scale"]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None:
            update_average(self.average, self.module, self.schedule.average_decay, self.step)

    def _record_loss(self, step: int, rate: float, loss: Tensor) -> None:
        """Check and record the loss of a step, this process's share of it."""
        value = float(distributed.sum_over_processes({"loss": loss})["loss"])
        self._check_finite(value, step=step, rate=rate)
        self._record("step", step, loss=value, lr=rate)

    def _record(self, kind: str, step: int, **values: float) -> None:
        """Record values of a step, in the first process."""
        if self.recorder is not None:
            self.recorder.record(kind, step, values)

    def _check_finite(
        self, loss: float, what: str = "the loss", *, step: int | None = None, rate: float | None = None
    ) -> None:
        """Reject a value that is not finite, of the last step unless another is given."""
        if math.isfinite(loss):
            return
        step, rate = self.step if step is None else step, self.rate if rate is None else rate
        self.checkpoint_writer.close()  # the newest one may still be on its way to the disk
        saved = checkpoints(self.run.path)
        newest = f"its newest checkpoint is {saved[-1].name}" if saved else "it has no checkpoint yet"
        so_far = f"The run so far is in {self.run.path}; {newest}"
        if self.schedule.begun:
            so_far = f"The run in {self.run.path} is what it was before these epochs"
        elif (known := self._recorded_diverged()).get("step") == step and "images" in known:
            so_far += f"; the model before step {step:,} and its images are in {self.diverged.parent}"
        else:
            if distributed.is_first():
                shutil.rmtree(self.diverged.parent, ignore_errors=True)  # of another step
                self._record_diverged(step)
            resume = f"vitascope train --resume {shlex.quote(self.run.ref)}"
            so_far += f"; `{resume}` finds the first such step and its images"
        raise DivergenceError(
            f"{what} is {loss} at step {step:,}, with learning rate {rate:.3g}: training has "
            f"diverged; try a lower lr than {self.config.optimization.lr:g}, a longer warmup_epochs, "
            f"clip_grad=1 or precision=fp32. {so_far}"
        )

    def _record_diverged(self, step: int, **known: Any) -> None:
        """Write down a step, from 1, whose loss is not finite, and what is known of it."""
        with explaining_failure(self.diverged, "the step that diverged", to_resume(self.run.path)):
            make_folder(self.diverged.parent)
            write_json(self.diverged, {"step": step, **known})

    def _recorded_diverged(self) -> dict[str, Any]:
        """What is written down of that step; empty for a run that has not diverged."""
        if not self.diverged.is_file():
            return {}
        with explaining_faults(self.diverged, "remove it, and resume the run again"):
            return check_record(parse_json(self.diverged.read_text("utf-8")), {"step": int}, ("step",))

    def epoch_of(self, step: int) -> float:
        """The number of epochs that end with a step; a fraction within an epoch."""
        whole, rest = divmod(step, self.steps_per_epoch)
        return whole if rest == 0 else float(f"{step / self.steps_per_epoch:.4g}")

    def _validate(self, progress: Progress, stop: Stop) -> None:
        """Validate, record, and save the weights if they are the best so far.

        A signal stops at once, with a checkpoint; the resumed run begins with this validation.
        """
        self.losses.read()
        epoch = self.epoch_of(self.step)
        sums = distributed.sum_over_processes(self.sums)
        means = {name: float(total / sums["count"]) for name, total in sums.items() if name != "count"}
        self._check_finite(means["loss"])
        began = time.monotonic()
        try:
            alone = interruptible(stop) if distributed.world_size() == 1 else nullcontext()
            with alone, eager_unless(not self.compiled):
                val = self.task.validate(self.trained, self.val_loader, self.precision)
        except KeyboardInterrupt as error:
            if not stop.signum:
                raise
            self._stop(stop.signum, error)
        distributed.reshard(self.trained)
        self.sums, self.validated = {}, self.step
        validated = time.monotonic() - began
        self._check_finite(val["loss"], "the validation loss")
        progress.left_out(self._unreadable())
        if self.step < self.schedule.total(self.step):
            self._plan(progress)
        progress.epoch(epoch, means["loss"], val)
        self._record(
            "epoch",
            self.step,
            epoch=epoch,
            **{f"train_{name}": value for name, value in means.items()},
            **{f"val_{name}": value for name, value in val.items()},
            images_per_second=float(f"{progress.images_per_second:.4g}"),
            seconds=round(self.seconds + validated, 2),
        )
        monitor = self.task.monitor
        (value,) = distributed.largest(val[monitor.name])  # rounding may differ, and all must decide alike
        if monitor.better(value, self.best_value):
            self.best_value, self.best_step = value, self.step
            if self.config.optimization.keep != "last" and (state := self._whole_state()) is not None:
                self.best_weights.take(state)
        if self.budget is not None:
            self.budget.validation = time.monotonic() - began
        if self.out_of_patience and self.step < self.schedule.total(self.step):
            best = self.epoch_of(self.best_step)
            words = monitor.best_in_words(self.best_value)
            progress.note(f"stopped after epoch {epoch:g}: {words}, was that of epoch {best:g}")
            self._record("stop", self.step, epoch=epoch, best_epoch=best)

    def _unreadable(self) -> Iterator[str]:
        """The reasons for the unreadable images that the processes have read so far."""
        return itertools.chain(
            *distributed.gather(self.train_loader.faults.left_out + self.val_loader.faults.left_out)
        )

    def save_model(self, folder: Path) -> None:
        """Save the trained model to a model folder, also if it is sharded or has adapters."""
        if (state := self._whole_state()) is not None:
            self._write_model(folder, state)

    def _whole_state(self) -> Mapping[str, Tensor] | None:
        """The trained weights in the first process, from all of them; None in the others."""
        state = model_state(self.trained)
        return state if distributed.is_first() else None

    def _write_model(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a model folder of trained weights."""
        with torch.device("meta"):  # drawing random weights takes time
            model = build(self.model_config)
        model.preprocess = self.preprocess
        plain = without_norms(merged(state))
        own = {name.removeprefix("body."): value for name, value in plain.items()}
        model.load_state_dict({name: own[name] for name in model.state_dict()}, assign=True)
        with explaining_failure(folder, "the model", to_resume(self.run.path)):
            save_pretrained(model, folder)

    def save(self) -> None:
        """Begin to write a checkpoint with everything that the next step depends on."""
        self.losses.read()
        (broken,) = distributed.largest(not all_finite(self.module))
        if broken:
            self._check_finite(math.nan, "a weight")
        self.best_weights.write()  # which the checkpoint refers to
        state: dict[str, Any] = {
            "identity": self.identity,
            "model": model_state(self.module, whole=False),
            "average": None if self.average is None else model_state(self.average, whole=False),
            "optimizer": optimizer_state(self.module, self.optimizer),
            "scaler": self.scaler.state_dict(),
            "sums": self.sums if distributed.world_size() == 1 else distributed.sum_over_processes(self.sums),
            "best_value": self.best_value,
            "best_step": self.best_step,
            "validated": self.validated,
            "seconds": self.seconds,
        }
        self.checkpoint_writer.save(self.step, state)

    def restore(self, checkpoint: tuple[int, dict[str, Any]] | None) -> None:
        """Continue from a checkpoint (step, state), if there is one, or from a finished run."""
        begun, run = self.schedule.begun, self.run
        self.doubtful = distributed.by_first(lambda: self._recorded_diverged().get("step", 0))
        if checkpoint is None:
            self.step = self.validated = self.best_step = begun
            self.seconds = distributed.by_first(lambda: seconds_before(run)) if begun else 0.0
        else:
            self._restore(*checkpoint)
        # New epochs begin without it, or SIGKILL came while later ones were written: on a GPU, or in
        # `minutes`, those may never be found again.
        lost = self.config.optimization.keep != "last" and not has_model(run.best)
        if distributed.by_first(lambda: lost):
            self.best_value = self.task.monitor.worst
        if begun and distributed.by_first(lambda: lost or checkpoint is None):
            before = distributed.by_first(lambda: best_before(run, self.task.monitor))
            self.best_value, self.best_step = before

    def _restore(self, step: int, state: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.step = step
        before_more_epochs = self.schedule.begun == self.step
        check_identity(state["identity"], self.identity, LENGTHENED if before_more_epochs else ())
        restore_model(self.module, state["model"])
        if self.average is not None:
            restore_model(self.average, state["average"])
        restore_optimizer(self.module, self.optimizer, state["optimizer"])
        if state["scaler"]:  # empty if the run has had another precision so far
            self.scaler.load_state_dict(state["scaler"])
        self.best_value, self.seconds = state["best_value"], state["seconds"]
        self.best_step, self.validated = state["best_step"], state["validated"]
        first = distributed.is_first()
        self.sums = {
            name: value.to(self.device) if first else torch.zeros((), device=self.device)
            for name, value in state["sums"].items()
        }


def augmentation_of(config: TrainConfig) -> tuple[Augmentation, Mixing | None]:
    """The augmentation of each image, and the mixing of images if there is any; every option has a value."""
    options, randaugment = config.augmentation, None
    if options.randaugment:
        drawn = {"magnitude": options.magnitude, "probability": options.operation_probability}
        randaugment = RandAugment(num_ops=options.randaugment, **drawn)
    named = {field.name for field in dataclasses.fields(Augmentation)} & GROUP_OF.keys()
    values = {name: config.option(name) for name in named} | {"randaugment": randaugment}
    mixes = options.mixup or options.cutmix
    return Augmentation(**values), Mixing(mixup=options.mixup, cutmix=options.cutmix) if mixes else None
