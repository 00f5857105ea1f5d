import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.model import random_images, small_model
from tests.training import planned, tiny_config, write_folder
from vitascope.data.datasets import open_data
from vitascope.errors import UserError
from vitascope.options.groups import ExecutionOptions, Optimization
from vitascope.options.recipes import TrainConfig
from vitascope.training.checkpoint.state import (
    all_finite,
    check_identity,
    model_state,
    optimizer_state,
    restore_model,
    restore_optimizer,
    run_identity,
)
from vitascope.training.optim import optimizer_of

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


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_restored_training_is_bitwise_identical(tmp_path, options: Optimization) -> None:
    model, other = small_model(), small_model()
    first, second = optimizer_of(model, options), optimizer_of(other, options)
    learn(model, first, 2)
    torch.save((model_state(model), optimizer_state(model, first)), tmp_path / "state.pt")
    of_model, of_optimizer = torch.load(tmp_path / "state.pt", weights_only=True)
    restore_model(other, of_model)
    restore_optimizer(other, second, of_optimizer)
    assert same(optimizer_state(other, second), optimizer_state(model, first))
    learn(model, first, 2)
    learn(other, second, 2)
    assert torch.equal(parameters(model), parameters(other))


def test_state_uses_the_models_parameter_names() -> None:
    model = small_model()
    assert set(model_state(model)) == set(model.state_dict())
    optimizer = optimizer_of(model, Optimization())
    learn(model, optimizer, 1)
    assert set(optimizer_state(model, optimizer)["state"]) == dict(model.named_parameters()).keys()
    assert same(optimizer_state(model, optimizer), get_optimizer_state_dict(model, optimizer))


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
    assert torch.equal(ends[0][0], ends[1][0])
    assert same(ends[0][1], ends[1][1])


def test_state_of_another_model_is_rejected() -> None:
    state = model_state(small_model())
    restore_model(small_model(), dict(state))
    fewer = {name: tensor for name, tensor in state.items() if name != "head.bias"}
    with pytest.raises(UserError, match=r"has no head\.bias"):
        restore_model(small_model(), fewer)
    with pytest.raises(RuntimeError, match="gamma"):
        restore_model(small_model(), state | {"gamma": torch.zeros(1)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_single_nan_weight_is_found(value: float) -> None:
    model = small_model()
    assert all_finite(model)
    with torch.no_grad():
        model.encoder.blocks[1].mlp.fc1.weight[3, 2] = value
    assert not all_finite(model)


# The identity of a run


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "greys")


def identity_of(config: TrainConfig) -> dict[str, Any]:
    splits = open_data(config.data, seed=config.seed)
    resolved, model_config = planned(config, splits)
    return run_identity(resolved, model_config, splits.train)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("epochs", 4),
        ("batch_size", 5),
        ("optimizer", "sgd"),
        ("lr", 0.5),
        ("lr_batch", 8),
        ("schedule", "linear"),
        ("warmup_steps", 1),
        ("weight_decay", 0.5),
        ("layer_decay", 0.5),
        ("patience", 2),
        ("clip_grad", 0.0),
        ("label_smoothing", 0.0),
        ("ema", 0.5),
        ("keep", "last"),
        ("flip", 0.0),
        ("mixup", 0.8),
        ("distill_weight", 0.75),
        ("corrupt", 0.25),
        ("task", "masked"),
        ("seed", 1),
        ("embed_dim", 32),
        ("dropout", 0.1),
        ("drop_path", 0.1),
        ("model_options", {"positions": "rotary"}),
    ],
)
def test_option_that_changes_the_result_is_rejected_by_name(data, option: str, value: Any) -> None:
    saved, now = identity_of(tiny_config(data)), identity_of(tiny_config(data, **{option: value}))
    shown = "positions" if option == "model_options" else option
    with pytest.raises(UserError, match=rf"(not of this run: |; )(model: )?{shown} was .*, is ") as rejected:
        check_identity(saved, now)
    assert "\n" not in str(rejected.value)


def test_engine_options_and_moved_files_may_differ(data, tmp_path) -> None:
    moved = tmp_path / "elsewhere" / "greys"
    moved.parent.mkdir()
    moved.symlink_to(data)
    saved = identity_of(tiny_config(data, run="here"))
    engine = {
        "precision": "bf16",
        "device": "meta",
        "workers": 3,
        "compile": "on",
        "accumulate": 2,
        "gradient_checkpointing": True,
        "parallel": "hsdp",
        "shard_size": 4,
        "checkpoint_seconds": 1.0,
        "keep_checkpoints": 7,
        "tracker": "mlflow",
    }
    assert set(engine) == {field.name for field in dataclasses.fields(ExecutionOptions)}
    check_identity(saved, identity_of(tiny_config(moved, run="there", **engine)))


def test_other_images_are_rejected_with_the_difference(data, tmp_path) -> None:
    config = tiny_config(data)
    saved = identity_of(config)
    fewer = write_folder(tmp_path / "fewer", per_class=10)
    relabelled = write_folder(tmp_path / "relabelled", classes=("light", "dark"))
    renamed = write_folder(tmp_path / "renamed")
    (renamed / "dark" / "000.png").rename(renamed / "dark" / "zero.png")
    for folder, name in (
        (fewer, "training images was 20, is 16"),
        (renamed, "names and labels of the training images, SHA-256 was"),
    ):
        with pytest.raises(UserError, match=re.escape(name)):
            check_identity(saved, identity_of(config.replace(data=str(folder))))
    assert identity_of(config.replace(data=str(relabelled)))["classes"] == ["dark", "light"]


def test_option_newer_than_the_checkpoint_is_no_difference(data) -> None:
    saved = identity_of(tiny_config(data))
    check_identity(saved, saved | {"lookahead": 0})
    with pytest.raises(UserError, match="lookahead was 0, is None"):
        check_identity(saved | {"lookahead": 0}, saved)


def test_identity_names_the_labels_of_the_images(data: Path) -> None:
    config = tiny_config(data)
    images = open_data(config.data, seed=config.seed).train
    content = json.dumps([[source.name for source in images.sources], images.labels.tolist()])
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    assert identity_of(config)["names and labels of the training images, SHA-256"] == digest
