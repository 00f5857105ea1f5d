"""Copies to a device, from page-locked memory, while the device computes."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def is_asynchronous(device: torch.device) -> bool:
    """Whether a device computes and copies while this process goes on."""
    return device.type == "cuda"


def to_device(values: npt.NDArray[Any] | Tensor, device: torch.device, *, reused: bool = False) -> Tensor:
    """Values of this process on a device; a GPU copies them from page-locked memory while it computes.

    On a CPU they share the memory of `values`, unless these are `reused` for others afterwards.
    """
    host = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if not is_asynchronous(device):
        return host.to(device, copy=reused)
    return torch.empty_like(host, pin_memory=True).copy_(host).to(device, non_blocking=True)
