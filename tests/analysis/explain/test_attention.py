"""Attention of single layers, heads and patches, and attention layer by layer."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.explain import MODELS, heatmap, shares
from tests.models import random_images, small_model
from vitascope import explain
from vitascope.analysis.explain.attention import head_maps, patch_attention, stream_attention
from vitascope.models.vit import VisionTransformer

# --- attention


of_every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def images_of(model: VisionTransformer, count: int = 3) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


def directly(model: VisionTransformer, weights: Tensor, head: int | None) -> np.ndarray:
    """The same map from a layer's traced weights (B, heads, T, T), in float64, image by image."""
    maps = []
    for each in weights.detach().double().numpy():
        maps.append(heatmap(model.config, each.mean(axis=0) if head is None else each[head]))
    return np.stack(maps)


@of_every_model
def test_shares_cover_exactly_the_pooled_tokens(options: dict[str, Any]) -> None:
    model = small_model(**options)
    share = shares(model.config)
    assert share.sum() == pytest.approx(1)
    tokens = random_images(1, model.config.num_tokens, model.config.embed_dim).requires_grad_()
    model.pool(tokens).square().sum().backward()
    np.testing.assert_array_equal(tokens.grad[0].abs().sum(dim=1) > 0, share > 0)
    # the others are linear: of the identity, they return the shares
    if model.config.option("pool") not in ("map", "sequence"):
        pooled = model.pool(torch.eye(len(share))[None]).reshape(-1, len(share))
        np.testing.assert_allclose(pooled.mean(dim=0), share, atol=1e-7)


@of_every_model
def test_map_equals_the_traced_weights(options: dict[str, Any]) -> None:
    model = small_model(image_size=(16, 48), **options)
    images = images_of(model)
    attention = model.trace(images, attention=True).attention
    for layer, head in ((0, None), (1, 1), (2, 0), (-1, None), (-3, 1)):
        heat, expected = (
            explain.attention(model, images, layer, head),
            directly(model, attention[layer], head),
        )
        message = f"layer {layer}, head {head}"
        np.testing.assert_allclose(heat, expected, atol=1e-6, rtol=1e-5, err_msg=message)


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("options", [{}, {"pool": "mean", "num_registers": 1}])
def test_blocks_above_the_layer_are_not_run(options: dict[str, Any], layer: int) -> None:
    model = small_model(**options)
    images, run = images_of(model), []
    expected = explain.attention(model, images, layer)
    for index, block in enumerate(model.encoder.blocks):
        block.register_forward_hook(lambda module, inputs, output, index=index: run.append(index))
        if index > layer % 3:
            block.register_forward_pre_hook(fails)
    assert torch.equal(explain.attention(model, images, layer), expected)
    assert run == list(range(layer % 3 + 1))


def fails(module: Any, inputs: Any) -> None:
    raise AssertionError("a block runs that nothing needs")


# --- heads


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_each_map_equals_that_of_its_layer_and_head(options: dict[str, Any]) -> None:
    model = small_model(image_size=(16, 48), **options)
    images = random_images(2, 3, 16, 48)
    maps = head_maps(model, images)
    assert maps.shape == (2, 3, 2, *model.config.grid)
    assert maps.dtype == torch.float32
    assert not maps.requires_grad
    for layer in range(3):
        for head in range(2):
            torch.testing.assert_close(maps[:, layer, head], explain.attention(model, images, layer, head))
    torch.testing.assert_close(maps.amax(dim=(3, 4)), torch.ones(2, 3, 2))


# --- patch attention


@of_every_model
def test_map_is_the_patchs_row_of_the_traced_weights(options: dict[str, Any]) -> None:
    model = small_model(image_size=(16, 48), **options)
    images = images_of(model, 2)
    attention = model.trace(images, attention=True).attention
    gh, gw = model.config.grid
    for (layer, head), (row, column) in itertools.product(
        [(0, None), (1, 1), (-1, 0), (-3, None)], [(0, 0), (1, 0), (0, gw - 1), (gh - 1, gw - 2)]
    ):
        weights = attention[layer].detach().double().numpy()  # (B, heads, T, T)
        heat = patch_attention(model, images, (row, column), layer, head)
        assert heat.shape == (2, gh, gw)
        assert heat.dtype == torch.float32
        assert not heat.requires_grad
        for image in range(2):
            expected = np.zeros((gh, gw))
            for k in range(gh):
                for m in range(gw):
                    query, key = (
                        model.config.num_prefix_tokens + gw * line + place
                        for line, place in ((row, column), (k, m))
                    )
                    pair = weights[image, :, query, key]
                    expected[k, m] = pair.mean() if head is None else pair[head]
            message = f"layer {layer}, head {head}, patch {(row, column)}"
            np.testing.assert_allclose(heat[image], expected / expected.max(), atol=1e-5, err_msg=message)


# --- streams


@pytest.mark.parametrize("read", [slice(0, 1), slice(0, 2), slice(None)])
def test_last_block_yields_only_the_pooled_rows(read: slice) -> None:
    model, images = small_model(num_registers=1), random_images(2, 3, 32, 32)
    handed: list[Tensor] = []
    stream_attention(model, images, handed.append, read)
    traced = model.trace(images, attention=True).attention
    assert [weights.shape for weights in handed[:-1]] == [(2, 2, 18, 18)] * 2
    torch.testing.assert_close(handed[-1], traced[-1][:, :, read])
