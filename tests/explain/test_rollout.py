"""Attention rollout against the paper's recursion, written again in NumPy."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.explain import MODELS, heatmap
from tests.model import random_images, small_model
from vitascope import explain
from vitascope.model.vit import VisionTransformer


def in_numpy(model: VisionTransformer, images: torch.Tensor) -> np.ndarray:
    """Abnar and Zuidema 2020: A~_1 = A'_1, A~_l = A'_l A~_{l-1}, A' = 0.5 A + 0.5 I; float64."""
    traced = model.trace(images, attention=True).attention
    assert traced is not None
    maps = []
    for image in range(len(images)):
        flow = None
        for layer in traced:
            mean = layer[image].detach().double().numpy().mean(axis=0)  # (T, T)
            residual = 0.5 * mean + 0.5 * np.eye(len(mean))
            flow = residual if flow is None else residual @ flow
        assert flow is not None
        np.testing.assert_allclose(flow.sum(axis=1), 1, atol=1e-5)
        maps.append(heatmap(model.config, flow))
    return np.stack(maps)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("shape", [{"depth": 1}, {"depth": 5}, {"image_size": (16, 48), "num_heads": 4}])
def test_rollout_is_the_product_of_the_layers(options: dict[str, Any], shape: dict[str, Any]) -> None:
    model = small_model(**options, **shape)
    images = random_images(3, 3, *model.config.image_hw)
    np.testing.assert_allclose(explain.rollout(model, images).numpy(), in_numpy(model, images), atol=1e-6)


def test_order_of_the_layers_matters() -> None:
    model = small_model()
    images = random_images(1, 3, 32, 32)
    traced = model.trace(images, attention=True).attention
    assert traced is not None
    flow = torch.eye(17)
    for weights in traced:  # the wrong way round
        flow = flow @ (weights[0].mean(dim=0) + torch.eye(17)) / 2
    wrong = flow[0, 1:].reshape(4, 4)
    assert (explain.rollout(model, images)[0] - wrong / wrong.max()).abs().max() > 1e-3


def test_one_layer_rolls_out_to_its_attention() -> None:
    model = small_model(depth=1)
    images = random_images(2, 3, 32, 32)
    torch.testing.assert_close(explain.rollout(model, images), explain.attention(model, images))


def test_distillation_token_counts_like_the_class_token() -> None:
    model = small_model(distillation_token=True)
    images = random_images(2, 3, 32, 32)
    heat = explain.rollout(model, images)
    with torch.no_grad():  # the tokens change places, with their positions
        model.class_token.data, model.distillation_token.data = (
            model.distillation_token.data,
            model.class_token.data,
        )
        model.positions.weight[:, :2] = model.positions.weight[:, [1, 0]]
    torch.testing.assert_close(explain.rollout(model, images), heat)


def test_nothing_flows_from_one_window_to_another() -> None:
    """Without prefix tokens each window keeps to itself, so that all give the mean of the patches alike."""
    model = small_model(attention="window", window=2, pool="mean", image_size=(32, 48))
    heat = explain.rollout(model, random_images(3, 3, 32, 48))
    windows = heat.reshape(3, 2, 2, 3, 2).sum(dim=(2, 4))  # (B, windows down, windows across)
    torch.testing.assert_close(windows / windows[:, :1, :1], torch.ones(3, 2, 3))
    assert heat.flatten(1).std(dim=1).min() > 1e-3


@pytest.mark.parametrize("attention", ["axial", "window"])
def test_class_token_sees_everything_through_local_attention(attention: str) -> None:
    model = small_model(attention=attention, window=2, depth=1)
    assert (explain.rollout(model, random_images(3, 3, 32, 32)) > 0).all()
