import math

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.models import random_images, small_model
from tests.training import assert_bitwise
from vitascope.errors import UserError
from vitascope.training.checkpoint.state import (
    all_finite,
    model_state,
    optimizer_state,
    restore_model,
    restore_optimizer,
    split_shards,
)
from vitascope.training.optimizers import optimizer_of
from vitascope.training.options.groups import Optimization

OPTIONS: dict[str, Optimization] = {
    "adamw": Optimization(weight_decay=0.1),
    "sgd": Optimization(optimizer="sgd", weight_decay=0.1),
    "layer_decay": Optimization(layer_decay=0.5),
}


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(random_images(2, 3, 32, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_restored_training_is_bitwise_identical(tmp_path, options: Optimization) -> None:
    model, other = small_model(), small_model()
    first, second = optimizer_of(model, options), optimizer_of(other, options)
    learn(model, first, 2)
    torch.save((model_state(model), optimizer_state(model, first)), tmp_path / "state.pt")
    of_model, of_optimizer = torch.load(tmp_path / "state.pt", weights_only=True)
    restore_model(other, of_model)
    restore_optimizer(other, second, of_optimizer)
    assert_bitwise(optimizer_state(other, second), optimizer_state(model, first))
    learn(model, first, 2)
    learn(other, second, 2)
    assert torch.equal(parameters(model), parameters(other))


def test_state_uses_the_models_parameter_names() -> None:
    model = small_model()
    assert set(model_state(model)) == set(model.state_dict())
    optimizer = optimizer_of(model, Optimization())
    learn(model, optimizer, 1)
    assert set(optimizer_state(model, optimizer)["state"]) == dict(model.named_parameters()).keys()
    assert_bitwise(optimizer_state(model, optimizer), dict(get_optimizer_state_dict(model, optimizer)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_saving_before_the_first_step_performs_no_step(options: Optimization) -> None:
    ends = []
    for saves in (False, True):
        torch.manual_seed(0)
        model = small_model()
        optimizer = optimizer_of(model, options)
        if saves:
            assert optimizer_state(model, optimizer) == {}
            restore_optimizer(model, optimizer, {})
        learn(model, optimizer, 1)
        ends.append((parameters(model), optimizer_state(model, optimizer)))
    assert_bitwise(*ends)


def test_memory_of_copies_is_used_again_for_tensors_of_the_same_kind() -> None:
    copies: dict[str, torch.Tensor] = {}
    places = []
    for tensor in (torch.ones(3), torch.zeros(3), torch.ones(2), torch.ones(2, dtype=torch.float64)):
        state, _ = split_shards({"a": tensor}, copies)
        assert state["a"].dtype == tensor.dtype
        assert torch.equal(state["a"], tensor)
        places.append(state["a"])
    assert places[0] is places[1]


def test_state_of_another_model_is_rejected() -> None:
    state = model_state(small_model())
    restore_model(small_model(), dict(state))
    fewer = {name: tensor for name, tensor in state.items() if name != "head.bias"}
    with pytest.raises(UserError, match=r"has no head\.bias"):
        restore_model(small_model(), fewer)
    with pytest.raises(RuntimeError, match="gamma"):
        restore_model(small_model(), state | {"gamma": torch.zeros(1)})


def test_single_nan_weight_is_found() -> None:
    model = small_model()
    for value in (math.nan, math.inf, -math.inf):
        assert all_finite(model)
        with torch.no_grad():
            model.encoder.blocks[1].mlp.fc1.weight[3, 2] = value
        assert not all_finite(model)
        with torch.no_grad():
            model.encoder.blocks[1].mlp.fc1.weight[3, 2] = 0.0
