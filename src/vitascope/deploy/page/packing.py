"""A model for a page: the options that `web/vit.js` has, and rounded weights for `web/weights.js`.

Matrices of linear layers are (outputs, inputs), float16 or int8 with a scale per output; convolutions are
such matrices too. Everything else is float32 and small. Positions are what the model makes of them for its
own image size: a table to add, rotations, numbers to add to the scores. So the page's program knows one kind
of each.
"""

import copy
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitascope.deploy.server.attention_pack import to_signed_bytes
from vitascope.errors import UserError
from vitascope.models.attention import KeylessLinear
from vitascope.models.config import ViTConfig
from vitascope.models.vision_model import VisionModel, kind_of
from vitascope.models.vit import VisionTransformer

Rounding = Literal["fp32", "fp16", "int8"]
BYTES: dict[Rounding, int] = {"fp32": 4, "fp16": 2, "int8": 1}
"""Of a number in a matrix."""
MOST_HALF = torch.finfo(torch.float16).max
INSTEAD = "`vitascope serve` shows it"
HELD: dict[str, tuple[Any, ...]] = {
    "in_channels": (1, 3),
    "stem": ("conv", "overlap", "tokenizer"),
    "attention": ("global",),
    "token_merging": (0,),
}
"""The values that `web/vit.js` has of a model's options; of all others it has every value."""


def check_held(model: VisionModel) -> VisionTransformer:
    """The model, if a page can hold its kind; `UserError` names the option that it cannot."""
    if not isinstance(model, VisionTransformer):
        raise UserError(f"a page holds one Vision Transformer, not {kind_of(model.config)}: {INSTEAD}")
    for name, values in HELD.items():
        value = model.config.option(name)
        if value not in values:
            known = " or ".join(map(repr, values))
            raise UserError(f"a page holds models of {name} {known}, not of {name} {value!r}: {INSTEAD}")
    return model


def body_of(model: VisionTransformer) -> VisionTransformer:
    """The model without its head, whose outputs are features."""
    config = model.config.replace(head="none", class_names=(), thresholds=(), outputs="exclusive")
    with torch.device("meta"):
        body = VisionTransformer(config)
    state = model.state_dict()
    body.load_state_dict({name: state[name] for name in body.state_dict()}, assign=True)
    body.preprocess = model.preprocess
    return body.eval()


def program_options(config: ViTConfig) -> dict[str, Any]:
    """What `web/vit.js` needs to know of a model, as JSON."""
    readout = config.readout
    names = ["embed_dim", "depth", "num_heads", "in_channels", "outputs"]
    names += ["stem", "patch_norm", "embedding_norm", "norm", "mlp"]
    names += ["norm_type", "inner_norm", "norm_eps", "qk_norm"]
    names += ["distillation_token", "pool", "pool_prefix", "head"]
    return {name: config.option(name) for name in names} | {
        "image_hw": config.tiled_hw(config.image_hw),
        "grid": config.grid,
        "prefix": config.num_prefix_tokens,
        "patch_size": config.patch_hw,
        "patch_stride": config.patch_stride,
        "tokenizer_channels": config.tokenizer_channels,
        "tokenizer_pools": config.tokenizer_pools,
        "tokenizer_activation": config.option("tokenizer_activation"),
        "head_dim": config.head_dim,
        "final_norm": config.final_norm,
        "num_pooled": readout.num_pooled,
        "pool_heads": readout.pool_heads or config.embed_dim // config.head_dim,
    }


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
            levels, scales = to_signed_bytes(matrix)
            matrix = levels * scales[:, None]
        layer.weight.data = matrix.view_as(layer.weight)
    return rounded_copy


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
                tensors[name], tensors[f"{name}.scales"] = to_signed_bytes(matrix)
            else:
                tensors[name] = matrix.half() if rounding == "fp16" else matrix
        elif layer in matrices and isinstance(matrices[layer], KeylessLinear):
            q, v = value.chunk(2)
            tensors[name] = torch.cat([q, torch.zeros_like(q), v])
        else:
            tensors[name] = value.flatten()
    if model.trust is not None and model.trust.familiarity is not None:
        buffers = dict(model.trust.familiarity.named_buffers())
        tensors["trust.projection.weight"] = buffers.pop("projection").T  # (r, D)
        tensors |= {f"trust.{name}": values.flatten() for name, values in buffers.items()}
    return {name: tensor.contiguous() for name, tensor in (tensors | _tables(model)).items()}


def position_weights(model: VisionTransformer) -> dict[str, Tensor]:
    """The weights that `packed` leaves out, for a page that exports the model."""
    state = model.state_dict().items()
    return {name: value.flatten().float().clone() for name, value in state if name.startswith("positions.")}


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
