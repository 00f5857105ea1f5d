"""Attention rollout against the paper's recursion, written again in NumPy."""

import numpy as np
import pytest
import torch

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
        row = flow[0, 1:] if model.config.pool == "cls" else flow.mean(axis=0)
        maps.append(row.reshape(model.config.grid) / row.max())
    return np.stack(maps)


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("shape", [{"depth": 1}, {"depth": 5}, {"image_size": (16, 40), "num_heads": 4}])
def test_rollout_is_the_product_of_the_layers(pool: str, shape: dict[str, object]) -> None:
    model = small_model(pool=pool, **shape)
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
