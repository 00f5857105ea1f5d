"""State dicts of a model and its optimizer, the same for one process, DDP and FSDP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from vitascope.errors import UserError
from vitascope.training.distributed import world_size

_WHOLE = StateDictOptions(full_state_dict=True, strict=True)


def model_state(module: nn.Module, *, whole: bool = True) -> dict[str, Any]:
    """Tensors by the names of the unwrapped module."""
    offload = whole and world_size() > 1
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=whole, cpu_offload=offload))


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name, with each process's own shards.

    Empty before the first step: torch would take a step to create the state, which would be counted.
    """
    return {**get_optimizer_state_dict(module, optimizer)} if optimizer.state else {}


def restore_model(module: nn.Module, state: dict[str, Any]) -> None:
    """Load full tensors into a module; every process passes them."""
    missing = sorted(module.state_dict().keys() - state.keys())
    if missing:
        raise UserError(f"the checkpoint has no {', '.join(missing)}; start a new run")
    set_model_state_dict(module, state, options=_WHOLE)


def restore_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the full state into an optimizer; an empty state leaves it as it is."""
    if state:
        set_optimizer_state_dict(module, optimizer, state, options=_WHOLE)


def all_finite(module: nn.Module) -> bool:
    """Whether all parameters in this process are finite."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    return all(bool(torch.isfinite(parameter).all()) for parameter in local)
