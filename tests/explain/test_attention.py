"""The attention of one layer as a map over the patches."""

import pytest
import torch
from torch import Tensor

from tests.model import random_images, small_model
from vitascope import explain
from vitascope.errors import UserError
from vitascope.model.vit import VisionTransformer

SHAPES = [{"image_size": 32}, {"image_size": (16, 40)}, {"image_size": (24, 32), "patch_size": (8, 4)}]


def images_of(model: VisionTransformer, count: int = 3) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


def directly(model: VisionTransformer, images: Tensor, layer: int, head: int | None) -> Tensor:
    """The same map from the traced weights, in float64, image by image."""
    attention = model.trace(images, attention=True).attention
    assert attention is not None
    maps = []
    for weights in attention[layer].double():  # (heads, T, T)
        chosen = weights.mean(dim=0) if head is None else weights[head]
        row = chosen[0, 1:] if model.config.pool == "cls" else chosen.mean(dim=0)
        maps.append(row.reshape(model.config.grid) / row.max())
    return torch.stack(maps)


@pytest.mark.parametrize("method", [explain.attention, explain.rollout])
@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("shape", SHAPES)
def test_heatmaps_have_the_grid_of_the_patches_and_largest_value_one(
    method: object, pool: str, shape: dict[str, object]
) -> None:
    model = small_model(pool=pool, **shape)
    heat = method(model, images_of(model))
    assert heat.shape == (3, *model.config.grid)
    assert heat.dtype == torch.float32
    assert not heat.requires_grad
    assert (heat >= 0).all()
    torch.testing.assert_close(heat.amax(dim=(1, 2)), torch.ones(3))
    assert heat.amin(dim=(1, 2)).max() < 0.999  # it tells patches apart
    assert not torch.allclose(heat[0], heat[1])  # and images


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("layer", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("head", [None, 0, 1])
def test_map_is_that_of_the_traced_weights(pool: str, layer: int, head: int | None) -> None:
    model = small_model(pool=pool, image_size=(24, 40))
    images = images_of(model)
    heat = explain.attention(model, images, layer, head)
    torch.testing.assert_close(heat.double(), directly(model, images, layer, head), atol=1e-6, rtol=1e-5)


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


def test_other_resolution_gives_its_own_grid() -> None:
    model = small_model()
    heat = explain.attention(model, random_images(2, 3, 48, 16))
    assert heat.shape == (2, 6, 2)


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


@pytest.mark.parametrize("method", [explain.attention, explain.rollout])
@pytest.mark.parametrize("training", [True, False])
def test_model_is_run_as_in_evaluation_and_left_as_it_was(method: object, training: bool) -> None:
    model = small_model(dropout=0.5, attention_dropout=0.5, drop_path=0.5)
    images = images_of(model)
    expected = method(model, images)
    model.train(training)
    torch.testing.assert_close(method(model, images), expected)
    assert model.training is training


@pytest.mark.parametrize("method", [explain.attention, explain.rollout])
def test_model_is_left_as_it_was_after_a_refusal_too(method: object) -> None:
    model = small_model().train()
    with pytest.raises(UserError):
        method(model, random_images(1, 3, 33, 32))
    assert model.training


def test_half_precision_model_gives_float32_maps() -> None:
    model = small_model()
    images = images_of(model)
    heat = explain.attention(model.to(torch.bfloat16), images.to(torch.bfloat16))
    assert heat.dtype == torch.float32
    assert explain.rollout(model, images.to(torch.bfloat16)).dtype == torch.float32
