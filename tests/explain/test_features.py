"""The principal components of the patches' features, as colours."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.explain import MODELS
from tests.model import random_images, small_model, small_resnet
from vitascope.errors import UserError
from vitascope.explain.learned import feature_colours
from vitascope.model.vit import VisionTransformer

SHAPES = [{}, {"image_size": (16, 48)}, {"image_size": (24, 32), "patch_size": (12, 4)}]


def images_of(model: VisionTransformer, count: int = 3) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


def directly(model: VisionTransformer, images: Tensor, layer: int) -> np.ndarray:
    """The same from a trace, in float64, component by component."""
    trace = model.trace(images)
    tokens = model.norm(trace[f"block{layer % model.config.depth}"])[:, model.config.num_prefix_tokens :]
    features = tokens.detach().double().numpy().reshape(-1, model.config.embed_dim)
    features = features - features.mean(axis=0)
    _, _, components = np.linalg.svd(features, full_matrices=False)
    colours = np.empty((len(features), 3))
    for channel in range(3):
        component = components[channel]
        if component[np.abs(component).argmax()] < 0:
            component = -component
        score = features @ component
        colours[:, channel] = np.clip(0.5 + score / (4 * score.std()), 0, 1)
    return colours.reshape(len(images), *model.config.grid, 3)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layer", [0, -1])
def test_colours_are_the_scores_of_the_first_three_components(
    options: dict[str, Any], shape: dict[str, Any], layer: int
) -> None:
    model = small_model(**options, **shape)
    images = images_of(model)
    colours = feature_colours(model, images, layer)
    assert colours.shape == (3, *model.config.grid, 3)
    assert colours.dtype == torch.float32
    assert not colours.requires_grad
    assert colours.min() >= 0
    assert colours.max() <= 1
    np.testing.assert_allclose(colours, directly(model, images, layer), atol=1e-3)


def test_last_layer_is_the_default_and_that_of_forward_features() -> None:
    model = small_model()
    images = images_of(model)
    colours = feature_colours(model, images)
    assert torch.equal(colours, feature_colours(model, images, 2))
    with torch.no_grad():
        features = model.forward_features(images)[:, 1:].flatten(0, 1)  # (B * N, D)
    centred = (features - features.mean(dim=0)).numpy()
    strongest = np.abs(centred @ np.linalg.svd(centred)[2][0])
    away = (colours[..., 0] - 0.5).abs().flatten().numpy()
    assert np.corrcoef(strongest, away)[0, 1] > 0.95  # but for what is cut off at the ends


def test_a_colour_means_the_same_in_each_image() -> None:
    model = small_model()
    one, other = images_of(model, 2)
    colours = feature_colours(model, torch.stack([one, other, one]))
    torch.testing.assert_close(colours[0], colours[2])
    turned = feature_colours(model, torch.stack([other, one, one]))
    torch.testing.assert_close(turned, colours[[1, 0, 2]], atol=1e-4, rtol=0)


def test_patches_that_differ_have_other_colours_than_patches_that_are_alike() -> None:
    model = small_model(positions="none")
    images = torch.zeros(1, 3, 32, 32)
    images[..., 16:] = 1  # the right half is white
    colours = feature_colours(model, images)[0]
    torch.testing.assert_close(colours[:, :2], colours[:1, :1].expand(4, 2, 3))
    torch.testing.assert_close(colours[:, 2:], colours[:1, 3:].expand(4, 2, 3))
    assert (colours[0, 0, 0] - colours[0, 3, 0]).abs() == pytest.approx(0.5, abs=1e-3)
    assert torch.equal(colours[..., 1:], torch.full((4, 4, 2), 0.5))  # they differ in one direction


def test_patches_that_are_all_alike_are_grey() -> None:
    model = small_model(positions="none")
    assert torch.equal(feature_colours(model, torch.ones(2, 3, 32, 32)), torch.full((2, 4, 4, 3), 0.5))


@pytest.mark.parametrize("layer", [3, -4])
def test_layer_that_is_not_there_names_the_range(layer: int) -> None:
    model = small_model()
    with pytest.raises(UserError, match=f"no layer {layer}: the model has 3, 0 to 2"):
        feature_colours(model, images_of(model), layer)


@pytest.mark.parametrize("training", [True, False])
def test_model_is_run_as_in_evaluation_and_left_as_it_was(training: bool) -> None:
    model = small_model(dropout=0.5, attention_dropout=0.5, drop_path=0.5, patch_dropout=0.5)
    images = images_of(model)
    expected = feature_colours(model, images)
    model.train(training)
    torch.testing.assert_close(feature_colours(model, images), expected)
    assert model.training is training


def test_half_precision_model_has_float32_colours() -> None:
    model = small_model()
    images = images_of(model)
    colours = feature_colours(model.to(torch.bfloat16), images.to(torch.bfloat16))
    assert colours.dtype == torch.float32


def test_no_images_are_refused() -> None:
    with pytest.raises(UserError, match="give at least one"):
        feature_colours(small_model(), random_images(0, 3, 32, 32))


def test_a_resnet_is_refused() -> None:
    with pytest.raises(UserError, match="a ResNet has no attention to show"):
        feature_colours(small_resnet(), random_images(1, 3, 32, 32))


def test_features_that_are_not_finite_are_refused() -> None:
    model = small_model()
    images = images_of(model)
    images[0, 0, 0, 0] = float("nan")
    with pytest.raises(UserError, match="finite"):
        feature_colours(model, images)
