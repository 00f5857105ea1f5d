"""Heatmaps by the name of a method, and what all methods and views have in common."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.analysis.explain.test_inputs import model_with_preprocess
from tests.contracts.method import check_method, check_resnet_rejected, check_view
from tests.models import random_images, small_model, small_resnet
from vitascope import explain
from vitascope.analysis.explain.methods import DEFAULT_METHOD, METHODS, methods_for
from vitascope.analysis.explain.targets import FeatureCosine
from vitascope.errors import UserError


def test_heatmap_equals_the_methods_with_its_settings() -> None:
    model, images = small_model(), random_images(2, 3, 32, 32)
    attention = explain.heatmap(model, images, "attention", layer=0, head=1)
    assert torch.equal(attention, explain.attention(model, images, layer=0, head=1))
    layer_cam = explain.heatmap(model, images, "layer-cam", 1, layer=1, batch_size=5)
    assert torch.equal(layer_cam, explain.grad_cam(model, images, 1, layer=1, variant="layer-cam"))
    occlusion = explain.heatmap(model, images, "occlusion", 1, window=2, batch_size=5)
    assert torch.equal(occlusion, explain.occlusion(model, images, 1, window=2, batch_size=5))


def test_default_method_is_the_same_everywhere() -> None:
    model, images = small_model(), random_images(1, 3, 32, 32)
    assert torch.equal(explain.heatmap(model, images), METHODS[DEFAULT_METHOD](model, images))


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("rolout", {}, "unknown method 'rolout'; nearest: rollout"),
        ("rollout", {"head": 1}, "head does not apply to rollout, only to attention"),
        ("rollout", {"target": 1}, "target does not apply to rollout, only to gradient-rollout, "),
        ("grad-cam", {"colour": "red"}, "colour does not apply to grad-cam$"),
    ],
)
def test_unknown_methods_and_settings_are_rejected(method: str, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        explain.heatmap(small_model(), random_images(1, 3, 32, 32), method, **settings)


def test_methods_suit_the_model_and_the_target() -> None:
    likeness = FeatureCosine(torch.ones(1, 16))
    assert set(methods_for(small_model())) == set(METHODS)
    assert set(methods_for(small_resnet())) == {name for name, each in METHODS.items() if not each.attends}
    assert set(methods_for(small_model(head="none"))) == {"attention", "rollout"}
    assert set(methods_for(small_model(head="none"), likeness)) == set(METHODS)


def test_methods_that_run_single_blocks_do_not_suit_a_merging_model() -> None:
    model = small_model(token_merging=2)
    fails = {"attention", "gradient-rollout", "grad-cam", "patching"}
    assert set(METHODS) - set(methods_for(model)) == fails
    for name in fails:
        assert "token_merging=0" in METHODS[name].lacking(model)
        with pytest.raises(UserError, match="cannot be run by itself"):
            METHODS[name](model, torch.zeros(1, 3, 32, 32))


# What all methods and views have in common

VIEWS: dict[str, Callable[..., Tensor]] = {
    **METHODS,
    "head maps": explain.head_maps,
    "patch attention": partial(explain.patch_attention, patch=(1, 1)),
    "attention distance": explain.attention_distance,
    "feature colours": explain.feature_colours,
}
OF_LAYERS = ("attention", "patch attention", "grad-cam", "feature colours")
NO_LAYERS = ((0, 0), (-1, 2), (1, 4), (2, 1))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        *((name, {"layer": 3}, "no layer 3: the model has 3, 0 to 2") for name in OF_LAYERS),
        *((name, {"layer": -4}, "no layer -4: the model has 3, 0 to 2") for name in OF_LAYERS),
        *((name, {"head": 2}, "no head 2: each layer has 2, 0 to 1") for name in OF_LAYERS[:2]),
        *((name, {"head": -1}, "no head -1: each layer has 2, 0 to 1") for name in OF_LAYERS[:2]),
        ("patch attention", {"patch": (4, 0)}, "no patch .*the grid is 4x4, rows 0 to 3 and columns 0 to 3"),
        ("patch attention", {"patch": (0, -1)}, "no patch .*the grid is 4x4, rows 0 to 3 and columns 0 to 3"),
        ("rollout", {"discard": 1.0}, r"discard must be in \[0, 1\)"),
        ("rollout", {"fusion": "avg"}, "unknown fusion 'avg'; .*mean"),
        ("occlusion", {"window": 5}, r"window must be in \[1, 4\], not 5"),
        ("occlusion", {"window": 1.5}, "window must be a whole number, not 1.5"),
        ("integrated-gradients", {"steps": 0}, "steps must be at least 1, not 0"),
        ("integrated-gradients", {"batch_size": 0}, "batch_size must be at least 1, not 0"),
        *(("patching", {"layers": pair}, f"<= 3, not {pair[0]} and {pair[1]}") for pair in NO_LAYERS),
    ],
)
def test_settings_that_do_not_fit_the_model_are_rejected(name, settings, message) -> None:
    with pytest.raises(UserError, match=message):
        VIEWS[name](small_model(), random_images(1, 3, 32, 32), **settings)


@pytest.mark.parametrize("name", METHODS)
def test_method(name: str) -> None:
    check_method(name)


@pytest.mark.parametrize("view", [view for name, view in VIEWS.items() if name not in METHODS])
def test_view(view: Callable[..., Tensor]) -> None:
    check_view(view)


def test_views_reject_a_resnet_and_an_empty_batch() -> None:
    for view in (explain.lens, explain.position_similarity, explain.patch_filters):
        check_resnet_rejected(
            lambda model, images, view=view: view(model, *[images] * (view is explain.lens))
        )
    model, empty = small_model(depth=1), torch.zeros(0, 3, 32, 32)
    for view in (explain.attention_distance, explain.feature_colours, explain.rollout):
        with pytest.raises(UserError, match="no images: give at least one"):
            view(model, empty if view is not explain.rollout else [])
    for method in ("libra", "patching"):
        assert explain.heatmap(model_with_preprocess(), empty, method).shape == (0, 4, 4)
