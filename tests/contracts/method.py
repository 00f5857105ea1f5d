"""The promises of a heatmap method, checked on one method, and those of every view of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.explain import MODELS
from tests.analysis.explain.test_inputs import PICTURES, model_with_preprocess, normalized
from tests.models import random_images, small_model, small_resnet
from vitascope import explain
from vitascope.analysis.explain.inputs import before_each_forward
from vitascope.analysis.explain.methods import METHODS, Method
from vitascope.analysis.explain.targets import ClassDifference, ClassScore, FeatureCosine
from vitascope.errors import UserError

NAMES = ("ant", "bee", "cat", "dog", "eel")
CLASSES = [4, 0, 2]
CUT = {"image_size": (38, 45), "patch_size": (7, 8), "remainder": "cut"}
close = {"atol": 1e-3, "rtol": 0}


def check_method(name: str) -> None:
    """Check every promise of a method."""
    method = METHODS[name]
    check_view(method)
    for options in MODELS.values():
        check_grid(method, options)
    for options in ({}, {"pool": "mean"}):
        model, images = small_model(**options), random_images(3, 3, 32, 32)
        alone = torch.cat([method(model, image[None]) for image in images])
        torch.testing.assert_close(method(model, images), alone, **close)
    positive = explain.heatmap(model, images, name, scaled=False).clamp_min(0)
    scaled = positive / positive.amax(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(explain.heatmap(model, images, name), scaled)
    cut, images = small_model(**CUT, head_init="init"), random_images(1, 3, 38, 45)
    assert torch.equal(method(cut, images), method(cut, images[:, :, :35, :40]))
    with pytest.raises(UserError, match="not finite"):
        method(small_model(), random_images(2, 3, 32, 32).fill_(torch.nan))
    if method.has_target:
        check_targets(method)
    if method.many_passes:
        check_passes(method)


def check_view(view: Callable[..., Tensor]) -> None:
    """A view runs in evaluation mode and changes nothing, with and without gradients, in any precision."""
    model = small_model(dropout=0.5, attention_dropout=0.5, drop_path=0.5, patch_dropout=0.5)
    images = random_images(2, 3, 32, 32)
    expected, pixels = view(model, images), images.clone()
    model.head.weight.grad = torch.full_like(model.head.weight, 7)
    model.norm.weight.requires_grad_(False)
    model.train().head.eval()
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

    model, images = small_model(positions="rotary"), random_images(2, 3, 32, 32)
    expected = view(model, images)
    model.requires_grad_(False)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert torch.equal(view(model, images.clone()), expected)
            assert not torch.is_grad_enabled()
    result = view(model.to(torch.bfloat16), images.to(torch.bfloat16))
    assert result.dtype == torch.float32
    if view is not explain.feature_colours:  # whose components of random weights have no margin
        assert np.corrcoef(result.flatten(), expected.flatten())[0, 1] > 0.97
    model = model_with_preprocess()
    assert torch.equal(view(model, PICTURES), view(model, normalized(model, PICTURES)))
    if not isinstance(view, Method) or view.attends:
        check_resnet_rejected(view)


def check_resnet_rejected(view: Callable[..., Any]) -> None:
    """A view of tokens says that a ResNet has none."""
    with pytest.raises(UserError, match="a ResNet has no attention and no tokens"):
        view(small_resnet(), random_images(1, 3, 32, 32))


def check_grid(method: Method, options: dict[str, Any]) -> None:
    """A heatmap has the grid of the patches, at any size, and 1 as its largest value."""
    model = small_model(**options)
    for size in ((32, 32), (48, 16)) if not method.lacking(model) else ():
        heat = method(model, random_images(2, 3, *size))
        assert heat.shape == (2, *model.config.grid_of(size))
        assert (heat.dtype, heat.requires_grad) == (torch.float32, False)
        assert heat.amin() >= 0
        largest = heat.amax(dim=(1, 2))
        assert ((largest - 1).abs() < 1e-6).logical_or(largest == 0).all()  # 0 without evidence


def check_targets(method: Method) -> None:
    """A class by number, name or score, the predicted one, a difference of two, the likeness to a picture."""
    model, images = small_model(class_names=NAMES), random_images(3, 3, 32, 32)
    expected = method(model, images, 2)
    for same in ("cat", torch.tensor(2), [2, "cat", 2], ClassScore(torch.tensor([2]))):
        assert torch.equal(method(model, images, same), expected)
    assert not torch.allclose(method(model, images, "dog"), expected)
    difference = method(model, images, ClassDifference(torch.tensor(CLASSES), torch.tensor([1])))
    with torch.no_grad():
        for parameter in (model.head.weight, model.head.bias):
            parameter[[0, 2, 3, 4]] -= parameter[1].clone()
    torch.testing.assert_close(difference, method(model, images, CLASSES), **close)

    model = small_model(seed=2, pool="mean")
    with torch.no_grad():
        model.head.bias -= model(images).mean(dim=0)  # so that images differ in their class
    predicted = model(images).argmax(dim=1)
    assert len(set(predicted.tolist())) > 1
    assert torch.equal(method(model, images), method(model, images, predicted))

    for pool in ("cls", "mean", "cls_mean"):
        model, headless = small_model(pool=pool, head="cosine"), small_model(pool=pool, head="none")
        headless.load_state_dict(model.state_dict(), strict=False)
        features = headless.embed(random_images(1, 3, 32, 32, seed=7)).detach()
        with torch.no_grad():
            model.head.classes[1] = features[0]
        likeness = method(headless, images, FeatureCosine(features))
        torch.testing.assert_close(likeness, method(model, images, 1), **close)
    for target, message in ((None, "this model has no head"), (FeatureCosine(features[:, :3]), "features")):
        with pytest.raises(UserError, match=message):
            method(headless, images, target)
    with pytest.raises(UserError, match="2 classes for 3 images"):
        method(model, images, [0, 1])


def check_passes(method: Method) -> None:
    """Passes are of at most the batch size, which changes no number, and a hook before each can end them."""
    model = small_model()
    images = random_images(1, 3, 32, 32)
    passes: list[int] = []
    pauses: list[int] = []
    pool = model.pool_features

    def counting(features: Tensor) -> Tensor:
        passes.append(len(features))
        return pool(features)

    def end_at_the_fourth() -> None:
        pauses.append(len(passes))
        if len(pauses) == 4:
            raise InterruptedError

    expected = method(model, images, 1)
    model.pool_features = counting  # type: ignore[method-assign]
    with before_each_forward(end_at_the_fourth), pytest.raises(InterruptedError):
        method(model, images, 1, batch_size=2)
    assert max(passes) <= 2
    assert pauses == [0, 1, 2, 3]
    torch.testing.assert_close(method(model, images, 1, batch_size=2), expected, atol=1e-4, rtol=0)
    assert len(pauses) == 4  # the hook ended with its block
