"""The hook between the forward passes of an explanation."""

import pytest
import torch

from tests.model import small_model
from vitascope.explain.forward import before_each_forward, call_hook
from vitascope.explain.methods import METHODS


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.many_passes])
def test_hook_runs_before_each_pass_and_can_end_the_method(name: str) -> None:
    model = small_model()
    images = torch.randn(1, 3, *model.config.image_hw)
    passes: list[int] = []
    pauses: list[int] = []
    embed = model.embed

    def counting(images: torch.Tensor) -> torch.Tensor:
        passes.append(len(images))
        return embed(images)

    def end_at_the_fourth() -> None:
        pauses.append(len(passes))
        if len(pauses) == 4:
            raise InterruptedError

    model.embed = counting  # type: ignore[method-assign]
    with before_each_forward(end_at_the_fourth), pytest.raises(InterruptedError):
        METHODS[name](model, images, 1, batch_size=2)
    assert max(passes) <= 2
    assert len(passes) == 3
    assert pauses == [0, 1, 2, 3]


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.many_passes])
def test_batch_size_does_not_change_heatmaps(name: str) -> None:
    model = small_model()
    images = torch.randn(1, 3, *model.config.image_hw)
    expected = METHODS[name](model, images, 1)
    torch.testing.assert_close(METHODS[name](model, images, 1, batch_size=2), expected, atol=1e-4, rtol=0)


def test_hook_is_called_only_inside_its_block() -> None:
    calls: list[str] = []
    call_hook()
    with before_each_forward(lambda: calls.append("inside")):
        call_hook()
    call_hook()
    assert calls == ["inside"]
