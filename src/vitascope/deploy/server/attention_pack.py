"""The attention explorer's data: a picture's prediction and attention, as one safetensors file.

Its metadata has one entry, `explorer`, which is JSON. Attention is stored as bytes with a scale per row:
`value = byte * scale`, with an error of at most half a scale; features as signed bytes with a scale per
patch. Of L layers, H heads, T tokens, N patches in a grid of (gh, gw), D features and K classes:

| tensor | content |
|---|---|
| `pixels` | uint8 (C, H, W): the model's input before normalization, as far as patches tile it |
| `probabilities` | float32 (K,); absent without a head |
| `thresholds` | float32 (K,): from which on a class applies; absent where one class applies |
| `attention`, `attention_scale` | uint8 (L, H, T, T), float32 (L, H, T): each row is a query and sums to 1 |
| `answer`, `answer_scale` | uint8 (L, H, T), float32 (L, H): the mean row of the tokens that the head reads |
| `rollout`, `rollout_scale` | uint8 (T, T), float32 (T,): `explain.rollout` for every token |
| `rollout_answer` | float32 (T,): for the tokens that the head reads |
| `features`, `features_scale` | int8 (N, D), float32 (N,): the patches' tokens after the final norm |
| `heatmaps` | float32 (n, gh, gw), largest value 1: for the classes in `explained` |
| `heatmaps`, `curve` | of the lens: float32 (L + 1, gh, gw), (L + 1,): the class read after 0 to L layers |

`attention` is larger than all others together, so it has a budget. If not all layers fit, `carried` in the
metadata names the part that fits, which `pack_attention` returns: a layer with its heads, or one head. An
exported file has pixels and probabilities alone, a ResNet heatmaps too, a model without a head neither
probabilities nor heatmaps; `missing` is the reason. Of a calibrated model, `verdict` has `unknown`, `set` and
`familiarity`.
"""

import copy
import json
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

from vitascope.analysis.explain.attention import layer_attention, read_rows, stream_attention
from vitascope.analysis.explain.heatmaps import grid_of
from vitascope.analysis.explain.inputs import as_images
from vitascope.analysis.explain.lens import lens
from vitascope.analysis.explain.methods import METHODS, methods_for
from vitascope.analysis.explain.rollout import next_flow
from vitascope.analysis.explain.targets import class_index
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig, check_head, check_layer
from vitascope.models.engines.engine import Engine, TorchEngine
from vitascope.models.engines.selection import AUTO
from vitascope.models.heads import scores
from vitascope.models.preprocess import Pixels
from vitascope.models.vision_model import VisionModel, kind_of
from vitascope.models.vit import VisionTransformer

LARGEST_LENS = 2**29
"""Bytes of a lens while it is computed; ImageNet's classes of ViT-B/16 at 224 pixels take 10 million."""
BUDGET = 24 * 2**20
"""Bytes of attention per response. ViT-B/16 at 224 pixels has 5.6 million, ViT-L/16 at 512 400 million."""
FIRST_METHOD = "libra"
"""The class map of the first response, which has to be fast: the most faithful with a single backward pass in
benchmarks/results/2026-11-28-heatmaps.md. It shows the likeliest class; others are requested one by one."""
LENS = "lens"
"""In place of a class map's method."""
NO_HEAD = "This model has no head: it has attention and features, but no predictions and no class maps."
NO_ATTENTION = "This model has no attention to show. Class maps show the evidence for a class."
EXPORTED = "An exported file returns only its outputs. To look inside, serve the model that it was made from."
KINDS = {"head": "heads", "attention": "attention", "mlp": "mlps", "layer": "layers", "patch": "patches"}
"""Kinds of parts that can be off, in the explorer and in `VisionTransformer.intervene`."""
PART = re.compile(rf"({'|'.join(KINDS)})(\d{{1,6}})(?:\.(\d{{1,6}}))?")

Carried = Literal["all", "layer", "head", "none"]
Head = int | Literal["mean"] | None


def batch_size(device: torch.device) -> int:
    """Images per forward pass; predictions run between passes. On a CPU, two take twice as long as one."""
    return 1 if device.type == "cpu" else 16


