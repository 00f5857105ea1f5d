"""Libra input x gradient: what it adds up to, for every option of a model."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models import VARIANTS, random_images, small_model, small_resnet
from vitascope.analysis.explain.inputs import pooled_and_logits
from vitascope.analysis.explain.libra import RULES, LinearBackward, libra, pixel_contributions
from vitascope.analysis.explain.targets import ClassDifference, ClassScore, FeatureCosine, Target
from vitascope.models import token_merging
from vitascope.models.vision_model import VisionModel

libra_module = importlib.import_module(
    "vitascope.analysis.explain.libra"
)  # the package has a function of this name
CLASSES = ClassScore(torch.tensor([1, 3]))
MODELS = {name: (small_model, options) for name, options in VARIANTS.items()}
MODELS |= {"a ResNet": (small_resnet, {}), "a ResNet of CIFAR": (small_resnet, {"root": "cifar"})}


class Tape:
    """The results of some functions in one pass; after `rewind`, they return them again, in order."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.replay: Any = None

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any) -> Any:
            if self.replay is not None:
                return next(self.replay)
            self.results.append(function(*args))
            return self.results[-1]

        return recorded

    def rewind(self) -> None:
        self.replay = iter(self.results)


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    """Records all that is constant in the backward pass: also the sides of relus, the winners of pools and
    the pairs of merged tokens."""
    tape = Tape()
    constant = tape.of(Tensor.detach)
    monkeypatch.setattr(libra_module, "constant", constant)
    monkeypatch.setattr(token_merging, "match", tape.of(token_merging.match))

    def max_pool(maps: Tensor, *options: Any, **named: Any) -> Tensor:
        winners = constant(F.max_pool2d(maps, *options, **named | {"return_indices": True})[1])
        return maps.flatten(2).gather(2, winners.flatten(2)).view(winners.shape)

    for function in (F.relu, torch.relu):
        monkeypatch.setitem(RULES, function, lambda x, **_: x * constant((x > 0).to(x)))
    monkeypatch.setitem(RULES, F.max_pool2d, max_pool)
    return tape


def blank_score(model: VisionModel, images: Tensor, target: Target) -> Tensor:
    """The scores (B,) of blank images under the constants that the tape returns."""
    with LinearBackward():
        pooled = model.embed(torch.zeros_like(images).requires_grad_())
        return target.score(pooled, model.head(pooled)).detach()


@pytest.mark.parametrize(("build", "options"), MODELS.values(), ids=MODELS)
def test_contributions_sum_to_the_score_minus_that_of_a_blank_image(build, options, tape) -> None:
    model = build(**options).double()
    images = random_images(2, 3, *model.config.image_hw).double()
    pooled, logits = pooled_and_logits(model, images)
    target = CLASSES if model.config.gives_classes else FeatureCosine(pooled.flip(0))
    tape.results.clear()
    contributions = pixel_contributions(model, images, target)
    tape.rewind()
    difference = target.score(pooled, logits) - blank_score(model, images, target)
    # A cosine is a float32 number, whatever the model.
    error = 1e-12 if model.config.gives_classes else 1e-5
    torch.testing.assert_close(contributions.sum(dim=(1, 2, 3)), difference.double(), rtol=error, atol=error)
    assert difference.abs().max() > 0 or options.get("head_init") == "zero"


def test_heat_of_a_cell_is_the_sum_over_its_pixels_and_colours() -> None:
    model, images = small_model(), random_images(2, 3, 32, 48)
    target = ClassDifference(torch.tensor([4, 2]), torch.tensor([0]))
    sums = (
        pixel_contributions(model, images, target)
        .unflatten(3, (6, 8))
        .unflatten(2, (4, 8))
        .sum(dim=(1, 3, 5))
    )
    expected = sums.clamp_min(0) / sums.amax(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(libra(model, images, target), expected, atol=1e-5, rtol=0)
