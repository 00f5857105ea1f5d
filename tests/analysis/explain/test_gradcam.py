"""Grad-CAM and its variants, in NumPy, from float64 activations and gradients that hooks catch."""

import copy
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.analysis.explain import MODELS
from tests.models import random_images, small_model, small_resnet
from vitascope.analysis.explain.gradcam import Layer, Variant, grad_cam
from vitascope.errors import UserError
from vitascope.models.resnet import ResNet
from vitascope.models.vision_model import VisionModel

HYBRID = {"stem": "resnet", "resnet_layers": (1, 2), "resnet_width": 4}
THEN_NORM = {"pool": "mean", "pool_norm": "after"}
CLASSES = [4, 0, 2]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
of_every_model = pytest.mark.parametrize(
    "options", [*MODELS.values(), HYBRID, THEN_NORM], ids=[*MODELS, "resnet stem", "mean, then norm"]
)
Score = Callable[[Tensor, Tensor], Tensor]
"""Pooled representation (B, D) and logits (B, K) to the sum of what is explained."""


def logits_of(classes: list[int]) -> Score:
    return lambda pooled, logits: sum(logits[image, index] for image, index in enumerate(classes))


def place(model: VisionModel, layer: Layer) -> nn.Module:
    if isinstance(model, ResNet):
        return model.features
    blocks = model.encoder.blocks
    if layer == "last" and model.config.option("pool") != "cls":
        return model.norm
    index = (len(blocks) - 1 if layer == "last" else layer) % len(blocks)
    if model.config.option("norm") == "pre":
        return blocks[index].norm1
    return model.embedding_norm if index == 0 else blocks[index - 1]


def caught(model: VisionModel, images: Tensor, score: Score, layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """Activations and gradients in float64, each (B, rows, columns, D)."""
    model = copy.deepcopy(model).double()
    kept: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    place(model, layer).register_forward_hook(keep)
    pooled = model.embed(images.double())
    score(pooled, model.head(pooled)).backward()
    (activations,) = kept
    a, g = activations.detach().numpy(), activations.grad.numpy()
    if isinstance(model, ResNet):
        return a.transpose(0, 2, 3, 1), g.transpose(0, 2, 3, 1)
    P, grid = model.config.num_prefix_tokens, model.config.grid_of(tuple(images.shape[2:]))
    return a[:, P:].reshape(len(a), *grid, -1), g[:, P:].reshape(len(a), *grid, -1)


def channel_weights(variant: str, a: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The weight of one channel's activations (h, w), from its gradients (h, w)."""
    match variant:
        case "grad-cam":  # Selvaraju et al. 2017, equation 1
            return g.mean()
        case "layer-cam":
            return np.maximum(g, 0)
    raise AssertionError(variant)


def cam(variant: str, activations: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """The heatmaps (B, h, w) of activations and gradients (B, h, w, D)."""
    maps = []
    for a, g in zip(activations, gradients, strict=True):
        heat = sum(channel_weights(variant, a[..., k], g[..., k]) * a[..., k] for k in range(a.shape[-1]))
        heat = np.maximum(heat, 0)
        maps.append(heat / heat.max() if heat.max() > 0 else heat)
    return np.stack(maps)


def assert_is_cam(
    model: VisionModel, images: Tensor, target: Any, score: Score, layer: Layer = "last"
) -> None:
    activations, gradients = caught(model, images, score, layer)
    for variant in VARIANTS:
        heat = grad_cam(model, images, target, layer, variant)
        assert heat.dtype == torch.float32
        expected = cam(variant, activations, gradients)
        assert expected.max() == 1
        np.testing.assert_allclose(heat.numpy(), expected, atol=2e-5, err_msg=variant)


@of_every_model
def test_map_equals_the_formula(options: dict[str, Any]) -> None:
    model = small_model(image_size=(16, 48), num_heads=4, **options)
    images = random_images(3, 3, 16, 48)
    assert_is_cam(model, images, CLASSES, logits_of(CLASSES))


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("name", ["class_token", "mean_beside_class_token", "post_norm", "window_map"])
def test_layer_is_the_input_of_its_attention(name: str, layer: int) -> None:
    model, images = small_model(**MODELS[name]), random_images(3, 3, 32, 32)
    assert_is_cam(model, images, CLASSES, logits_of(CLASSES), layer)


def test_resnet_is_explained_at_its_last_feature_map() -> None:
    model, images = small_resnet(), random_images(3, 3, 96, 64)
    assert grad_cam(model, images).shape == (3, 12, 8)
    assert_is_cam(model, images, CLASSES, logits_of(CLASSES))


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_default_layer_is_the_last_for_grad_cam_and_the_first_for_elementwise_variants(pool: str) -> None:
    model, images = small_model(pool=pool), random_images(2, 3, 32, 32)
    for variant in VARIANTS:
        layer: Layer = "last" if variant == "grad-cam" else 0
        expected = grad_cam(model, images, layer=layer, variant=variant)
        assert torch.equal(grad_cam(model, images, variant=variant), expected)


def test_only_layers_above_are_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = small_model(depth=4), random_images(2, 3, 32, 32)
    recorded: list[bool] = []
    for block in model.encoder.blocks:
        block.register_forward_hook(lambda module, inputs, output: recorded.append(output.requires_grad))
    grad_cam(model, images, layer=2)
    assert recorded == [False, False, True, True]


def test_layer_of_a_resnet_is_rejected() -> None:
    with pytest.raises(UserError, match="layer 0: a ResNet has only its last feature map"):
        grad_cam(small_resnet(), random_images(1, 3, 32, 32), layer=0)
