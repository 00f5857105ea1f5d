"""The logit lens beside the final steps of the model, written out in float64."""

from typing import Any

import pytest
import torch

from tests.analysis.explain import MODELS
from tests.models import random_images, small_model
from vitascope import explain
from vitascope.errors import UserError
from vitascope.models.ensemble import Ensemble

OTHERS: dict[str, dict[str, Any]] = {
    "norm after": {"pool": "mean", "pool_norm": "after"},
    "no norm": {"pool": "mean", "pool_norm": "none"},
    "merged": {"token_merging": 3},
    "mlp head": {"head": "mlp"},
}


@torch.no_grad()
@pytest.mark.parametrize("options", [*MODELS.values(), *OTHERS.values()], ids=[*MODELS, *OTHERS])
def test_lens_reads_every_layer_as_the_last_one(options: dict[str, Any]) -> None:
    model = small_model(**options).double()
    images = random_images(2, 3, *model.config.image_hw).double()
    found, trace = explain.lens(model, images), model.trace(images)
    states = [trace["embeddings"], *(trace[f"block{layer}"] for layer in range(model.config.depth))]
    assert found.logits.shape == (4, 2, 5)
    assert found.patches.shape == (4, 2, *model.config.grid, 5)
    torch.testing.assert_close(found.logits[-1], model(images).float(), atol=1e-6, rtol=0)
    for layer, state in enumerate(states):
        read = model.forward_head(model.norm(state))
        torch.testing.assert_close(found.logits[layer], read.float(), atol=1e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("options", [*MODELS.values(), *OTHERS.values()], ids=[*MODELS, *OTHERS])
def test_patch_is_read_in_place_of_everything_that_pooling_reads(options: dict[str, Any]) -> None:
    model = small_model(**options).double()
    images, P = random_images(1, 3, *model.config.image_hw).double(), model.config.num_prefix_tokens
    found, trace = explain.lens(model, images), model.trace(images)
    place = P + model.config.grid[1] + 2  # row 1, column 2
    everywhere = trace["block1"][:, place : place + 1].expand_as(trace["block1"])
    read = model.forward_head(model.norm(everywhere))
    torch.testing.assert_close(found.patches[2, :, 1, 2], read.float(), atol=1e-6, rtol=0)


def test_target_leaves_its_class_of_each_image() -> None:
    model, images = small_model(class_names=tuple("abcde")), random_images(2, 3, 32, 32)
    whole = explain.lens(model, images).patches
    for target, classes in (("c", [2, 2]), ([1, "e"], [1, 4]), (torch.tensor([3, 0]), [3, 0])):
        found = explain.lens(model, images, target).patches
        assert found.shape == (4, 2, 4, 4, 1)
        for image, index in enumerate(classes):
            assert torch.equal(found[:, image, ..., 0], whole[:, image, ..., index])


def test_what_has_no_lens_is_rejected_in_one_line() -> None:
    images = random_images(1, 3, 32, 32)
    model = small_model()
    for other, message in (
        (Ensemble.of([model, model]), "an ensemble of 2 models has no attention and no tokens"),
        (small_model(head="none"), "this model has no head for classes"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            explain.lens(other, images)
    for target, message in (
        (9, "no class 9; the model has 5, 0 to 4"),
        ([1, 2], "2 classes for 1 images"),
        (explain.FeatureCosine(torch.ones(1, 16)), "not a FeatureCosine"),
    ):
        with pytest.raises(UserError, match=message):
            explain.lens(model, images, target)
    with pytest.raises(UserError, match="numbers that are not finite"):
        explain.lens(model, images.fill_(torch.nan))
