"""The principal components of the patch embedding's filters."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.model import VARIANTS, small_model, small_resnet
from vitascope.errors import UserError
from vitascope.explain.learned import patch_filters
from vitascope.model.patches import ConvPatches

STEMS: dict[str, dict[str, Any]] = {
    "conv": {},
    "linear": {"stem": "linear"},
    "overlap": {"stem": "overlap"},
    "oblong": {"patch_size": (8, 4)},
    "grey": {"in_channels": 1, "patch_bias": False},
    "more filters than pixels": {"patch_size": 2, "in_channels": 1},
    "five colours": {"in_channels": 5},
}


@pytest.mark.parametrize("options", STEMS.values(), ids=STEMS)
@pytest.mark.parametrize("count", [1, 4, 28])
def test_components_are_the_directions_in_which_filters_differ_most(
    options: dict[str, Any], count: int
) -> None:
    model = small_model(**options)
    assert isinstance(model.patch_embedding, ConvPatches)
    weight = model.patch_embedding.weight.detach().double().numpy()  # (D, C, ph, pw)
    D, C, ph, pw = weight.shape
    filters = patch_filters(model, count)

    k = min(count, D - 1, C * ph * pw)  # the mean takes one
    assert filters.components.shape == (k, C, ph, pw)
    assert filters.shares.shape == (k,)
    assert filters.components.dtype == filters.shares.dtype == torch.float32
    assert not filters.components.requires_grad
    centred = (weight - weight.mean(axis=0)).reshape(D, -1)
    _, strengths, directions = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(filters.shares, (strengths**2 / (strengths**2).sum())[:k], rtol=1e-4)
    for component, direction in zip(filters.components.flatten(1).numpy(), directions, strict=False):
        assert abs(component @ direction) == pytest.approx(1, abs=1e-4)
        assert component[np.abs(component).argmax()] > 0
    if k < count:
        assert filters.shares.sum().item() == pytest.approx(1)


def test_one_pattern_in_all_filters_is_the_first_component() -> None:
    model = small_model()
    assert isinstance(model.patch_embedding, ConvPatches)
    pattern = torch.zeros(3, 8, 8)
    pattern[1, 2:4] = 1
    with torch.no_grad():
        strengths = torch.linspace(-1, 1, 16)[:, None, None, None]
        model.patch_embedding.weight.copy_(0.5 + strengths * pattern)
    filters = patch_filters(model)
    torch.testing.assert_close(filters.components, pattern[None] / pattern.norm())
    torch.testing.assert_close(filters.shares, torch.ones(1))


@pytest.mark.parametrize("count", [0, -3])
def test_count_below_one_is_refused(count: int) -> None:
    with pytest.raises(UserError, match=f"at least 1, not {count}"):
        patch_filters(small_model(), count)


def test_filters_that_are_all_the_same_are_refused() -> None:
    model = small_model()
    assert isinstance(model.patch_embedding, ConvPatches)
    with torch.no_grad():
        model.patch_embedding.weight.fill_(0.3)
    with pytest.raises(UserError, match="the 16 filters of this patch embedding are all the same"):
        patch_filters(model)


def test_stems_that_do_not_embed_pixels_are_refused() -> None:
    with pytest.raises(UserError, match="feature map"):
        patch_filters(small_model(**VARIANTS["resnet"]))
    with pytest.raises(UserError, match="a ResNet has no patch embedding"):
        patch_filters(small_resnet())
