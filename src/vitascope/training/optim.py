"""AdamW with the usual exceptions from weight decay, the schedule, and the running average."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vitascope.training.recipes import TrainConfig

# Parameters that are tokens or places, not matrices that multiply.
_STATES = ("class_token", "distillation_token", "registers", "positions.", "pool.query")


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019): decay on weight matrices only."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (decayed if parameter.ndim > 1 and not name.startswith(_STATES) else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, fused=True)


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of a step, counted from 0: linear warm-up to `config.lr`, then a cosine to 0 at the end."""
    total = config.epochs * steps_per_epoch
    warmup = min(round(config.warmup_epochs * steps_per_epoch), total - 1)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def running_average(model: nn.Module, decay: float) -> AveragedModel:
    """Exponential moving average of the weights; the first update copies them."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
