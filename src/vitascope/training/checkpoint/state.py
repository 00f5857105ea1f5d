"""A run's tensors by name, the same whether the model is in one process, in copies or in shards."""

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


def model_state(module: nn.Module, *, whole: bool = True) -> dict[str, Any]:
    """Tensors by the names of the unwrapped module.

    Args:
        module: in any process layout.
        whole: full tensors, on the CPU and in the first process only where there are several; else each
            process's own shards.
    """
    offload = whole and world_size() > 1
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=whole, cpu_offload=offload))


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by the parameters' names; each process's own shards.

    Empty before its first step: torch would take one to have something to save, which counts as a step.
    """
    if not optimizer.state:
        return {}
    return {**get_optimizer_state_dict(module, optimizer)}


def restore_model(module: nn.Module, state: dict[str, Any]) -> None:
    """Give a module the full tensors that every process has read.

    Raises:
        UserError: some are missing: torch would leave those parameters as they are, and say nothing.
    """
    missing = sorted(module.state_dict().keys() - state.keys())
    if missing:
        raise UserError(f"the checkpoint has no {', '.join(missing)}: another version wrote it; start anew")
    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, strict=True))


def restore_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give an optimizer the full state that every process has read; an empty one leaves it as it is."""
    if not state:
        return
    set_optimizer_state_dict(
        module, optimizer, state, options=StateDictOptions(full_state_dict=True, strict=True)
    )


def all_finite(module: nn.Module) -> bool:
    """Whether every parameter that this process holds is a number."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    return all(bool(torch.isfinite(parameter).all()) for parameter in local)
