"""The maps of every head of every layer."""

from typing import Any

import pytest
import torch

from tests.explain import MODELS
from tests.model import random_images, small_model, small_resnet
from vitascope import explain
from vitascope.errors import UserError
from vitascope.explain.attention import head_maps


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_each_map_is_that_of_its_layer_and_head(options: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("training", [True, False])
def test_model_is_run_as_in_evaluation_and_left_as_it_was(training: bool) -> None:
    model = small_model(dropout=0.5, attention_dropout=0.5, drop_path=0.5)
    images = random_images(2, 3, 32, 32)
    expected = head_maps(model, images)
    model.train(training)
    torch.testing.assert_close(head_maps(model, images), expected)
    assert model.training is training


def test_a_resnet_is_refused() -> None:
    with pytest.raises(UserError, match="a ResNet has no attention to show"):
        head_maps(small_resnet(), random_images(1, 3, 32, 32))