def pack_picture(engine: Engine, pixels: Pixels, budget: int = BUDGET) -> bytes:
    """Pack everything about a picture, uint8 (C, H, W), with as much attention as `budget` bytes allow."""
    tensors = {"pixels": torch.from_numpy(pixels)}
    about: dict[str, Any] = {
        "model": engine.description,
        "class_names": list(engine.class_names),
        "framing": {**engine.preprocess.to_dict(), "border": list(engine.preprocess.border)},
    }
    if engine.num_classes:
        answers = engine.answers(tensors["pixels"][None])
        tensors["probabilities"] = answers.probabilities[0].cpu()  # (K,)
        if engine.sets is not None:
            known = answers.familiarity if answers.familiarity is None else answers.familiarity.cpu()
            (verdict,) = AUTO.judged(engine, tensors["probabilities"][None], known)
            about["verdict"] = vars(verdict)
        if engine.thresholds:
            tensors["thresholds"] = torch.tensor(engine.thresholds)
    else:
        about["missing"] = NO_HEAD
    if not isinstance(engine, TorchEngine):
        return _file(tensors, {**about, "missing": EXPORTED})
    model, images = _model_input(engine, pixels)
    tensors["pixels"] = tensors["pixels"][:, : images.shape[2], : images.shape[3]]
    about["grid"] = list(grid_of(model, images))
    if engine.num_classes:
        top = tensors["probabilities"].argmax()[None]
        about["methods"] = class_methods(model)
        tensors["heatmaps"] = METHODS[FIRST_METHOD](model, images, top).cpu()  # (1, gh, gw)
        about["explained"] = {"method": FIRST_METHOD, "classes": top.tolist()}
    if isinstance(model, VisionTransformer):
        carried = what_fits(model.config, model.grid_of(images), budget)
        tensors |= _attention(model, images, carried)
        about["inside"] = {**token_names(model.config), "carried": carried}
    else:
        about["missing"] = NO_ATTENTION
    return _file(tensors, about)


def pack_attention(
    engine: Engine, pixels: Pixels, layer: int, head: Head = None, budget: int = BUDGET
) -> bytes:
    """Pack one layer's attention, of all heads, one, or their mean: `attention` (1, n, T, T) with its scale.

    Layers and heads count from 0, negative layers from the last.
    """
    model, images = _model_input(engine, pixels)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"{kind_of(model.config)} has no attention to show")
    index = check_layer(model.config, layer)
    check_head(model.config, None if head == "mean" else head)
    T = model.config.num_prefix_tokens + math.prod(model.grid_of(images))
    size = T * T * (model.config.num_heads if head is None else 1)
    if size > budget:
        way = "; ask for one head, or the mean" if head is None and budget >= T * T else ""
        raise UserError(f"attention of {T} tokens takes {size:,} bytes; the limit is {budget:,}{way}")
    weights = layer_attention(model, images, index)  # (1, heads, T, T)
    if head == "mean":
        weights = weights.mean(dim=1, keepdim=True)
    elif head is not None:
        weights = weights[:, head : head + 1]
    levels, scale = to_bytes(weights)
    return _file({"attention": levels, "attention_scale": scale}, {"layer": index, "head": head})


def pack_heatmap(engine: Engine, pixels: Pixels, method: str, target: int) -> bytes:
    """Pack the heatmap of one class, from 0, by one method: `heatmaps` (1, gh, gw)."""
    model, images = _model_input(engine, pixels)
    engine.check_classes()
    if method == LENS:
        return _pack_lens(engine, model, images, class_index(target, model.config))
    known = class_methods(model)
    if method not in known:
        raise UserError(f"no class map {method!r} for this model; methods: {', '.join([*known, LENS])}")
    heatmap = METHODS[method](model, images, target, batch_size=batch_size(images.device))  # (1, gh, gw)
    return _file({"heatmaps": heatmap.cpu()}, {"method": method, "target": target})


def _pack_lens(engine: Engine, model: VisionModel, images: Tensor, target: int) -> bytes:
    config = model.config
    if isinstance(config, ViTConfig):
        size = 4 * (config.depth + 1) * math.prod(grid_of(model, images)) * config.num_classes
        if size > LARGEST_LENS:
            limit = f"takes {size:,} bytes; the limit is {LARGEST_LENS:,}"
            raise UserError(f"the lens on {config.num_classes:,} classes {limit}")
    found = lens(model, images)
    shares = scores(found.patches, engine.meaning)[:, 0, ..., target].cpu()  # (L + 1, gh, gw)
    curve = scores(found.logits, engine.meaning)[:, 0, target].cpu()  # (L + 1,)
    return _file({"heatmaps": shares, "curve": curve}, {"method": LENS, "target": target})


def pack_without(off: str, pack: Callable[..., bytes], engine: Engine, pixels: Pixels, *args: Any) -> bytes:
    """What a function above packs for the model without the parts that are `off`, as "head0.1,mlp2,patch7".

    They are off in a copy that shares the weights, because other requests run between its passes.
    """
    if not off:
        return pack(engine, pixels, *args)
    parts = parts_off(off)
    if not isinstance(engine, TorchEngine) or not isinstance(engine.model, VisionTransformer):
        raise UserError("parts can be switched off in a Vision Transformer, not in what is served here")
    weights = (*engine.model.parameters(), *engine.model.buffers())
    model = copy.deepcopy(engine.model, {id(tensor): tensor for tensor in weights})
    with model.intervene(**parts):
        return pack(engine.with_model(model), pixels, *args)


