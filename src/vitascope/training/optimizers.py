"""Optimizers with their parameter groups, and the moving average of the weights.

AdamW and SGD are torch's, without its compiler, whose import takes longer than a step.

torch wraps methods of its optimizers to keep them out of compiled graphs, and the wrappers import the
compiler. A run compiles its model at most, never its optimizer, so these have the methods without wrappers.

Muon is momentum whose update of a matrix is made orthogonal (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon).
"""

import math
import re
from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitascope.errors import UserError
from vitascope.models.attention import SelfAttention
from vitascope.models.encoder import SwiGLU
from vitascope.models.hardware import has_bf16
from vitascope.models.heads import AttentionPool
from vitascope.training.options.groups import Optimization


class EagerOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers."""

    add_param_group: ClassVar[Any] = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad: ClassVar[Any] = unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(EagerOptimizer, torch.optim.AdamW):
    """Loshchilov and Hutter 2019."""

    step: ClassVar[Any] = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class SGD(EagerOptimizer, torch.optim.SGD):
    """Gradient descent with momentum."""

    step: ClassVar[Any] = torch.no_grad()(unwrap(torch.optim.SGD.step))


SGD_MOMENTUM, MUON_MOMENTUM = 0.9, 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that brings singular values to between 0.7 and 1.2 in `ITERATIONS` steps."""
ITERATIONS = 5


