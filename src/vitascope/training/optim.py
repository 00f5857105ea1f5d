"""The optimizer with the usual exceptions from weight decay, the schedule, and the running average."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitascope.errors import UserError
from vitascope.report.wording import counted
from vitascope.training.options import Optimization

# Parameters that are tokens or places, not matrices that multiply.
_STATES = ("class_token", "distillation_token", "registers", "mask_token", "positions.", "pool.query")
_EMBEDDING = (*_STATES[:-1], "patch_embedding.", "embedding_norm.")
MOMENTUM = 0.9


def optimizer_of(module: nn.Module, options: Optimization) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) or SGD with momentum, over whatever is not frozen.

    Weight decay is for matrices only. Each group has a factor `lr_scale`, which layer-wise decay makes
    smaller towards the image (Clark et al. 2020, ELECTRA; Bao et al. 2022, BEiT).

    Raises:
        UserError: layer-wise decay for a model that has no blocks.
    """
    depth = depth_of(name for name, _ in module.named_parameters())
    if options.layer_decay != 1 and not depth:
        raise UserError("layer_decay is for Vision Transformers: this model has no blocks; leave it at 1")
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): [], (False, 1.0): []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            name = name.removeprefix("body.")  # a task's module holds the model by this name
            decayed = parameter.ndim > 1 and not name.startswith(_STATES)
            scale = options.layer_decay ** (depth + 1 - layer_of(name, depth))
            groups.setdefault((decayed, scale), []).append(parameter)
    parameters = [
        {"params": found, "weight_decay": options.weight_decay * decayed, "lr_scale": scale}
        for (decayed, scale), found in groups.items()
        if found
    ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=options.lr, momentum=MOMENTUM, foreach=True
        )  # fused takes no shards
    return torch.optim.AdamW(parameters, lr=options.lr, fused=True)


def depth_of(names: Iterable[str]) -> int:
    """How many encoder blocks the parameters of these names are of."""
    blocks = [re.search(r"(?:^|\.)encoder\.blocks\.(\d+)\.", name) for name in names]
    return max((int(found[1]) + 1 for found in blocks if found), default=0)


def layer_of(name: str, depth: int) -> int:
    """Which layer a parameter lies in: 0 before the blocks, 1 to `depth` in them, `depth` + 1 after them."""
    block = re.match(r"encoder\.blocks\.(\d+)\.", name)
    if block:
        return int(block[1]) + 1
    return 0 if name.startswith(_EMBEDDING) else depth + 1


def freeze_body(model: nn.Module) -> None:
    """Leave nothing to train but the head, on features without dropout."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))


def train_mode(model: nn.Module, *, frozen: bool) -> None:
    """Training mode; of a frozen model, for the head alone."""
    model.train()
    if frozen:
        for name, part in model.named_children():
            part.train(name == "head")


def peak_rate(options: Optimization, batch_size: int) -> float:
    """The largest rate of the run: `lr`, scaled in proportion to the batch where it is meant for another."""
    return options.lr if options.lr_batch is None else options.lr * batch_size / options.lr_batch


def learning_rate(options: Optimization, batch_size: int, step: int, steps_per_epoch: int) -> float:
    """The rate of a step, counted from 0: linear warm-up to the peak, then down to 0 at the end.

    Raises:
        UserError: a warm-up in steps that would not end within the run.
    """
    peak = peak_rate(options, batch_size)
    total = options.epochs * steps_per_epoch
    if options.warmup_steps is not None and options.warmup_steps >= total:
        epochs = counted(options.epochs, "epoch")
        raise UserError(
            f"the warm-up of {options.warmup_steps:,} steps would not end: the run has {total:,} "
            f"({epochs} of {steps_per_epoch}); give a smaller --warmup-steps or more --epochs"
        )
    warmup = options.warmup_steps
    if warmup is None:
        length = options.epochs / 20 if options.warmup_epochs is None else options.warmup_epochs
        warmup = min(round(length * steps_per_epoch), total - 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    passed = (step - warmup) / (total - warmup)
    if options.schedule == "constant":
        return peak
    return (
        peak * (1 - passed) if options.schedule == "linear" else peak * 0.5 * (1 + math.cos(math.pi * passed))
    )


def average_decay(decay: float, step: int) -> float:
    """The running average's decay at a step, counted from 0: min(decay, (1 + step) / (10 + step)).

    With the full decay from the first step on, a run much shorter than 1 / (1 - decay) steps would end with
    an average that has hardly left its first weights. With this warm-up, that of TensorFlow's
    `ExponentialMovingAverage` with `num_updates`, it covers about the last tenth of the steps so far.
    """
    return min(decay, (1 + step) / (10 + step))


def update_average(average: nn.Module, module: nn.Module, decay: float, step: int) -> None:
    """One step of the exponential moving average of the weights (Polyak and Juditsky 1992, for decay 0.9999).

    Args:
        average: the averaged weights, updated in place.
        module: the weights of this step.
        decay: the largest decay, in [0, 1); see `average_decay`.
        step: optimizer steps before this one. The first, at `step` 0, copies the weights.
    """
    theirs, ours = list(average.parameters()), list(module.parameters())
    with torch.no_grad():
        if step == 0:
            for mine, new in zip(theirs, ours, strict=True):
                mine.copy_(new)
        else:
            get_ema_multi_avg_fn(average_decay(decay, step))(theirs, ours, step)
