"""The optimizer with its parameter groups, and the moving average of the weights."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitascope.errors import UserError
from vitascope.model.attention import SelfAttention
from vitascope.model.encoder import SwiGLU
from vitascope.model.heads import AttentionPool
from vitascope.options.groups import Optimization
from vitascope.training.optimizers import SGD, AdamW, Muon

# Parameters that are tokens or positions, which have no weight decay.
_TOKENS = ("class_token", "distillation_token", "registers", "mask_token", "positions.", "pool.query")
_EMBEDDING = (*_TOKENS[:-1], "patch_embedding.", "embedding_norm.")
MOMENTUM = 0.9


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
    if options.optimizer == "muon" and not matrices:
        raise UserError(
            "optimizer muon trains hidden matrices, and none is trained here: use the optimizer adamw"
        )
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
        | ({"stacked": stacked} if matrices else {})
        for (decayed, scale, stacked), found in groups.items()
        if found
    ]
    if options.optimizer == "muon":
        return Muon(parameters, lr=options.lr)
    if options.optimizer == "sgd":
        # foreach, because fused does not support shards
        return SGD(parameters, lr=options.lr, momentum=MOMENTUM, foreach=True)
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
