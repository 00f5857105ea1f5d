"""What one patch attends to."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.explain import MODELS
from tests.model import random_images, small_model, small_resnet
from vitascope.errors import UserError
from vitascope.explain.attention import patch_attention
from vitascope.model.vit import VisionTransformer


def images_of(model: VisionTransformer, count: int = 2) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("layer", "head"), [(0, None), (1, 1), (-1, 0), (-3, None)])
def test_map_is_the_row_of_the_patch_in_the_traced_weights(
    options: dict[str, Any], layer: int, head: int | None
) -> None:
    model = small_model(image_size=(16, 48), **options)
    images = images_of(model)
    attention = model.trace(images, attention=True).attention
    assert attention is not None
    weights = attention[layer].detach().double().numpy()  # (B, heads, T, T)
    gh, gw = model.config.grid
    for row, column in ((0, 0), (1, 0), (0, gw - 1), (gh - 1, gw - 2)):
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
            np.testing.assert_allclose(heat[image], expected / expected.max(), atol=1e-5)


def test_last_layer_and_mean_of_heads_are_the_default() -> None:
    model = small_model()
    images = images_of(model)
    assert torch.equal(
        patch_attention(model, images, (1, 2)), patch_attention(model, images, (1, 2), 2, None)
    )


def test_patch_attends_within_its_window() -> None:
    model = small_model(attention="window", window=2)
    heat = patch_attention(model, images_of(model), (1, 2))
    assert (heat[:, :2, 2:] > 0).all()
    assert heat.sum() == heat[:, :2, 2:].sum()


def test_patch_that_attends_to_other_tokens_alone_has_a_map_of_zeros() -> None:
    model = small_model(depth=1, num_heads=1, positions="none", num_registers=1)
    attention = model.encoder.blocks[0].attention
    with torch.no_grad():  # the register's key is far along the queries of all
        for parameter in model.encoder.blocks[0].norm1.parameters():
            parameter.fill_(1)
        model.encoder.blocks[0].norm1.bias.zero_()
        attention.qkv.weight.zero_()
        attention.qkv.bias.fill_(1)
        attention.qkv.weight[16:32, 0] = 500
        model.class_token.fill_(1)
        model.patch_embedding.weight.zero_()
        model.patch_embedding.bias.copy_(torch.tensor([-9.0] + [1.0] * 15))
        model.registers.copy_(torch.tensor([9.0] + [0.0] * 15))
    heat = patch_attention(model, images_of(model), (0, 0))
    assert torch.equal(heat, torch.zeros(2, 4, 4))


@pytest.mark.parametrize("patch", [(2, 0), (-1, 0), (0, 6), (0, -1), (5, 1)])
def test_patch_that_is_not_there_names_rows_and_columns(patch: tuple[int, int]) -> None:
    model = small_model(image_size=(16, 48))
    with pytest.raises(UserError, match=r"no patch .*the grid is 2x6, rows 0 to 1 and columns 0 to 5"):
        patch_attention(model, images_of(model), patch)


@pytest.mark.parametrize("layer", [3, -4])
def test_layer_that_is_not_there_names_the_range(layer: int) -> None:
    model = small_model()
    with pytest.raises(UserError, match=f"no layer {layer}: the model has 3, 0 to 2"):
        patch_attention(model, images_of(model), (0, 0), layer)


@pytest.mark.parametrize("head", [2, -1])
def test_head_that_is_not_there_names_the_range(head: int) -> None:
    model = small_model()
    with pytest.raises(UserError, match=f"no head {head}: each layer has 2, 0 to 1"):
        patch_attention(model, images_of(model), (0, 0), head=head)


@pytest.mark.parametrize("training", [True, False])
def test_model_is_run_as_in_evaluation_and_left_as_it_was(training: bool) -> None:
    model = small_model(dropout=0.5, attention_dropout=0.5, drop_path=0.5, patch_dropout=0.5)
    images = images_of(model)
    expected = patch_attention(model, images, (0, 1))
    model.train(training)
    torch.testing.assert_close(patch_attention(model, images, (0, 1)), expected)
    assert model.training is training


def test_a_resnet_is_refused() -> None:
    with pytest.raises(UserError, match="a ResNet has no attention to show"):
        patch_attention(small_resnet(), random_images(1, 3, 32, 32), (0, 0))
