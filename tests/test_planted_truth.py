"""Marks that alone decide the class: a model learns them, and methods find them or do not."""

import itertools
import json

import numpy as np
import pytest
import torch
from benchmarks import planted_truth as planted
from benchmarks.planted_truth import MARKS, _on_mark, _planted, planted_truth
from torch import Tensor

from tests.models import random_images, small_model, small_resnet
from vitascope import explain
from vitascope.analysis.explain.heatmaps import cell_of_pixels
from vitascope.analysis.explain.targets import Target
from vitascope.errors import UserError
from vitascope.models.vision_model import VisionModel


def flat(model: VisionModel, images: Tensor, target: Target) -> Tensor:
    return torch.ones(1, 4, 4)


@pytest.mark.parametrize(("grid", "size"), [((4, 4), (32, 32)), ((2, 8), (16, 40)), ((7, 5), (50, 33))])
def test_marks_change_the_pixels_of_their_cells_alone(grid: tuple[int, int], size: tuple[int, int]) -> None:
    images, marks = random_images(4, 3, *size), np.array([0, 1, 2, 3])
    marked, cells = _planted(images, marks, grid, np.random.default_rng(0))
    rows, columns = cell_of_pixels(grid, size)
    inside = cells[:, rows][:, :, columns]  # (4, H, W)
    assert torch.equal((marked != images).any(dim=1), inside)
    assert cells.sum(dim=(1, 2)).tolist() == [0] + 3 * [max(1, min(grid) // 4) ** 2]
    shown = [marked[k][:, inside[k]] for k in (1, 2, 3)]
    assert not any(torch.equal(one[:, : two.shape[1]], two) for one, two in itertools.combinations(shown, 2))


def test_model_learns_the_marks_and_integrated_gradients_find_them() -> None:
    """The model is not the one that is given, which stays as it is."""
    model, images = small_model(depth=1), random_images(12, 3, 32, 32) / 5
    before = {name: value.clone() for name, value in model.state_dict().items()}
    methods = {"flat": flat, "gradients": explain.METHODS["integrated-gradients"]}
    found = planted_truth(model, images, methods)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert found.decides
    best, last = found.scores
    assert (best.method, last.method) == ("gradients", "flat")
    assert best.weight.mean > 4 * found.area
    assert last.weight.mean == last.pointing == pytest.approx(found.area)
    assert found.failed == ("flat",)
    assert "No more weight on the mark than on any place: flat." in found.text()
    assert found.pictures == 6
    json.dumps(found.to_dict(), allow_nan=False)


def test_model_that_has_not_learned_the_marks_is_said_not_to_decide_by_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planted, "STEPS", 1)
    for model in (small_model(head="none", token_merging=2), small_resnet()):
        found = planted_truth(model, random_images(2, 3, 32, 32), {"flat": flat})
        assert not found.decides
        assert "does not decide by the mark" in found.text()
        assert list(found.scores[0].marks) == list(MARKS)
        again = planted_truth(model, random_images(2, 3, 32, 32), {"flat": flat})
        assert (again.with_mark, again.scores[0].weight) == (found.with_mark, found.scores[0].weight)


def test_weight_is_that_of_positive_heat_and_ties_share_the_point() -> None:
    where = torch.tensor([[True, False], [False, False]])
    assert _on_mark("m", torch.tensor([[3.0, -5.0], [1.0, 0.0]]), where) == (0.75, 1)
    assert _on_mark("m", torch.ones(2, 2), where) == (0.25, 0.25)
    assert _on_mark("m", torch.zeros(2, 2), where) == (0, 0)
    with pytest.raises(UserError, match=r"m returns a heatmap \(2, 2\); expected are finite"):
        _on_mark("m", torch.full((2, 2), torch.nan), where)


def test_one_picture_is_too_few() -> None:
    with pytest.raises(
        UserError, match="planted marks need 2 pictures, to learn from and to measure on, not 1"
    ):
        planted_truth(small_model(), random_images(1, 3, 32, 32))
