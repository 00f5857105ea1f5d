from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import small_model
from vitascope.errors import UserError
from vitascope.models.lora import add_adapters
from vitascope.training import optimizers
from vitascope.training.optimizers import (
    Muon,
    freeze_body,
    optimizer_of,
    orthogonal,
    train_mode,
    update_average,
)
from vitascope.training.options.groups import Optimization


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 16, 64)])
@pytest.mark.parametrize("bf16", [False, True])
def test_all_singular_values_become_about_one_and_the_directions_stay(
    shape: tuple[int, int, int], bf16: bool
) -> None:
    """In the precision of either kind of CPU; bfloat16 has 8 bits."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    U, _, Vh = torch.linalg.svd(matrices, full_matrices=False)
    found = orthogonal(matrices.bfloat16() if bf16 else matrices)
    inner = U.mT @ found.float() @ Vh.mT  # diagonal, if the directions stay
    values = inner.diagonal(dim1=1, dim2=2)
    assert ((values > 0.5) & (values < 1.3)).float().mean() > 0.9
    assert (inner - torch.diag_embed(values)).abs().max() < (0.05 if bf16 else 1e-3)


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], count: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def group(parameters: list[nn.Parameter], stacked: int) -> dict[str, object]:
    return {"params": parameters, "weight_decay": 0.1, "stacked": stacked}


def test_a_matrix_gets_the_update_of_torchs_muon(monkeypatch) -> None:
    ours = [nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(24, 16))]
    theirs = copy.deepcopy(ours)
    # Ours multiplies the transposed of a tall one.
    monkeypatch.setattr(optimizers, "has_bf16", lambda device: False)
    monkeypatch.setattr(
        torch.optim._muon, "_zeropower_via_newtonschulz", lambda update, *_: orthogonal(update[None])[0]
    )
    steps(Muon([group(ours, 1)], lr=0.05), ours)
    peer = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    steps(peer, theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_loads_the_state_of_another_goes_on_as_it_would() -> None:
    ours = [nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(8))]
    first = Muon([group(ours[:1], 1), group(ours[1:], 0)], lr=0.05)
    steps(first, ours)
    theirs = copy.deepcopy(ours)
    second = Muon([group(theirs[:1], 1), group(theirs[1:], 0)], lr=0.05)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(first, ours)
    steps(second, theirs)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


# Of a block: two stacks, a tall and a wide matrix, and a low one.
SHAPES = {(24, 8): 3, (32, 8): 1, (8, 32): 1, (16, 8): 2, (3, 8): 1}


def test_the_number_of_operations_does_not_grow_with_the_number_of_layers() -> None:
    counts = []
    for layers in (1, 6):
        parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES for _ in range(layers)]
        stacked = [each for each in SHAPES.values() for _ in range(layers)]
        optimizer = Muon([group([one], each) for one, each in zip(parameters, stacked, strict=True)], lr=0.05)
        steps(optimizer, parameters, count=1)
        with Products() as products:
            steps(optimizer, parameters, count=1)
        counts.append(products.count)
    # A, B and X of sides 8x8, 8x32 and 3x8.
    assert counts[0] == counts[1] == 3 * 3 * optimizers.ITERATIONS


class Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
        return function(*args, **(kwargs or {}))


def updated(weight: Tensor, gradient: Tensor, stacked: int = 1) -> Tensor:
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    Muon([group([parameter], stacked)], lr=0.05).step()
    return parameter.detach()


def test_stacked_matrices_are_updated_one_by_one_and_a_kernel_as_a_matrix() -> None:
    weight, gradient = torch.randn(2, 48, 16)
    pairs = zip(weight.chunk(3), gradient.chunk(3), strict=True)
    expected = torch.cat([updated(part, grad) for part, grad in pairs])
    torch.testing.assert_close(updated(weight, gradient, 3), expected)
    kernel, gradient = torch.randn(2, 8, 4, 3, 3)
    flat = updated(kernel.flatten(1), gradient.flatten(1))
    torch.testing.assert_close(updated(kernel, gradient).flatten(1), flat)


def test_other_parameters_have_adamw() -> None:
    ours, theirs, matrix = (nn.Parameter(torch.ones(size)) for size in (5, 5, (4, 4)))
    steps(Muon([group([matrix], 1), group([ours], 0)], lr=0.05), [ours, matrix])
    generator = torch.Generator().manual_seed(1)
    peer = torch.optim.AdamW([theirs], lr=0.05, weight_decay=0.1)
    for _ in range(3):
        theirs.grad = torch.randn(5, generator=generator)
        torch.randn(4, 4, generator=generator)
        peer.step()
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(matrix, torch.ones(4, 4))


def test_the_update_has_the_size_of_adamws() -> None:
    change = updated(torch.zeros(64, 256), torch.randn(64, 256))  # no weight decay of zeros
    assert change.pow(2).mean().sqrt() / 0.05 == pytest.approx(0.2, rel=0.3)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_steps_are_those_of_torch(name: str) -> None:
    kinds = getattr(optimizers, name), getattr(torch.optim, name)
    made = [torch.nn.Linear(3, 2) for _ in kinds]
    made[1].load_state_dict(made[0].state_dict())
    for kind, module in zip(kinds, made, strict=True):
        optimizer = kind(module.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(3):
            module(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in module.parameters())
    for ours, theirs in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


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


def test_layer_decay_needs_blocks() -> None:
    with pytest.raises(UserError, match="no blocks"):
        optimizer_of(torch.nn.Linear(2, 2), Optimization(layer_decay=0.5))


def test_muon_without_a_hidden_matrix_is_adamw() -> None:
    made = [torch.nn.ParameterDict({"head": torch.ones(4, 3)}) for _ in range(2)]
    for module, name in zip(made, ("muon", "adamw"), strict=True):
        steps(optimizer_of(module, Optimization(optimizer=name)), list(module.parameters()))
    assert torch.equal(made[0]["head"], made[1]["head"])


def test_only_the_head_of_a_frozen_model_is_trained() -> None:
    model = small_model(dropout=0.5)
    freeze_body(model)
    train_mode(model, frozen=True)
    assert options_by_parameter(model).keys() == {id(p) for p in model.head.parameters()}
    assert {name.split(".")[0] for name, part in model.named_modules() if part.training} == {"", "head"}
