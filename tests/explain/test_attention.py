"""The attention of one layer as a map over the patches."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.explain import MODELS, heatmap, shares
from tests.model import random_images, small_model, small_resnet
from vitascope import explain
from vitascope.errors import UserError
from vitascope.explain.attention import layer_attention, to_heatmap
from vitascope.model.vit import VisionTransformer

SHAPES = [{"image_size": 32}, {"image_size": (16, 48)}, {"image_size": (24, 32), "patch_size": (12, 4)}]
METHODS = [explain.attention, explain.rollout]

of_every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def images_of(model: VisionTransformer, count: int = 3) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


def directly(model: VisionTransformer, images: Tensor, layer: int, head: int | None) -> np.ndarray:
    """The same map from the traced weights, in float64, image by image."""
    attention = model.trace(images, attention=True).attention
    assert attention is not None
    maps = []
    for weights in attention[layer].detach().double().numpy():  # (heads, T, T)
        maps.append(heatmap(model.config, weights.mean(axis=0) if head is None else weights[head]))
    return np.stack(maps)


@of_every_model
def test_tokens_that_count_are_those_that_the_model_pools(options: dict[str, Any]) -> None:
    model = small_model(**options)
    share = shares(model.config)
    assert share.sum() == pytest.approx(1)
    tokens = random_images(1, model.config.num_tokens, model.config.embed_dim).requires_grad_()
    model.pool(tokens).square().sum().backward()
    assert tokens.grad is not None
    np.testing.assert_array_equal(tokens.grad[0].abs().sum(dim=1) > 0, share > 0)
    if model.config.option("pool") != "map":  # the others are linear: of the identity, they give the shares
        pooled = model.pool(torch.eye(len(share))[None]).reshape(-1, len(share))
        np.testing.assert_allclose(pooled.mean(dim=0), share, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
@of_every_model
@pytest.mark.parametrize("shape", SHAPES)
def test_heatmaps_have_the_grid_of_the_patches_and_largest_value_one(
    method: Any, options: dict[str, Any], shape: dict[str, Any]
) -> None:
    model = small_model(**options, **shape)
    heat = method(model, images_of(model))
    assert heat.shape == (3, *model.config.grid)
    assert heat.dtype == torch.float32
    assert not heat.requires_grad
    assert (heat >= 0).all()
    torch.testing.assert_close(heat.amax(dim=(1, 2)), torch.ones(3))
    assert heat.amin(dim=(1, 2)).max() < 0.999  # it tells patches apart
    assert not torch.allclose(heat[0], heat[1])  # and images


@of_every_model
@pytest.mark.parametrize("layer", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("head", [None, 0, 1])
def test_map_is_that_of_the_traced_weights(options: dict[str, Any], layer: int, head: int | None) -> None:
    model = small_model(image_size=(16, 48), **options)
    images = images_of(model)
    heat = explain.attention(model, images, layer, head).numpy()
    np.testing.assert_allclose(heat, directly(model, images, layer, head), atol=1e-6, rtol=1e-5)


@of_every_model
def test_map_shows_only_what_goes_from_tokens_that_are_read_to_patches(options: dict[str, Any]) -> None:
    model = small_model(**options)
    images, T = images_of(model), model.config.num_tokens
    rows = torch.rand(3, T, T, generator=torch.Generator().manual_seed(0))
    others = rows.clone()
    others[:, shares(model.config) == 0] = torch.rand(T)
    others[:, :, : model.config.num_prefix_tokens] = 9.0
    heat = to_heatmap(model, images, rows)
    assert torch.equal(to_heatmap(model, images, others), heat)
    np.testing.assert_allclose(heat, [heatmap(model.config, row) for row in rows.double().numpy()], atol=1e-6)


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


def test_weights_of_a_layer_are_whole_as_traced() -> None:
    model = small_model(distillation_token=True).train()
    images = images_of(model)
    traced = model.eval().trace(images, attention=True).attention
    assert traced is not None
    for layer in (0, 2, -1):
        weights = layer_attention(model.train(), images, layer)
        assert model.training
        assert not weights.requires_grad
        torch.testing.assert_close(weights, traced[layer])


def test_last_layer_and_mean_of_heads_are_the_default() -> None:
    model = small_model()
    images = images_of(model)
    assert torch.equal(explain.attention(model, images), explain.attention(model, images, 2, None))


def test_patch_that_the_class_token_looks_at_is_the_warmest() -> None:
    model = small_model(depth=1, num_heads=1, embed_dim=8)
    with torch.no_grad():  # keys that are large for patches of one colour, a constant query
        model.encoder.blocks[0].attention.qkv.weight.zero_()
        model.encoder.blocks[0].attention.qkv.bias.fill_(1)
        model.positions.weight.zero_()
        model.positions.weight[0, 1 + 6] = torch.tensor([9.0] + [0.0] * 7)  # patch 6: row 1, column 2
        model.encoder.blocks[0].attention.qkv.weight[8:16, 0] = 5
        model.patch_embedding.weight.zero_()
        model.patch_embedding.bias.fill_(1)
        model.class_token.fill_(1)
        model.encoder.blocks[0].norm1.weight.fill_(1)
        model.encoder.blocks[0].norm1.bias.zero_()
    heat = explain.attention(model, images_of(model, 1))[0]
    assert divmod(int(heat.argmax()), 4) == (1, 2)
    assert heat.flatten().sort().values[-2] < 0.5


@pytest.mark.parametrize("method", METHODS)
@of_every_model
def test_other_resolution_gives_its_own_grid(method: Any, options: dict[str, Any]) -> None:
    model = small_model(**options)
    images = random_images(2, 3, 48, 16)
    heat = method(model, images)
    assert heat.shape == (2, *model.config.grid_of((48, 16)))
    model.resize((48, 16))
    assert torch.equal(method(model, images), heat)


@pytest.mark.parametrize("layer", [3, 99, -4])
def test_layer_that_is_not_there_names_the_range(layer: int) -> None:
    model = small_model()
    with pytest.raises(UserError, match=rf"no layer {layer}: the model has 3, 0 to 2"):
        explain.attention(model, images_of(model), layer=layer)


@pytest.mark.parametrize("head", [2, -1])
def test_head_that_is_not_there_names_the_range(head: int) -> None:
    model = small_model()
    with pytest.raises(UserError, match=rf"no head {head}: each layer has 2, 0 to 1"):
        explain.attention(model, images_of(model), head=head)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("training", [True, False])
def test_model_is_run_as_in_evaluation_and_left_as_it_was(method: Any, training: bool) -> None:
    model = small_model(dropout=0.5, attention_dropout=0.5, drop_path=0.5, patch_dropout=0.5)
    images = images_of(model)
    expected = method(model, images)
    model.train(training)
    torch.testing.assert_close(method(model, images), expected)
    assert model.training is training


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("without", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_nothing_of_model_and_images_is_changed(method: Any, without: Any) -> None:
    model, images = small_model(), random_images(2, 3, 32, 32)
    expected, values = method(model, images), images.clone()
    images.requires_grad_()
    with without():
        assert torch.equal(method(model, images), expected)
    assert images.grad is None
    assert images.requires_grad
    assert torch.equal(images, values)
    for parameter in model.parameters():
        assert parameter.grad is None
        assert parameter.requires_grad


@pytest.mark.parametrize("method", METHODS)
def test_model_is_left_as_it_was_after_a_refusal_too(method: Any) -> None:
    model = small_model().train()
    with pytest.raises(UserError):
        method(model, random_images(1, 3, 33, 32))
    assert model.training


@pytest.mark.parametrize("method", METHODS)
@of_every_model
def test_half_precision_model_gives_float32_maps(method: Any, options: dict[str, Any]) -> None:
    model = small_model(**options)
    images = images_of(model)
    expected = method(model, images)
    heat = method(model.to(torch.bfloat16), images.to(torch.bfloat16))
    assert heat.dtype == torch.float32
    torch.testing.assert_close(heat, expected, atol=0.1, rtol=0)


def test_a_model_that_looks_at_no_patch_has_a_map_of_zeros() -> None:
    model = small_model(num_registers=1)
    rows = torch.zeros(2, 18, 18)
    rows[:, :, 1] = 1  # everything looks at the register
    assert torch.equal(to_heatmap(model, random_images(2, 3, 32, 32), rows), torch.zeros(2, 4, 4))


def test_a_resnet_is_refused() -> None:
    for method in METHODS:
        with pytest.raises(UserError, match="a ResNet has no attention to show"):
            method(small_resnet(), random_images(1, 3, 32, 32))
