import pytest
from torch import nn

from tests.models import small_model, small_resnet
from vitascope.models.vision_model import evaluation_mode


def frozen_body() -> nn.Module:
    """A model in training mode with its body in evaluation mode, as when only a head is trained."""
    model = small_model(dropout=0.5).train()
    model.encoder.eval()
    model.encoder.blocks[1].mlp.train()
    return model


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: part.training for name, part in model.named_modules()}


@pytest.mark.parametrize(
    "model", [frozen_body(), small_model().train(), small_model().eval(), small_resnet().train()]
)
def test_evaluation_mode_covers_every_part_and_restores_it(model: nn.Module) -> None:
    before = modes(model)
    with evaluation_mode(model):
        assert not any(modes(model).values())
    assert modes(model) == before


def test_evaluation_mode_is_restored_after_an_error() -> None:
    model = frozen_body()
    before = modes(model)
    with pytest.raises(ZeroDivisionError), evaluation_mode(model):
        _ = 1 / 0
    assert modes(model) == before
    assert len(set(before.values())) == 2