class Muon(AdamW):
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
        """Update all parameters; the gradients of those with Muon are overwritten and released."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._step_matrices()
        super().step()  # skips parameters without a gradient
        return loss

    def _step_matrices(self) -> None:
        """Update the parameters with Muon, of all groups together: few operations, however many there are."""
        groups = [
            (group, [parameter for parameter in group["params"] if parameter.grad is not None])
            for group in self.param_groups
            if group["stacked"]
        ]
        parameters = [parameter for _, members in groups for parameter in members]
        if not parameters:
            return
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        momenta = [parameter.grad for parameter in parameters]
        torch._foreach_lerp_(buffers, momenta, 1 - MUON_MOMENTUM)
        torch._foreach_lerp_(momenta, buffers, MUON_MOMENTUM)  # Nesterov's
        stacked = [group["stacked"] for group, members in groups for _ in members]
        updates = orthogonal_updates(momenta, stacked)
        # Groups that differ only in how many matrices a parameter stacks are updated together.
        alike: dict[tuple[float, float], tuple[list[Tensor], list[Tensor]]] = {}
        for group, members in groups:
            mine, updates = updates[: len(members)], updates[len(members) :]
            weights, changes = alike.setdefault((group["lr"], group["weight_decay"]), ([], []))
            weights += members
            changes += mine
        for (lr, weight_decay), (weights, changes) in alike.items():
            torch._foreach_mul_(weights, 1 - lr * weight_decay)
            torch._foreach_add_(weights, changes, alpha=-lr)
        for parameter in parameters:
            parameter.grad = None


def orthogonal_updates(wholes: Sequence[Tensor], stacked: Sequence[int]) -> list[Tensor]:
    """Orthogonal matrices of AdamW's size in place of parameters (rows, ...) of stacked matrices, one below
    the other. Matrices with the same sides are multiplied together.

    Computed in bfloat16 where the device multiplies it, else in float32; returned in the dtype given.
    """
    by_sides: dict[tuple[int, int], list[int]] = {}
    for number, (whole, count) in enumerate(zip(wholes, stacked, strict=True)):
        short, long = sorted((len(whole) // count, whole[0].numel()))
        by_sides.setdefault((short, long), []).append(number)
    updates = [*wholes]
    for (short, long), numbers in by_sides.items():
        matrices = [wholes[n].reshape(stacked[n], -1, wholes[n][0].numel()) for n in numbers]
        tall = [part.shape[1] > short for part in matrices]
        X = torch.cat([part.mT if is_tall else part for part, is_tall in zip(matrices, tall, strict=True)])
        dtype = torch.bfloat16 if has_bf16(X.device) else torch.float32
        results = orthogonal(X.to(dtype), 0.2 * math.sqrt(long)).to(X.dtype)  # AdamW's: 0.2 to 0.4
        parts = results.split([len(part) for part in matrices])
        for n, part, is_tall in zip(numbers, parts, tall, strict=True):
            updates[n] = (part.mT if is_tall else part).reshape(wholes[n].shape)
    return updates


def orthogonal(X: Tensor, size: float = 1.0) -> Tensor:
    """Matrices (n, rows, columns), rows <= columns, with singular values near `size`, by Newton-Schulz."""
    norms = torch.stack(torch._foreach_norm(X.unbind()))
    X = X / norms.clamp_min_(1e-7).view(-1, 1, 1)  # no singular value above 1
    a, b, c = COEFFICIENTS
    for scale in (*[1.0] * (ITERATIONS - 1), size):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A^2
        X = torch.baddbmm(X, B, X, beta=scale * a, alpha=scale)  # a X + B X
    return X


# Parameters that are tokens or positions, which have no weight decay.
_TOKENS = ("class_token", "distillation_token", "registers", "mask_token", "positions.", "pool.query")
_EMBEDDING = (*_TOKENS[:-1], "patch_embedding.", "embedding_norm.")


def optimizer_of(module: nn.Module, options: Optimization) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), Muon, or SGD with momentum; only matrices have weight decay.

    Muon trains hidden matrices: not the layer that reads pixels, the output layers, tokens and positions.

    Layer-wise decay lowers a group's `lr_scale` towards the image (Clark et al. 2020, Bao et al. 2022).
    """
    blocks = [re.search(r"(?:^|\.)encoder\.blocks\.(\d+)\.", name) for name, _ in module.named_parameters()]
    depth = max((int(found[1]) + 1 for found in blocks if found), default=0)
    if options.layer_decay != 1 and not depth:
        raise UserError("layer_decay needs a Vision Transformer: this model has no blocks; leave it at 1")
    matrices = hidden_matrices(module) if options.optimizer == "muon" else {}
    groups: dict[tuple[bool, float, int], list[nn.Parameter]] = {(True, 1.0, 0): [], (False, 1.0, 0): []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            stacked = matrices.get(name, 0)
            name = name.removeprefix("body.")  # the model's name in the module of a task
            decayed = parameter.ndim > 1 and not name.startswith(_TOKENS)
            scale = options.layer_decay ** (depth + 1 - layer_of(name, depth))
            groups.setdefault((decayed, scale, stacked), []).append(parameter)
    parameters = [
        {"params": found, "weight_decay": options.weight_decay * decayed, "lr_scale": scale}
        | ({"stacked": stacked} if options.optimizer == "muon" else {})
        for (decayed, scale, stacked), found in groups.items()
        if found
    ]
    if options.optimizer == "muon":
        return Muon(parameters, lr=options.lr)
    if options.optimizer == "sgd":
        # foreach, because fused does not support shards
        return SGD(parameters, lr=options.lr, momentum=SGD_MOMENTUM, foreach=True)
    return AdamW(parameters, lr=options.lr, fused=True)


def hidden_matrices(module: nn.Module) -> dict[str, int]:
    """The weights that Muon trains, by name, with the number of matrices that each stacks."""
    stacked_matrices: dict[str, int] = {}
    pixels = next((path for path, part in module.named_modules() if isinstance(part, nn.Conv2d)), None)
    for path, part in module.named_modules():
        inside = f"{path}." if path else ""
        if isinstance(part, SelfAttention):
            stacked_matrices[f"{inside}qkv.weight"] = 3
        elif isinstance(part, AttentionPool):
            stacked_matrices[f"{inside}kv.weight"] = 2
        elif isinstance(part, SwiGLU):
            stacked_matrices[f"{inside}fc1.weight"] = 2
        elif isinstance(part, nn.Linear | nn.Conv2d) and path != pixels:
            stacked_matrices.setdefault(f"{inside}weight", 1)
    return {
        name: stacked
        for name, stacked in stacked_matrices.items()
        if not name.removeprefix("body.").startswith("head.") and module.get_parameter(name).requires_grad
    }


def layer_of(name: str, depth: int) -> int:
    """The layer of a parameter: 0 before the blocks, 1 to `depth` in them, `depth` + 1 after them."""
    block = re.match(r"encoder\.blocks\.(\d+)\.", name)
    if block:
        return int(block[1]) + 1
    return 0 if name.startswith(_EMBEDDING) else depth + 1


def freeze_body(model: nn.Module) -> None:
    """Freeze all parameters but those of the head."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))


def train_mode(model: nn.Module, *, frozen: bool) -> None:
    """Set training mode; for a frozen body, in the head alone."""
    model.train()
    if frozen:
        for name, part in model.named_children():
            part.train(name == "head")


def average_decay(decay: float, step: int) -> float:
    """The decay at a step, counted from 0, with the warm-up of TensorFlow's `ExponentialMovingAverage`."""
    return min(decay, (1 + step) / (10 + step))  # else a short run would end close to its initial weights


def update_average(average: nn.Module, module: nn.Module, decay: float, step: int) -> None:
    """Update the moving average of the weights in place (Polyak and Juditsky 1992); step 0 copies them."""
    pairs = zip(average.parameters(), module.parameters(), strict=True)
    # Of a frozen body, the average is what it is.
    trained = [pair for pair in pairs if pair[1].requires_grad]
    statistics = list(zip(average.buffers(), module.buffers(), strict=True))  # of norms; never sharded
    with torch.no_grad():
        for theirs, ours in (map(list, zip(*pairs, strict=True)) for pairs in (trained, statistics) if pairs):
            if step == 0:
                for mine, new in zip(theirs, ours, strict=True):
                    mine.copy_(new)
            else:
                get_ema_multi_avg_fn(average_decay(decay, step))(theirs, ours, step)
