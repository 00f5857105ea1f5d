"""What the attention explorer's page works on: one picture's answer and attention, in a few bytes a number.

A pack is a safetensors file, so any reader of that format opens one. Its metadata has one entry, `explorer`,
which is JSON. Attention is stored as bytes with a scale a row: `value = byte * scale`, at most half a scale
from the truth. Of L layers, H heads, T tokens, K classes and a grid of (gh, gw) patches:

| tensor | what |
|---|---|
| `pixels` | uint8 (C, H, W): the picture as the model gets it |
| `probabilities` | float32 (K,); absent if the model has no head |
| `attention`, `attention_scale` | uint8 (L, H, T, T), float32 (L, H, T): each row is a query and sums to 1 |
| `answer`, `answer_scale` | uint8 (L, H, T), float32 (L, H): the mean row of the tokens that the head reads |
| `rollout`, `rollout_scale` | uint8 (T, T), float32 (T,): `explain.rollout` of every token |
| `rollout_answer` | float32 (T,): of the tokens that the head reads |
| `heatmaps` | float32 (n, gh, gw), largest value 1: class maps of `explained`'s classes |

`attention` is as large as all the others are not, so it has a budget. Where all layers do not fit, `carried`
in the metadata says what does, and `pack_attention` gives that: a layer with its heads, or one head of a
layer. An engine that cannot be looked into (an exported file) has pixels and probabilities alone, and a
ResNet class maps too; a model without a head has neither probabilities nor class maps. `missing` says why.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

from vitascope.data.preprocess import Pixels
from vitascope.deploy.predict.engine import Engine, TorchEngine
from vitascope.deploy.server.explanations import batch_size
from vitascope.errors import UserError
from vitascope.explain.attention import check_head, check_layer, layer_attention, read_rows, stream_attention
from vitascope.explain.heatmaps import grid_of
from vitascope.explain.methods import METHODS, methods_for
from vitascope.explain.rollout import next_flow
from vitascope.model.classifier import Classifier
from vitascope.model.config import ViTConfig
from vitascope.model.vit import VisionTransformer

BUDGET = 24 * 2**20
"""Bytes of attention in a response. ViT-B/16 at 224 pixels has 5.6 million, ViT-L/16 at 512 400 million."""
EXPLAINED = 3
"""Classes whose map is in the first response; any other is asked for."""

FIRST_METHODS = ("grad-cam", "hires-cam")
"""Of the class maps in the first response: the first that fits the model."""
BLOCK_BY_BLOCK = ("gradient-rollout", "grad-cam", "grad-cam++")
"""Methods that run blocks by themselves, which a model that merges tokens cannot."""

Carried = Literal["all", "layer", "head", "none"]


def pack_picture(engine: Engine, pixels: Pixels, budget: int = BUDGET) -> bytes:
    """The first response about a picture: everything, as far as the budget goes.

    Args:
        engine: what answers.
        pixels: uint8 (C, H, W), as `engine.pixels` gives them.
        budget: bytes of attention that are carried.

    Raises:
        UserError: attention that is not finite.
    """
    picture = torch.from_numpy(pixels)
    tensors = {"pixels": picture}
    if engine.num_classes:
        tensors["probabilities"] = engine.probabilities(picture[None])[0]  # (K,)
    about: dict[str, Any] = {
        "model": engine.description,
        "class_names": list(engine.class_names),
        "framing": {**engine.preprocess.to_dict(), "border": list(engine.preprocess.border)},
    }
    if isinstance(engine, TorchEngine):
        images = normalized(engine, pixels)
        about["grid"] = list(grid_of(engine.model, images))
        if engine.num_classes:
            top = tensors["probabilities"].topk(min(EXPLAINED, engine.num_classes)).indices
            methods = class_methods(engine.model)
            method = next(name for name in FIRST_METHODS if name in methods)
            maps = METHODS[method](engine.model, images.expand(len(top), -1, -1, -1), top)  # (n, gh, gw)
            tensors["heatmaps"] = maps.cpu()
            about["methods"] = methods
            about["explained"] = {"method": method, "classes": top.tolist()}
        else:
            about["missing"] = (
                "This model has no head: it has attention, but no predictions and no class maps."
            )
        if isinstance(engine.model, VisionTransformer):
            carried = what_fits(engine.model.config, engine.model.grid_of(images), budget)
            tensors |= _all_layers(engine.model, images, carried)
            about["inside"] = describe(engine.model.config, carried)
        else:
            about["missing"] = "A ResNet has no attention. Class maps show what speaks for a class."
    else:
        about["missing"] = (
            "An exported file gives probabilities alone. "
            "To look inside, serve the model that it was made from."
        )
    return _file(tensors, about)


def pack_attention(
    engine: Engine,
    pixels: Pixels,
    layer: int,
    head: int | Literal["mean"] | None = None,
    budget: int = BUDGET,
) -> bytes:
    """The attention of one layer: `attention` (1, n, T, T) with `attention_scale` (1, n, T).

    Args:
        engine: what answers.
        pixels: uint8 (C, H, W), as `engine.pixels` gives them.
        layer: of `depth`, from 0; negative counts from the last.
        head: of `num_heads`, from 0, or their mean; None takes all heads.
        budget: bytes of attention that are carried.

    Raises:
        UserError: no such layer or head; more bytes than the budget has; an engine without attention.
    """
    model, images = _looked_into(engine, pixels)
    if not isinstance(model, VisionTransformer):
        raise UserError("a ResNet has no attention to show")
    index = check_layer(model.config, layer)
    check_head(model.config, None if head == "mean" else head)
    T = _num_tokens(model.config, model.grid_of(images))
    size = T * T * (model.config.num_heads if head is None else 1)
    if size > budget:
        way = "; ask for one head, or the mean" if head is None and budget >= T * T else ""
        raise UserError(f"attention of {T} tokens takes {size:,} bytes, and {budget:,} are carried{way}")
    weights = layer_attention(model, images, index)  # (1, heads, T, T)
    if head == "mean":
        weights = weights.mean(dim=1, keepdim=True)
    elif head is not None:
        weights = weights[:, head : head + 1]
    levels, scale = quantize(weights)
    return _file({"attention": levels, "attention_scale": scale}, {"layer": index, "head": head})


def pack_heatmap(engine: Engine, pixels: Pixels, method: str, target: int) -> bytes:
    """The map of one class by one method: `heatmaps` (1, gh, gw).

    Args:
        engine: what answers.
        pixels: uint8 (C, H, W), as `engine.pixels` gives them.
        method: of `METHODS`, one that explains a class.
        target: the class, from 0.

    Raises:
        UserError: no such class; a method that is unknown or does not fit the model; an exported file.
    """
    model, images = _looked_into(engine, pixels)
    engine.check_classes()
    at_once = batch_size(engine) if isinstance(engine, TorchEngine) else None
    known = class_methods(model)
    if method not in known:
        raise UserError(f"no class map {method!r} of this model; it is one of {', '.join(known)}")
    heat = METHODS[method](model, images, target, batch_size=at_once)  # (1, gh, gw)
    return _file({"heatmaps": heat.cpu()}, {"method": method, "target": target})


def what_fits(config: ViTConfig, grid: tuple[int, int], budget: int) -> Carried:
    """How much attention goes into one response: all of it, a layer, a head, or not even that."""
    one = _num_tokens(config, grid) ** 2
    if config.depth * config.num_heads * one <= budget:
        return "all"
    if config.num_heads * one <= budget:
        return "layer"
    return "head" if one <= budget else "none"


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (..., T), nothing below 0, as uint8 of the same shape and float32 scales (...), on the CPU.

    Raises:
        UserError: a value that is not a finite number.
    """
    if not rows.isfinite().all():
        raise UserError("attention is not finite: look for NaN and infinity in the weights")
    scale = rows.float().amax(dim=-1) / 255
    levels = (rows / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round().to(torch.uint8)
    return levels.cpu(), scale.cpu()


def describe(config: ViTConfig, carried: Carried) -> dict[str, Any]:
    """The names that go with the numbers: tokens before the patches, what the head reads, what is carried."""
    readout = config.readout
    tokens = ["class token"] * readout.has_class_token + ["distillation token"] * readout.distillation_token
    tokens += [f"register {number}" for number in range(1, readout.num_registers + 1)]
    reads = {
        "cls": "class and distillation token" if readout.distillation_token else "class token",
        "cls_mean": "class token and all patches",
        "mean": "all patches",
        "map": "all patches",
    }[readout.pool]
    return {
        "depth": config.depth,
        "heads": config.num_heads,
        "tokens": tokens,
        "reads": reads,
        "patches_read_last": readout.pool != "cls",  # else the last layer's rows of patches mean nothing
        "carried": carried,
    }


def class_methods(model: Classifier) -> dict[str, str]:
    """The methods that explain a class of a model, and their titles."""
    found = {name: method.title for name, method in methods_for(model).items() if method.has_target}
    if isinstance(model, VisionTransformer) and model.config.block.token_merging:
        return {name: title for name, title in found.items() if name not in BLOCK_BY_BLOCK}
    return found


def normalized(engine: TorchEngine, pixels: Pixels) -> Tensor:
    """A picture uint8 (C, H, W) as the model takes it, float32 (1, C, H, W), on its device."""
    return engine.preprocess.normalize(torch.from_numpy(pixels)[None].to(engine.device))


def _looked_into(engine: Engine, pixels: Pixels) -> tuple[Classifier, Tensor]:
    """The model inside an engine, and its input (1, C, H, W)."""
    if not isinstance(engine, TorchEngine):
        raise UserError("an exported file gives probabilities alone: serve the model that it was made from")
    return engine.model, normalized(engine, pixels)


def _num_tokens(config: ViTConfig, grid: tuple[int, int]) -> int:
    return config.num_prefix_tokens + grid[0] * grid[1]


def _all_layers(model: VisionTransformer, images: Tensor, carried: Carried) -> dict[str, Tensor]:
    """Attention as far as it is carried, and what is read of every layer; one layer is there at a time."""
    levels, scales, answers = [], [], []
    flow: Tensor | None = None  # (1, T, T)

    def add_layer(weights: Tensor) -> None:  # (1, heads, T, T)
        nonlocal flow
        answers.append(read_rows(model, weights[0]))  # (heads, T)
        if carried == "all":
            layer, scale = quantize(weights[0])
            levels.append(layer)
            scales.append(scale)
        flow = next_flow(flow, weights.mean(dim=1))

    stream_attention(model, images, add_layer)
    assert flow is not None
    answer, answer_scale = quantize(torch.stack(answers))  # (L, heads, T)
    tensors = {
        "answer": answer,
        "answer_scale": answer_scale,
        "rollout_answer": read_rows(model, flow)[0].cpu(),
    }
    if carried == "all":
        tensors |= {"attention": torch.stack(levels), "attention_scale": torch.stack(scales)}
    if carried != "none":
        tensors["rollout"], tensors["rollout_scale"] = quantize(flow[0])
    return tensors


def _file(tensors: dict[str, Tensor], about: dict[str, Any]) -> bytes:
    return save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, {"explorer": json.dumps(about)}
    )
