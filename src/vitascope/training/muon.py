"""Muon: momentum whose update of a matrix is made orthogonal (Jordan et al. 2024).

https://kellerjordan.github.io/posts/muon
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from vitascope.model.hardware import has_bf16

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that brings singular values to between 0.7 and 1.2 in `ITERATIONS` steps."""
ITERATIONS = 5


class Muon(torch.optim.AdamW):
    """Muon for hidden matrices, AdamW for all other parameters.

    A group with `stacked` >= 1 has Muon: its parameters (rows, ...) consist of that many matrices, one below
    the other, such as queries, keys and values; a kernel is a matrix of (outputs, inputs * h * w). A group
    with `stacked` = 0 has AdamW. The update is scaled to AdamW's typical size (Liu et al. 2025, "Muon is
    Scalable for LLM Training", equation 4), so that both share a learning rate and a weight decay.

    `torch.optim.Muon` takes no kernels and no stacked matrices, and always multiplies in bfloat16, which most
    CPUs emulate.
    """

    def __init__(self, params: list[dict[str, Any]], lr: float) -> None:
        super().__init__(params, lr=lr, fused=True)
        self._step_supports_amp_scaling = False  # the scaler has to unscale the gradients of both

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's needs a count of steps for each

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; the gradients of those with Muon are released."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if group["stacked"]:
                self._step_matrices(group)
        super().step()  # skips parameters without a gradient
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group; matrices of the same shape are multiplied together."""
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(buffer, MOMENTUM)  # Nesterov's
            # of sharded parameters (FSDP2), each process gathers the whole matrices and computes all updates
            whole = update.full_tensor() if isinstance(update, DTensor) else update
            matrices = whole.reshape(group["stacked"], len(whole) // group["stacked"], -1)
            by_shape.setdefault((matrices.shape[1], matrices.shape[2]), []).append((parameter, matrices))
            parameter.grad = None
        for (rows, columns), found in by_shape.items():
            updates = orthogonal(torch.cat([matrices for _, matrices in found]))
            size = 0.2 * math.sqrt(max(rows, columns))  # AdamW's root mean square of about 0.2 to 0.4
            for (parameter, _), update in zip(found, updates.split(group["stacked"]), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                update = update.reshape(parameter.shape)
                if isinstance(parameter, DTensor):
                    mesh = parameter.device_mesh
                    update = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim)
                parameter.add_(update, alpha=-group["lr"] * size)


def orthogonal(matrices: Tensor) -> Tensor:
    """Replace the singular values of matrices (n, rows, columns) by about 1, by Newton-Schulz iterations.

    Computed in bfloat16 where the device multiplies it, else in float32; returned in the dtype given.
    """
    dtype = torch.bfloat16 if has_bf16(matrices.device) else torch.float32
    X = matrices.to(dtype)
    tall = X.shape[1] > X.shape[2]
    if tall:
        X = X.mT
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        A = X @ X.mT  # (n, r, r) with r the smaller side
        X = a * X + (b * A + c * A @ A) @ X
    return (X.mT if tall else X).to(matrices.dtype)
