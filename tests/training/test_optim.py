import math
from typing import Any

import pytest
import torch

from tests.model import small_model
from vitascope.training.optim import adamw, learning_rate, running_average
from vitascope.training.recipes import TrainConfig

# What is added to tokens or scores, and what is a token itself.
STATES = ("class_token", "distillation_token", "registers", "pool.query", "positions.")


@pytest.mark.parametrize(
    "options",
    [
        {"head": "mlp"},
        {"distillation_token": True, "num_registers": 2, "layer_scale": 0.1},
        {"pool": "map", "positions": "learned_2d", "mlp": "swiglu"},
        {"positions": "relative", "qkv_bias": "no_key", "norm": "post"},
        {"stem": "resnet", "resnet_layers": (1, 1), "resnet_width": 32, "embedding_norm": True},
    ],
)
def test_decay_touches_weight_matrices_only(options: dict[str, Any]) -> None:
    model = small_model(**options)
    optimizer = adamw(model, TrainConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    norms = (torch.nn.LayerNorm, torch.nn.GroupNorm)
    of_norms = [id(p) for module in model.modules() if isinstance(module, norms) for p in module.parameters()]
    for name, parameter in model.named_parameters():
        is_weight = name.endswith(".weight") and not name.startswith(STATES) and id(parameter) not in of_norms
        assert decay[id(parameter)] == (0.1 if is_weight else 0.0), name
    assert len(decay) == len(list(model.parameters()))


def test_the_rate_warms_up_linearly_then_falls_along_a_cosine_to_zero() -> None:
    config = TrainConfig(epochs=10, warmup_epochs=2, lr=0.5)
    rates = [learning_rate(config, step, steps_per_epoch=10) for step in range(101)]
    assert rates[:20] == pytest.approx([0.5 * (step + 1) / 20 for step in range(20)])
    assert rates[20:] == pytest.approx([0.25 * (1 + math.cos(math.pi * step / 80)) for step in range(81)])
    assert rates[100] == pytest.approx(0)


def test_warm_up_longer_than_the_run_still_gives_a_rate_for_every_step() -> None:
    config = TrainConfig(epochs=1, warmup_epochs=5, lr=1.0)
    rates = [learning_rate(config, step, steps_per_epoch=3) for step in range(3)]
    assert all(0 < rate <= 1 for rate in rates)


def test_one_step_runs_at_the_peak() -> None:
    assert learning_rate(TrainConfig(epochs=1, lr=1.0), 0, steps_per_epoch=1) == 1.0


def test_the_running_average_is_exponential_from_the_first_weights_on() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    average = running_average(layer, 0.75)
    expected = None
    for value in (1.0, 3.0, -2.0):
        torch.nn.init.constant_(layer.weight, value)
        average.update_parameters(layer)
        expected = value if expected is None else 0.75 * expected + 0.25 * value
    assert average.module.weight.item() == pytest.approx(expected)
