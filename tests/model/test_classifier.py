import pytest
import torch
from torch import nn

from tests.model import random_images, small_model, small_resnet
from vitascope.model.classifier import evaluation_mode


def frozen_body() -> nn.Module:
    """A model in training whose body is not, as in training of a head alone."""
    model = small_model(dropout=0.5).train()
    model.encoder.eval()
    model.encoder.blocks[1].mlp.train()
    return model


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: part.training for name, part in model.named_modules()}


@pytest.mark.parametrize(
    "model", [frozen_body(), small_model().train(), small_model().eval(), small_resnet().train()]
)
def test_every_part_evaluates_inside_and_is_as_it_was_afterwards(model: nn.Module) -> None:
    before = modes(model)
    with evaluation_mode(model):
        assert not any(modes(model).values())
    assert modes(model) == before


def test_parts_are_as_they_were_after_an_error_too() -> None:
    model = frozen_body()
    before = modes(model)
    with pytest.raises(ZeroDivisionError), evaluation_mode(model):
        _ = 1 / 0
    assert modes(model) == before
    assert len(set(before.values())) == 2


def test_inside_another_only_the_outermost_brings_training_back() -> None:
    model = small_model().train()
    with evaluation_mode(model):
        with evaluation_mode(model):
            assert not model.training
        assert not model.training
    assert model.training


def test_answers_inside_are_those_of_evaluation() -> None:
    model, images = small_model(dropout=0.5, drop_path=0.5), random_images(2, 3, 32, 32)
    expected = model(images)
    model.train()
    with evaluation_mode(model):
        assert torch.equal(model(images), expected)
    assert not torch.equal(model(images), expected)
