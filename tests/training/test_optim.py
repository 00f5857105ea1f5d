from typing import Any

import pytest
import torch

from tests.model import small_model
from vitascope.errors import UserError
from vitascope.model.lora import add_adapters
from vitascope.options.groups import Optimization
from vitascope.training.optim import average_decay, freeze_body, optimizer_of, train_mode, update_average

# Parameters that are added to tokens or scores, or are tokens.
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
def test_weight_decay_applies_to_weight_matrices_only(options: dict[str, Any]) -> None:
    model = small_model(**options)
    optimizer = optimizer_of(model, Optimization(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    norms = (torch.nn.LayerNorm, torch.nn.GroupNorm)
    of_norms = [id(p) for module in model.modules() if isinstance(module, norms) for p in module.parameters()]
    for name, parameter in model.named_parameters():
        is_weight = name.endswith(".weight") and not name.startswith(STATES) and id(parameter) not in of_norms
        assert decay[id(parameter)] == (0.1 if is_weight else 0.0), name
    assert len(decay) == len(list(model.parameters()))


def test_running_average_is_exponential_with_a_warmed_up_decay() -> None:
    layer, average = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    expected = None
    for step, (value, decay) in enumerate([(1.0, None), (3.0, 2 / 11), (-2.0, 0.2), (5.0, 0.2)]):
        torch.nn.init.constant_(layer.weight, value)
        update_average(average, layer, 0.2, step)
        expected = value if decay is None else decay * expected + (1 - decay) * value
        assert average.weight.item() == pytest.approx(expected)


def test_running_average_leaves_frozen_weights_alone() -> None:
    layer, average = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    average.load_state_dict(layer.state_dict())
    layer.bias.requires_grad_(False)
    bias = average.bias.item()
    for step in range(3):
        torch.nn.init.constant_(layer.weight, 2.0)
        torch.nn.init.constant_(layer.bias, torch.nan)
        update_average(average, layer, 0.5, step)
    assert (average.weight.item(), average.bias.item()) == (2.0, bias)


@pytest.mark.parametrize(("step", "decay"), [(0, 0.1), (8, 0.5), (89_989, 0.9999), (10**6, 0.9999)])
def test_decay_of_the_average_takes_many_steps_to_reach_its_value(step: int, decay: float) -> None:
    assert average_decay(0.9999, step) == pytest.approx(decay, abs=1e-6)


def test_layer_decay_lowers_the_rate_of_early_layers() -> None:
    model = small_model(depth=3, positions="learned")
    optimizer = optimizer_of(model, Optimization(layer_decay=0.5))
    scale = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    expected = {
        "patch_embedding.": 0.5**4,
        "class_token": 0.5**4,
        "positions.": 0.5**4,
        "norm.": 1.0,
        "head.": 1.0,
    }
    expected |= {f"encoder.blocks.{index}.": 0.5 ** (3 - index) for index in range(3)}
    for name, parameter in model.named_parameters():
        wanted = [value for prefix, value in expected.items() if name.startswith(prefix)]
        assert [scale[id(parameter)]] == wanted, name


def test_layer_decay_is_the_same_for_a_model_inside_a_tasks_module() -> None:
    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_model(depth=2)
            self.mask_token = torch.nn.Parameter(torch.zeros(1, 1, 16))

    around = Around()
    options = Optimization(layer_decay=0.5, weight_decay=0.1)
    groups = {
        id(p): (group["lr_scale"], group["weight_decay"])
        for group in optimizer_of(around, options).param_groups
        for p in group["params"]
    }
    alone = {
        id(p): (group["lr_scale"], group["weight_decay"])
        for group in optimizer_of(around.body, options).param_groups
        for p in group["params"]
    }
    assert groups == alone | {id(around.mask_token): (0.5**3, 0.0)}


def test_layer_decay_of_a_model_without_blocks_is_rejected() -> None:
    with pytest.raises(UserError, match="no blocks"):
        optimizer_of(torch.nn.Linear(2, 2), Optimization(layer_decay=0.5))


def test_muon_trains_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = small_model(pool="map", mlp="swiglu", stem="resnet", resnet_layers=(1, 1), resnet_width=32)
    optimizer = optimizer_of(model, Optimization(optimizer="muon", layer_decay=0.5))
    stacked = {id(p): group["stacked"] for group in optimizer.param_groups for p in group["params"]}
    assert len(stacked) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim > 1 and not name.startswith(("head.", "patch_embedding.resnet.root", *STATES))
        expected = 3 if ".qkv." in name else 2 if ".kv." in name or ".fc1." in name else 1
        assert stacked[id(parameter)] == hidden * expected or name == "pool.kv.weight", name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_adapters_have_the_options_of_the_matrices_of_their_block(optimizer: Any) -> None:
    model = small_model(depth=2)
    freeze_body(model)
    add_adapters(model.encoder, 2)
    options = Optimization(optimizer=optimizer, layer_decay=0.5, weight_decay=0.1)
    groups = {id(p): group for group in optimizer_of(model, options).param_groups for p in group["params"]}
    for index, block in enumerate(model.encoder.blocks):
        adapters = [p for name, p in block.named_parameters() if ".adapter." in name]
        assert len(adapters) == 8
        for parameter in adapters:
            group = groups.pop(id(parameter))
            assert (group["lr_scale"], group["weight_decay"]) == (0.5 ** (2 - index), 0.1)
            assert group.get("stacked") == (1 if optimizer == "muon" else None)
    assert groups.keys() == {id(p) for p in model.head.parameters()}


def test_muon_without_a_hidden_matrix_is_rejected() -> None:
    model = small_model()
    freeze_body(model)
    with pytest.raises(UserError, match="none is trained here: use the optimizer adamw"):
        optimizer_of(model, Optimization(optimizer="muon"))


def test_only_the_head_of_a_frozen_model_is_trained() -> None:
    model = small_model(dropout=0.5)
    freeze_body(model)
    train_mode(model, frozen=True)
    trained = [p for group in optimizer_of(model, Optimization()).param_groups for p in group["params"]]
    assert {id(p) for p in trained} == {id(p) for p in model.head.parameters()}
    assert model.head.training
    assert not any(
        part.training for name, part in model.named_modules() if name and not name.startswith("head")
    )
