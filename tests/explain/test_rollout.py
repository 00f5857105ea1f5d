"""Attention rollout against the paper's recursion, written again in NumPy."""

import copy
from typing import Any, get_args

import numpy as np
import pytest
import torch

from tests.explain import MODELS, heatmap
from tests.model import random_images, small_model
from vitascope import explain
from vitascope.errors import UserError
from vitascope.explain.rollout import Fusion, without_smallest
from vitascope.model.vit import VisionTransformer

FUSE = {"mean": np.mean, "max": np.max, "min": np.min}
HYBRID = {"stem": "resnet", "resnet_layers": (1, 2), "resnet_width": 4}
SOME = ["class_token", "distilled_registers", "mean", "map", "class_and_mean", "rotary", "post_norm"]


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


@pytest.mark.parametrize("options", [*MODELS.values(), HYBRID], ids=[*MODELS, "resnet stem"])
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


# Fusion and discarding


def fused_in_numpy(
    model: VisionTransformer, images: torch.Tensor, fusion: Fusion, discard: float
) -> np.ndarray:
    """Every image and layer by itself, in float64; rows of fused weights need not sum to one."""
    traced = copy.deepcopy(model).double().trace(images.double(), attention=True).attention
    assert traced is not None
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


@pytest.mark.parametrize("fusion", get_args(Fusion))
@pytest.mark.parametrize("discard", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("name", SOME)
def test_heads_are_fused_and_the_smallest_weights_discarded(
    name: str, fusion: Fusion, discard: float
) -> None:
    model, images = small_model(num_heads=4, **MODELS[name]), random_images(3, 3, 32, 32)
    heat = explain.rollout(model, images, fusion, discard)
    np.testing.assert_allclose(heat, fused_in_numpy(model, images, fusion, discard), atol=1e-5)


@pytest.mark.parametrize("options", [HYBRID, {"image_size": (16, 48)}, {"num_registers": 2}])
def test_other_resolutions_are_fused_alike(options: dict[str, Any]) -> None:
    model, images = small_model(**options), random_images(2, 3, 48, 16)
    heat = explain.rollout(model, images, "max", 0.5)
    assert heat.shape == (2, 6, 2)
    np.testing.assert_allclose(heat, fused_in_numpy(model, images, "max", 0.5), atol=1e-5)


@pytest.mark.parametrize("discard", [0.0, 0.6])
@pytest.mark.parametrize("fusion", get_args(Fusion))
def test_each_image_is_rolled_out_by_itself(fusion: Fusion, discard: float) -> None:
    model, images = small_model(), random_images(4, 3, 32, 32)
    images[1] *= 20
    images[2] = 0
    alone = [explain.rollout(model, image[None], fusion, discard) for image in images]
    torch.testing.assert_close(explain.rollout(model, images, fusion, discard), torch.cat(alone))


def test_the_smallest_share_of_each_image_is_set_to_zero() -> None:
    weights = torch.tensor([[[0.1, 0.4], [0.3, 0.2]], [[9.0, 8.0], [7.0, 6.0]]])
    expected = torch.tensor([[[0.0, 0.4], [0.3, 0.0]], [[9.0, 8.0], [0.0, 0.0]]])
    assert torch.equal(without_smallest(weights.clone(), 0.5), expected)
    assert torch.equal(without_smallest(weights.clone(), 0.2), weights)  # less than one of four


def test_a_small_share_is_not_the_same_as_none() -> None:
    model, images = small_model(), random_images(1, 3, 32, 32)
    assert not torch.allclose(explain.rollout(model, images, discard=0.05), explain.rollout(model, images))


@pytest.mark.parametrize("discard", [1.0, -0.1, 90, float("nan")])
def test_a_share_outside_zero_to_one_is_refused(discard: float) -> None:
    with pytest.raises(UserError, match=r"discard is a share in \[0, 1\), not"):
        explain.rollout(small_model(), random_images(1, 3, 32, 32), discard=discard)


def test_an_unknown_fusion_names_those_there_are() -> None:
    with pytest.raises(UserError, match=r"fusion.*mean"):
        explain.rollout(small_model(), random_images(1, 3, 32, 32), fusion="avg")
