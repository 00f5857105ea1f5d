from typing import Any

import pytest
import torch

from tests.model import small_model
from vitascope.errors import UserError
from vitascope.model.lora import add_adapters
from vitascope.options.groups import Optimization
from vitascope.training.optim import freeze_body, optimizer_of, train_mode, update_average

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
    decay = {number: found[1] for number, found in options_by_parameter(model, weight_decay=0.1).items()}
    norms = (torch.nn.LayerNorm, torch.nn.GroupNorm)
    of_norms = [id(p) for module in model.modules() if isinstance(module, norms) for p in module.parameters()]
    for name, parameter in model.named_parameters():
        is_weight = name.endswith(".weight") and not name.startswith(STATES) and id(parameter) not in of_norms
        assert decay[id(parameter)] == (0.1 if is_weight else 0.0), name
    assert len(decay) == len(list(model.parameters()))


def test_running_average_is_exponential_with_a_warmed_up_decay_and_leaves_frozen_weights_alone() -> None:
    layer, average = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    layer.bias.requires_grad_(False)
    bias, expected = average.bias.item(), None
    torch.nn.init.constant_(layer.bias, torch.nan)
    for step, (value, decay) in enumerate([(1.0, None), (3.0, 2 / 11), (-2.0, 0.2), (5.0, 0.2)]):
        torch.nn.init.constant_(layer.weight, value)
        update_average(average, layer, 0.2, step)
        expected = value if decay is None else decay * expected + (1 - decay) * value
        assert average.weight.item() == pytest.approx(expected)
    assert average.bias.item() == bias


def options_by_parameter(module: torch.nn.Module, **options: Any) -> dict[int, tuple[Any, ...]]:
    """The factor of the rate, the weight decay and the stacked matrices of each parameter, by id."""
    return {
        id(parameter): (group["lr_scale"], group["weight_decay"], group.get("stacked"))
        for group in optimizer_of(module, Optimization(**options)).param_groups
        for parameter in group["params"]
    }


def test_layer_decay_lowers_the_rate_of_early_layers() -> None:
    model = small_model(depth=3, positions="learned")
    groups = options_by_parameter(model, layer_decay=0.5)
    expected = dict.fromkeys(("patch_embedding.", "class_token", "positions."), 0.5**4)
    expected |= {"norm.": 1.0, "head.": 1.0}
    expected |= {f"encoder.blocks.{index}.": 0.5 ** (3 - index) for index in range(3)}
    for name, parameter in model.named_parameters():
        wanted = [value for prefix, value in expected.items() if name.startswith(prefix)]
        assert [groups[id(parameter)][0]] == wanted, name


def test_layer_decay_is_the_same_for_a_model_inside_a_tasks_module() -> None:
    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_model(depth=2)
            self.mask_token = torch.nn.Parameter(torch.zeros(1, 1, 16))

    around, options = Around(), {"layer_decay": 0.5, "weight_decay": 0.1}
    alone = options_by_parameter(around.body, **options)
    token = {id(around.mask_token): (0.5**3, 0.0, None)}
    assert options_by_parameter(around, **options) == alone | token


def test_muon_trains_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = small_model(pool="map", mlp="swiglu", stem="resnet", resnet_layers=(1, 1), resnet_width=32)
    groups = options_by_parameter(model, optimizer="muon", layer_decay=0.5)
    assert len(groups) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim > 1 and not name.startswith(("head.", "patch_embedding.resnet.root", *STATES))
        expected = 3 if ".qkv." in name else 2 if ".kv." in name or ".fc1." in name else 1
        assert groups[id(parameter)][2] == hidden * expected or name == "pool.kv.weight", name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_adapters_have_the_options_of_the_matrices_of_their_block(optimizer: Any) -> None:
    model = small_model(depth=2)
    freeze_body(model)
    add_adapters(model.encoder, 2)
    groups = options_by_parameter(model, optimizer=optimizer, layer_decay=0.5, weight_decay=0.1)
    for index, block in enumerate(model.encoder.blocks):
        adapters = [p for name, p in block.named_parameters() if ".adapter." in name]
        assert len(adapters) == 8
        for parameter in adapters:
            stacked = 1 if optimizer == "muon" else None
            assert groups.pop(id(parameter)) == (0.5 ** (2 - index), 0.1, stacked)
    assert groups.keys() == {id(p) for p in model.head.parameters()}


def test_optimizers_that_find_nothing_to_train_are_rejected() -> None:
    model = small_model()
    freeze_body(model)
    with pytest.raises(UserError, match="none is trained here: use the optimizer adamw"):
        optimizer_of(model, Optimization(optimizer="muon"))
    with pytest.raises(UserError, match="no blocks"):
        optimizer_of(torch.nn.Linear(2, 2), Optimization(layer_decay=0.5))


def test_only_the_head_of_a_frozen_model_is_trained() -> None:
    model = small_model(dropout=0.5)
    freeze_body(model)
    train_mode(model, frozen=True)
    assert options_by_parameter(model).keys() == {id(p) for p in model.head.parameters()}
    assert {name.split(".")[0] for name, part in model.named_modules() if part.training} == {"", "head"}
