"""Gradient-weighted rollout against the paper's recursion over whole matrices, bottom up, in float64."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.explain import MODELS, shares
from tests.model import random_images, small_model, small_resnet
from vitascope.errors import UserError
from vitascope.explain.gradient_rollout import gradient_rollout
from vitascope.explain.targets import ClassDifference, FeatureCosine
from vitascope.model.trace import Trace
from vitascope.model.vit import VisionTransformer

HYBRID = {"stem": "resnet", "resnet_layers": (1, 2), "resnet_width": 4}
CLASSES = [4, 0, 2]

Score = Callable[[Trace], Tensor]

of_every_model = pytest.mark.parametrize("options", [*MODELS.values(), HYBRID], ids=[*MODELS, "resnet stem"])


def logits_of(classes: list[int]) -> Score:
    return lambda trace: sum(trace["logits"][image, index] for image, index in enumerate(classes))


def by_recursion(model: VisionTransformer, images: Tensor, score: Score) -> np.ndarray:
    """R = I, then R <- R + E_h[(dA * A)+] R from the first layer up; of R - I the rows that pooling reads."""
    trace = copy.deepcopy(model).double().trace(images.double(), attention=True)
    assert trace.attention is not None
    gradients = torch.autograd.grad(score(trace), trace.attention)
    config = model.config.replace(image_size=tuple(images.shape[2:]))
    P, T = config.num_prefix_tokens, config.num_tokens
    maps = []
    for image in range(len(images)):
        R = np.eye(T)
        for weights, gradient in zip(trace.attention, gradients, strict=True):
            by_head = (gradient * weights)[image].detach().numpy()  # (heads, T, T)
            R = R + np.maximum(by_head, 0).mean(axis=0) @ R
        received = (shares(config) @ (R - np.eye(T)))[P:].reshape(config.grid)
        maps.append(received / received.max())
    return np.stack(maps)


def assert_is_recursion(
    model: VisionTransformer, images: Tensor, target: Any, score: Score, tolerance: float = 2e-5
) -> None:
    heat = gradient_rollout(model, images, target)
    assert heat.dtype == torch.float32
    np.testing.assert_allclose(heat.numpy(), by_recursion(model, images, score), atol=tolerance)


@of_every_model
@pytest.mark.parametrize("shape", [{}, {"image_size": (16, 48), "num_heads": 4}])
def test_relevance_is_that_of_the_papers_recursion(options: dict[str, Any], shape: dict[str, Any]) -> None:
    model = small_model(**options, **shape)
    images = random_images(3, 3, *model.config.image_hw)
    assert_is_recursion(model, images, CLASSES, logits_of(CLASSES))


@pytest.mark.parametrize("depth", [1, 2, 6])
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_depth_is_the_length_of_the_recursion(depth: int, pool: str) -> None:
    model = small_model(depth=depth, pool=pool)
    assert_is_recursion(model, random_images(3, 3, 32, 32), CLASSES, logits_of(CLASSES))


@pytest.mark.parametrize("name", ["class_token", "rotary", "relative", "mean_beside_registers"])
def test_other_resolution_gives_its_own_grid(name: str) -> None:
    model, images = small_model(**MODELS[name]), random_images(3, 3, 48, 16)
    assert gradient_rollout(model, images, CLASSES).shape == (3, 6, 2)
    assert_is_recursion(model, images, CLASSES, logits_of(CLASSES))


def test_a_difference_of_classes_is_one_number_to_explain() -> None:
    model, images = small_model(), random_images(3, 3, 32, 32)
    target = ClassDifference(torch.tensor(CLASSES), torch.tensor([1]))

    def score(trace: Trace) -> Tensor:
        return logits_of(CLASSES)(trace) - trace["logits"][:, 1].sum()

    assert_is_recursion(model, images, target, score)


@pytest.mark.parametrize("options", [{}, {"distillation_token": True}, {"pool": "mean"}])
def test_likeness_is_explained_where_there_are_no_classes(options: dict[str, Any]) -> None:
    model, images = small_model(head="none", **options), random_images(3, 3, 32, 32)
    features = model.embed(random_images(1, 3, 32, 32, seed=7)).detach()

    def score(trace: Trace) -> Tensor:
        y, other = trace["pooled"], features.double()
        return ((y * other).sum(dim=1) / y.norm(dim=1) / other.norm()).sum()

    assert_is_recursion(model, images, FeatureCosine(features), score)


def test_image_without_evidence_is_all_zeros() -> None:
    model = small_model()
    with torch.no_grad():
        model.head.weight[2] = 0  # nothing raises this class
    assert torch.equal(gradient_rollout(model, random_images(2, 3, 32, 32), 2), torch.zeros(2, 4, 4))


def test_the_size_of_the_score_does_not_matter() -> None:
    """Of one layer, where relevance is linear in the gradient."""
    model, images = small_model(depth=1), random_images(2, 3, 32, 32)
    expected = gradient_rollout(model, images, 1)
    with torch.no_grad():
        model.head.weight.mul_(1000)
        model.head.bias.add_(5)
    torch.testing.assert_close(gradient_rollout(model, images, 1), expected)


def test_what_lowers_the_score_is_no_evidence() -> None:
    """Of one layer, a pair of tokens raises the score or its negative, in each head."""
    model, images = small_model(depth=1, num_heads=1), random_images(2, 3, 32, 32)
    up = gradient_rollout(model, images, ClassDifference(torch.tensor([1]), torch.tensor([3]))) > 0
    down = gradient_rollout(model, images, ClassDifference(torch.tensor([3]), torch.tensor([1]))) > 0
    assert not (up & down).any()
    assert (up | down).all()
    assert 0 < up.sum() < up.numel()


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_attention_of_two_layers_is_never_there_at_once(pool: str) -> None:
    model, images = small_model(depth=4, pool=pool), random_images(2, 3, 32, 32)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(weights: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any) -> Tensor:
            alive.append(sum(each() is not None for each in made))
            result = weights(*args)
            made.append(weakref.ref(result))
            return result

        return make

    for block in model.encoder.blocks:
        block.attention.weights = watched(block.attention.weights)
    gradient_rollout(model, images)
    assert alive == [0] * 4


def test_a_resnet_is_refused() -> None:
    with pytest.raises(UserError, match="a ResNet has no attention to show"):
        gradient_rollout(small_resnet(), random_images(1, 3, 32, 32))
