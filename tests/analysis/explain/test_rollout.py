"""Both rollouts against the papers' recursions: in NumPy, and over full matrices, bottom up, in float64."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.explain import MODELS, heatmap, shares
from tests.models import random_images, small_model
from vitascope import explain
from vitascope.analysis.explain.rollout import Fusion, gradient_rollout
from vitascope.models.trace import Trace
from vitascope.models.vit import VisionTransformer

FUSE = {"mean": np.mean, "max": np.max, "min": np.min}
HYBRID = {"stem": "resnet", "resnet_layers": (1, 2), "resnet_width": 4}


# Fusion and discarding


def fused_in_numpy(
    model: VisionTransformer, images: torch.Tensor, fusion: Fusion, discard: float
) -> np.ndarray:
    """Each image and layer separately, in float64; rows of fused weights need not sum to one."""
    traced = copy.deepcopy(model).double().trace(images.double(), attention=True).attention
    config = model.config.replace(image_size=tuple(images.shape[2:]))
    maps = []
    for image in range(len(images)):
        flow = np.eye(config.num_tokens)
        for layer in traced:
            fused = FUSE[fusion](layer[image].detach().numpy(), axis=0)  # (T, T)
            smallest = np.argsort(fused, axis=None)[: int(discard * fused.size)]
            fused.flat[smallest] = 0
            residual = fused + np.eye(len(fused))
            flow = np.diag(1 / residual.sum(axis=1)) @ residual @ flow
        maps.append(heatmap(config, flow))
    return np.stack(maps)


@pytest.mark.parametrize(
    ("options", "fusion", "discard", "shape"),
    [
        *((options, "mean", 0.0, {}) for options in (*MODELS.values(), HYBRID)),
        *((options, "max", 0.3, {"image_size": (16, 48)}) for options in (*MODELS.values(), HYBRID)),
        *((options, "min", 0.3, {"depth": 1}) for options in ({}, {"pool": "mean"})),
        *((options, "mean", 0.3, {"depth": 5}) for options in ({}, {"pool": "cls_mean"})),
    ],
)
def test_rollout_is_the_product_of_the_layers_of_fused_heads_without_the_smallest_weights(
    options: dict[str, Any], fusion: Fusion, discard: float, shape: dict[str, Any]
) -> None:
    model = small_model(num_heads=4, **options, **shape)
    images = random_images(3, 3, *model.config.image_hw)
    heat = explain.rollout(model, images, fusion, discard)
    np.testing.assert_allclose(heat, fused_in_numpy(model, images, fusion, discard), atol=1e-5)


@pytest.mark.parametrize("options", [HYBRID, {"image_size": (16, 48)}, {"num_registers": 2}])
def test_other_resolutions_are_fused_alike(options: dict[str, Any]) -> None:
    model, images = small_model(**options), random_images(2, 3, 48, 16)
    heat = explain.rollout(model, images, "max", 0.5)
    assert heat.shape == (2, 6, 2)
    np.testing.assert_allclose(heat, fused_in_numpy(model, images, "max", 0.5), atol=1e-5)


# --- weighted by gradients

CLASSES = [4, 0, 2]

Score = Callable[[Trace], Tensor]


def logits_of(classes: list[int]) -> Score:
    return lambda trace: sum(trace["logits"][image, index] for image, index in enumerate(classes))


def by_recursion(model: VisionTransformer, images: Tensor, score: Score) -> np.ndarray:
    """R = I, then R <- R + E_h[(dA * A)+] R from the first layer up; returns the pooled rows of R - I."""
    trace = copy.deepcopy(model).double().trace(images.double(), attention=True)
    gradients = torch.autograd.grad(score(trace), trace.attention)
    config = model.config.replace(image_size=tuple(images.shape[2:]))
    P, T = config.num_prefix_tokens, config.num_tokens
    maps = []
    for image in range(len(images)):
        R = np.eye(T)
        for weights, gradient in zip(trace.attention, gradients, strict=True):
            by_head = (gradient * weights)[image].detach().numpy()  # (heads, T, T)
            R = R + np.maximum(by_head, 0).mean(axis=0) @ R
        received = (shares(config) @ (R - np.eye(T)))[P:].reshape(config.grid)
        maps.append(received / received.max())
    return np.stack(maps)


def assert_is_recursion(
    model: VisionTransformer, images: Tensor, target: Any, score: Score, tolerance: float = 2e-5
) -> None:
    heat = gradient_rollout(model, images, target)
    assert heat.dtype == torch.float32
    np.testing.assert_allclose(heat.numpy(), by_recursion(model, images, score), atol=tolerance)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        *((options, {"image_size": (16, 48), "num_heads": 4}) for options in (*MODELS.values(), HYBRID)),
        *((options, {}) for options in ({}, HYBRID, {"pool": "mean"})),
    ],
)
def test_relevance_equals_the_papers_recursion(options: dict[str, Any], shape: dict[str, Any]) -> None:
    model = small_model(**options, **shape)
    images = random_images(3, 3, *model.config.image_hw)
    assert_is_recursion(model, images, CLASSES, logits_of(CLASSES))


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_attention_of_only_one_layer_is_in_memory(pool: str) -> None:
    model, images = small_model(depth=4, pool=pool), random_images(2, 3, 32, 32)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(weights: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any) -> Tensor:
            alive.append(sum(each() is not None for each in made))
            result = weights(*args)
            made.append(weakref.ref(result))
            return result

        return make

    for block in model.encoder.blocks:
        block.attention.weights = watched(block.attention.weights)
    gradient_rollout(model, images)
    assert alive == [0] * 4
