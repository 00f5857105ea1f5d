"""Heatmaps by the name of a method."""

import pytest
import torch

from tests.model import random_images, small_model, small_resnet
from vitascope import explain
from vitascope.errors import UserError
from vitascope.explain.methods import DEFAULT_METHOD, METHODS, check_settings, methods_for
from vitascope.explain.targets import FeatureCosine


def test_heatmap_equals_the_methods_with_its_settings() -> None:
    model, images = small_model(), random_images(2, 3, 32, 32)
    attention = explain.heatmap(model, images, "attention", layer=0, head=1)
    assert torch.equal(attention, explain.attention(model, images, layer=0, head=1))
    hires_cam = explain.heatmap(model, images, "hires-cam", 1, layer=1)
    assert torch.equal(hires_cam, explain.grad_cam(model, images, 1, layer=1, variant="hires-cam"))
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


def test_error_names_other_methods_that_have_the_setting() -> None:
    with pytest.raises(UserError, match="patch does not apply to rollout, only to one-patch"):
        check_settings("rollout", ["patch"], {"one-patch": ["patch"]})


def test_methods_suit_the_model_and_the_target() -> None:
    likeness = FeatureCosine(torch.ones(1, 16))
    assert set(methods_for(small_model())) == set(METHODS)
    assert set(methods_for(small_resnet())) == {name for name, each in METHODS.items() if not each.attends}
    assert set(methods_for(small_model(head="none"))) == {"attention", "rollout"}
    assert set(methods_for(small_model(head="none"), likeness)) == set(METHODS)


def test_methods_that_run_single_blocks_do_not_suit_a_merging_model() -> None:
    model = small_model(token_merging=2)
    fails = {"gradient-rollout", "grad-cam", "grad-cam++"}
    assert set(METHODS) - set(methods_for(model)) == fails
    for name in fails:
        assert "token_merging=0" in METHODS[name].lacking(model)
        with pytest.raises(UserError, match="cannot be run by itself"):
            METHODS[name](model, torch.zeros(1, 3, 32, 32))