def parts_off(text: str) -> dict[str, list[Any]]:
    """The arguments of `VisionTransformer.intervene` from a list of parts."""
    parts: dict[str, list[Any]] = {name: [] for name in KINDS.values()}
    for name in text.split(","):
        found = PART.fullmatch(name)
        if found is None or (found[3] is None) == (found[1] == "head"):
            raise UserError(
                f"off: no part {name[:40]!r}; parts are head0.1 (layer and head), attention0, mlp0, layer0 "
                "and patch0, with commas between them"
            )
        parts[KINDS[found[1]]].append(int(found[2]) if found[3] is None else (int(found[2]), int(found[3])))
    return parts


def what_fits(config: ViTConfig, grid: tuple[int, int], budget: int) -> Carried:
    """The part of the attention that fits into one response: all, a layer, a head, or none."""
    heads = budget // (config.num_prefix_tokens + math.prod(grid)) ** 2
    if heads >= config.num_heads:
        return "all" if heads >= config.depth * config.num_heads else "layer"
    return "head" if heads else "none"


def to_bytes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (..., T) of finite nonnegative numbers as uint8 (..., T) and float32 scales (...), on the CPU."""
    if not rows.isfinite().all():
        raise UserError("attention is not finite: look for NaN and infinity in the weights")
    scale = rows.float().amax(dim=-1) / 255
    levels = (rows / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round().to(torch.uint8)
    return levels.cpu(), scale.cpu()


def to_signed_bytes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, D) of finite numbers as int8 (N, D) and float32 scales (N,), on the CPU."""
    scale = rows.float().abs().amax(dim=-1) / 127
    levels = rows / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return levels.round().to(torch.int8).cpu(), scale.cpu()


def token_names(config: ViTConfig) -> dict[str, Any]:
    """Names for the numbers: tokens before the patches, and tokens that the head reads."""
    readout = config.readout
    tokens = ["class token"] * readout.has_class_token + ["distillation token"] * readout.distillation_token
    tokens += [f"register {number}" for number in range(1, readout.num_registers + 1)]
    reads = "class token and all patches" if readout.pool == "cls_mean" else "all patches"
    if readout.pool == "cls":
        reads = "class and distillation tokens" if readout.distillation_token else "class token"
    return {
        "depth": config.depth,
        "heads": config.num_heads,
        "tokens": tokens,
        "reads": reads,
        "patches_read_last": readout.pool != "cls",  # else the last layer's rows of patches mean nothing
    }


def class_methods(model: VisionModel) -> dict[str, str]:
    """The titles of the methods that explain a class of a model."""
    return {name: method.title for name, method in methods_for(model).items() if method.has_target}


def _model_input(engine: Engine, pixels: Pixels) -> tuple[VisionModel, Tensor]:
    """The model, and what it sees of pixels uint8 (C, H, W), float32 (1, C, H', W'), on its device."""
    if not isinstance(engine, TorchEngine):
        raise UserError("an exported file returns only its outputs: serve the model that it was made from")
    images = engine.preprocess.normalize(torch.from_numpy(pixels)[None].to(engine.device))
    return engine.model, as_images(engine.model, images)


def _attention(model: VisionTransformer, images: Tensor, carried: Carried) -> dict[str, Tensor]:
    """The attention that fits, and the rows that the head reads, layer by layer."""
    levels, scales, read = [], [], []
    flow: Tensor | None = None  # (1, T, T)

    def add_layer(weights: Tensor) -> None:  # (1, heads, T, T)
        nonlocal flow
        read.append(read_rows(model, weights[0]))  # (heads, T)
        if carried == "all":
            layer, scale = to_bytes(weights[0])
            levels.append(layer)
            scales.append(scale)
        flow = next_flow(flow, weights.mean(dim=1))

    tokens = stream_attention(model, images, add_layer)  # (1, T, D)
    assert flow is not None
    tensors = {"rollout_answer": read_rows(model, flow)[0].cpu()}
    tensors["features"], tensors["features_scale"] = to_signed_bytes(
        tokens[0, model.config.num_prefix_tokens :]
    )
    tensors["answer"], tensors["answer_scale"] = to_bytes(torch.stack(read))  # (L, heads, T)
    if carried == "all":
        tensors |= {"attention": torch.stack(levels), "attention_scale": torch.stack(scales)}
    if carried != "none":
        tensors["rollout"], tensors["rollout_scale"] = to_bytes(flow[0])
    return tensors


def _file(tensors: dict[str, Tensor], about: dict[str, Any]) -> bytes:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return save(contiguous, {"explorer": json.dumps(about)})
