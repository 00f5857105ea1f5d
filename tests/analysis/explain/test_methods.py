"""Heatmaps by the name of a method, and what all methods and views have in common."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.explain import MODELS
from tests.models import random_images, small_model, small_resnet
from vitascope import explain
from vitascope.analysis.explain.methods import DEFAULT_METHOD, METHODS, Method, methods_for
from vitascope.analysis.explain.targets import ClassDifference, ClassScore, FeatureCosine
from vitascope.errors import UserError


def test_heatmap_equals_the_methods_with_its_settings() -> None:
    model, images = small_model(), random_images(2, 3, 32, 32)
    attention = explain.heatmap(model, images, "attention", layer=0, head=1)
    assert torch.equal(attention, explain.attention(model, images, layer=0, head=1))
    layer_cam = explain.heatmap(model, images, "layer-cam", 1, layer=1, batch_size=5)
    assert torch.equal(layer_cam, explain.grad_cam(model, images, 1, layer=1, variant="layer-cam"))
    occlusion = explain.heatmap(model, images, "occlusion", 1, window=2, batch_size=5)
    assert torch.equal(occlusion, explain.occlusion(model, images, 1, window=2, batch_size=5))


@pytest.mark.parametrize("method", METHODS)
def test_numbers_before_scaling_are_those_of_the_heatmap(method: str) -> None:
    model, images = small_model(), random_images(2, 3, 32, 32)
    raw = explain.heatmap(model, images, method, scaled=False)
    positive = raw.clamp_min(0)
    torch.testing.assert_close(
        explain.heatmap(model, images, method), positive / positive.amax(dim=(1, 2), keepdim=True)
    )


def test_numbers_of_integrated_gradients_before_scaling_sum_to_the_change_of_the_score() -> None:
    model, images = small_model(), random_images(2, 3, 32, 32)
    raw = explain.heatmap(model, images, "integrated-gradients", 1, steps=200, scaled=False)
    change = (model(images) - model(torch.zeros_like(images)))[:, 1]
    torch.testing.assert_close(raw.sum(dim=(1, 2)), change, atol=1e-3, rtol=1e-2)


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
EXPLAINING = {name: method for name, method in METHODS.items() if method.has_target}
CLASSES = [4, 0, 2]
OF_LAYERS = ("attention", "patch attention", "grad-cam", "feature colours")
NO_LAYERS = ((0, 0), (-1, 2), (1, 4), (2, 1))

of_every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
of_every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
of_every_explanation = pytest.mark.parametrize("method", EXPLAINING.values(), ids=EXPLAINING)


@of_every_method
@pytest.mark.parametrize("name", MODELS)
def test_heatmap_has_the_patch_grid_and_a_maximum_of_one(method: Method, name: str) -> None:
    model = small_model(**MODELS[name])
    for size in ((32, 32), (48, 16)) if not method.lacking(model) else ():
        heat = method(model, random_images(2, 3, *size))
        assert heat.shape == (2, *model.config.grid_of(size))
        assert (heat.dtype, heat.requires_grad) == (torch.float32, False)
        assert heat.amin() >= 0
        largest = heat.amax(dim=(1, 2))
        assert ((largest - 1).abs() < 1e-6).logical_or(largest == 0).all()  # 0 without evidence


@of_every_method
@pytest.mark.parametrize("options", [{}, {"pool": "mean"}])
def test_each_image_is_explained_by_itself(method: Method, options: dict[str, Any]) -> None:
    model, images = small_model(**options), random_images(3, 3, 32, 32)
    alone = torch.cat([method(model, image[None]) for image in images])
    torch.testing.assert_close(method(model, images), alone, atol=1e-3, rtol=0)


@of_every_view
def test_model_runs_in_evaluation_mode_and_nothing_is_changed(view: Callable[..., Tensor]) -> None:
    model = small_model(dropout=0.5, attention_dropout=0.5, drop_path=0.5, patch_dropout=0.5)
    images = random_images(2, 3, 32, 32)
    expected, pixels = view(model, images), images.clone()
    model.head.weight.grad = torch.full_like(model.head.weight, 7)
    model.norm.weight.requires_grad_(False)
    model.train()
    model.head.eval()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    torch.testing.assert_close(view(model, images.requires_grad_()), expected)
    with pytest.raises(UserError):
        view(model, random_images(1, 3, 33, 32))
    assert {name for name, part in model.named_modules() if not part.training} == {"head"}
    assert torch.equal(images, pixels)
    assert images.grad is None
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    graded = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert graded == {"head.weight"}
    assert (model.head.weight.grad == 7).all()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"norm.weight"}


@of_every_view
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_result_is_the_same_without_gradients_and_of_a_frozen_model(
    view: Callable[..., Tensor], without: Any
) -> None:
    model, images = small_model(positions="rotary"), random_images(2, 3, 32, 32)
    expected = view(model, images)
    model.requires_grad_(False)
    with without():
        assert torch.equal(view(model, images.clone()), expected)
        assert not torch.is_grad_enabled()


@of_every_view
def test_half_precision_model_has_float32_results(view: Callable[..., Tensor]) -> None:
    model, images = small_model(), random_images(2, 3, 32, 32)
    expected = view(model, images)
    result = view(model.to(torch.bfloat16), images.to(torch.bfloat16))
    assert result.dtype == torch.float32
    if view is not explain.feature_colours:  # whose components of random weights have no margin
        assert np.corrcoef(result.flatten(), expected.flatten())[0, 1] > 0.97


OF_TOKENS = {
    **{name: view for name, view in VIEWS.items() if name not in METHODS or METHODS[name].attends},
    "lens": explain.lens,
    "positions": lambda model, images: explain.position_similarity(model),
    "filters": lambda model, images: explain.patch_filters(model),
}


@pytest.mark.parametrize("view", OF_TOKENS.values(), ids=OF_TOKENS)
def test_views_of_tokens_reject_a_resnet(view: Callable[..., Tensor]) -> None:
    with pytest.raises(UserError, match="a ResNet has no attention and no tokens to show"):
        view(small_resnet(), random_images(1, 3, 32, 32))


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
def test_settings_that_do_not_fit_the_model_are_rejected(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        VIEWS[name](small_model(), random_images(1, 3, 32, 32), **settings)


def test_what_needs_an_image_rejects_none() -> None:
    for view in (explain.attention_distance, explain.feature_colours):
        with pytest.raises(UserError, match="no images: give at least one"):
            view(small_model(), random_images(0, 3, 32, 32))


@of_every_explanation
def test_difference_of_classes_is_the_class_of_a_head_that_subtracts(method: Method) -> None:
    model, images = small_model(), random_images(3, 3, 32, 32)
    difference = method(model, images, ClassDifference(torch.tensor(CLASSES), torch.tensor([1])))
    with torch.no_grad():
        for parameter in (model.head.weight, model.head.bias):
            parameter[[0, 2, 3, 4]] -= parameter[1].clone()
    torch.testing.assert_close(difference, method(model, images, CLASSES), atol=1e-3, rtol=0)


@of_every_explanation
@pytest.mark.parametrize("pool", ["cls", "mean", "cls_mean"])
def test_likeness_is_the_class_of_a_head_of_cosines(method: Method, pool: str) -> None:
    images, other = random_images(2, 3, 32, 32), random_images(1, 3, 32, 32, seed=7)
    model, headless = small_model(pool=pool, head="cosine"), small_model(pool=pool, head="none")
    headless.load_state_dict(
        {name: values for name, values in model.state_dict().items() if "head" not in name}
    )
    features = headless.embed(other).detach()
    with torch.no_grad():
        model.head.classes[1] = features[0]
    by_class = method(model, images, 1)
    torch.testing.assert_close(method(headless, images, FeatureCosine(features)), by_class, atol=1e-3, rtol=0)


@of_every_explanation
def test_default_target_is_the_predicted_class(method: Method) -> None:
    model, images = small_model(seed=2, pool="mean"), random_images(4, 3, 32, 32)
    with torch.no_grad():
        model.head.bias -= model(images).mean(dim=0)  # so that images differ in their class
    predicted = model(images).argmax(dim=1)
    assert len(set(predicted.tolist())) > 1
    assert torch.equal(method(model, images), method(model, images, predicted))


@of_every_explanation
def test_class_is_selected_by_number_name_or_score(method: Method) -> None:
    model = small_model(class_names=("ant", "bee", "cat", "dog", "eel"))
    images = random_images(3, 3, 32, 32)
    expected = method(model, images, 2)
    for same in ("cat", torch.tensor(2), [2, "cat", 2], ClassScore(torch.tensor([2]))):
        assert torch.equal(method(model, images, same), expected)
    assert not torch.allclose(method(model, images, "dog"), expected)


@of_every_explanation
@pytest.mark.parametrize(
    ("options", "target", "message"),
    [
        ({}, 5, "no class 5; the model has 5, 0 to 4"),
        ({}, [0, -1], "no class -1"),
        ({}, [0, 1, 2], "3 classes for 2 images"),
        ({"class_names": ("ant", "bee", "cat", "dog", "eel")}, "cats", "no class 'cats'"),
        ({"head": "none"}, None, "this model has no head"),
        ({"head": "none"}, FeatureCosine(torch.ones(1, 3)), r"features \(B, 16\).*not \(1, 3\)"),
    ],
)
def test_invalid_target_is_rejected(
    method: Method, options: dict[str, Any], target: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        method(small_model(**options), random_images(2, 3, 32, 32), target)


@of_every_method
def test_heat_that_is_not_finite_is_rejected(method: Method) -> None:
    images = random_images(2, 3, 32, 32) * torch.tensor([1, float("nan")])[:, None, None, None]
    with pytest.raises(UserError, match="not finite"):
        method(small_model(), images)


@pytest.mark.parametrize("method", ["libra", "patching"])
def test_no_image_has_no_heatmap(method: str) -> None:
    model = small_model(depth=1)
    empty = torch.zeros(0, 3, *model.config.image_hw)
    assert explain.heatmap(model, empty, method).shape == (0, *model.config.grid)
