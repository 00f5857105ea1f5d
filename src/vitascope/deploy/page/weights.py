"""A model's weights for a page: rounded, and as the tensors that `web/weights.js` reads.

Matrices of linear layers are (outputs, inputs), float16 or int8 with a scale per output; convolutions are
such matrices too. Everything else is float32 and small. Positions are what the model makes of them for its
own image size: a table to add, rotations, numbers to add to the scores. So the page's program knows one kind
of each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.attention import KeylessLinear
from vitascope.model.vit import VisionTransformer

Rounding = Literal["fp32", "fp16", "int8"]
BYTES: dict[Rounding, int] = {"fp32": 4, "fp16": 2, "int8": 1}
"""Of a number in a matrix."""
MOST_HALF = torch.finfo(torch.float16).max


def rounded(model: VisionTransformer, rounding: Rounding) -> VisionTransformer:
    """A copy of a model on the CPU, in float32, with the weights that a page has."""
    rounded_copy = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    for name, value in rounded_copy.named_parameters():
        if not value.isfinite().all():
            raise UserError(f"{name} has NaN or infinity: look at the checkpoint")
    for name, layer in _products(rounded_copy):
        matrix = layer.weight.flatten(1)  # (outputs, inputs)
        if rounding == "fp16":
            if matrix.abs().max() > MOST_HALF:
                raise UserError(f"{name}.weight is too large for float16: use weights int8")
            matrix = matrix.half().float()
        elif rounding == "int8":
            levels, scales = by_row(matrix)
            matrix = levels * scales[:, None]
        layer.weight.data = matrix.view_as(layer.weight)
    return rounded_copy


def by_row(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix (outputs, inputs) as int8 (outputs, inputs) and float32 scales (outputs,)."""
    scales = (matrix.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (matrix / scales[:, None]).round().to(torch.int8), scales


@torch.no_grad()
def packed(model: VisionTransformer, rounding: Rounding) -> dict[str, Tensor]:
    """The tensors of a model that is `rounded`, by the names of its state dict."""
    matrices = dict(_products(model))
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        layer, _, kind = name.rpartition(".")
        if name.startswith("positions."):
            continue
        if layer in matrices and kind == "weight":
            matrix = value.flatten(1)
            if rounding == "int8":
                tensors[name], tensors[f"{name}.scales"] = by_row(matrix)
            else:
                tensors[name] = matrix.half() if rounding == "fp16" else matrix
        elif layer in matrices and isinstance(matrices[layer], KeylessLinear):
            q, v = value.chunk(2)
            tensors[name] = torch.cat([q, torch.zeros_like(q), v])
        else:
            tensors[name] = value.flatten()
    return {name: tensor.contiguous() for name, tensor in (tensors | _tables(model)).items()}


def _products(model: VisionTransformer) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    """The layers that are matrix products, by name."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            yield name, layer


def _tables(model: VisionTransformer) -> dict[str, Tensor]:
    """What the positions are for the model's own image size."""
    config, positions = model.config, model.positions
    tables: dict[str, Tensor] = {}
    added = positions.table(config.grid)  # (1, T or N, D)
    if added is not None:
        tables["positions"] = added.flatten().float()
    layout = positions.layout(config.grid, torch.device("cpu"))
    parts = {f".{number}": part for number, part in enumerate(layout.by_block)} or {"": layout}
    for suffix, part in parts.items():
        if part.rotation is not None:
            for name, table in zip(("cos", "sin"), part.rotation, strict=True):
                tables[f"rotation.{name}{suffix}"] = table.flatten().float()  # (N, heads or 1, hd)
        bias = part.bias(config.grid)
        if bias is not None:
            tables[f"bias{suffix}"] = bias.flatten().float()  # (heads, T, T)
    return tables
