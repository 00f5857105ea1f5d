"""A batch is computed in as many parts as half of the memory needs; torch.compile of shards."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.forked import in_group
from tests.models import small_model
from tests.training import planned, tiny_config, trainer_of, undrawn
from vitascope import runs
from vitascope.data.datasets import open_data
from vitascope.models.resnet import ResNet
from vitascope.models.resnet_config import ResNetConfig
from vitascope.training import announcement, distributed, placement
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.placement import bytes_per_image, parts_of_batch
from vitascope.training.run.run import Run

CPU = torch.device("cpu")


def decided(data: Path, **options: object) -> TrainConfig:
    return planned(tiny_config(data, **options), open_data(str(data)))[0]


def test_activations_grow_with_the_depth_and_shrink_with_checkpointing() -> None:
    one, two = (bytes_per_image(small_model(depth=depth)) for depth in (2, 4))
    three = bytes_per_image(small_model(depth=6))
    assert three - two == two - one > 0
    recomputed = small_model(depth=6)
    recomputed.encoder.checkpointing = True
    assert bytes_per_image(recomputed) < three / 2


def test_the_measurement_counts_each_tensor_once() -> None:
    """A linear layer keeps its input; the second one of the same input keeps nothing more."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = small_model().config
            self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            pixels = images.flatten(1)[:, :4].clone()
            return self.one(pixels) + self.two(pixels)

    assert bytes_per_image(Twice()) == 4 * 4  # type: ignore[arg-type]


def test_measuring_changes_neither_the_model_nor_the_random_numbers() -> None:
    model = ResNet(ResNetConfig(image_size=32, layers=(1, 1, 1), width=8, num_classes=3)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert bytes_per_image(model) > 0
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parts_fit_into_half_of_the_memory(data, monkeypatch) -> None:
    model, config = small_model(), decided(data, batch_size=16, precision="fp32")
    batch = 16 * bytes_per_image(model)
    for share, parts in ((0.9, 2), (0.3, 4), (0.01, 16)):  # of the memory which the whole batch would need
        monkeypatch.setattr(
            placement, "memory_of", lambda device, share=share: share * batch / placement.SHARE
        )
        assert parts_of_batch(config, model, CPU) == parts


def test_named_parts_a_frozen_body_and_unknown_memory_are_not_measured(data, monkeypatch) -> None:
    monkeypatch.setattr(placement, "bytes_per_image", lambda *_: pytest.fail("measured"))
    config = decided(data, batch_size=16)
    assert parts_of_batch(config.replace(accumulate=3), small_model(), CPU) == 3
    assert parts_of_batch(config.replace(freeze=True, weights="x"), small_model(), CPU) == 1
    monkeypatch.setattr(placement, "memory_of", lambda device: None)
    assert parts_of_batch(config, small_model(), CPU) == 1


def test_a_run_in_parts_says_so_and_records_them(data, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(placement, "memory_of", lambda device: 20_000)
    with undrawn():
        run = Run(runs.train(tiny_config(data, run=str(tmp_path / "run"), epochs=1, precision="fp32")).run)
    parts = run.config["accumulate"]
    assert parts > 1
    assert f"each batch of 4 images in {parts} parts" in capsys.readouterr().out


def test_the_line_of_the_run_names_the_compilation(data, capsys, monkeypatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: None)
    for option, words in (("off", ""), ("on", ", compiled")):
        announcement.announce_run(trainer_of(tiny_config(data, compile=option)))
        assert capsys.readouterr().out.endswith(f" on cpu{words}\n")


class Sent(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {"allgather": set(), "reduce_scatter": set()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name, found in self.dtypes.items():
            if name in str(function._schema.name).replace("all_", "all"):
                found.update(x.dtype for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor))
        return function(*args, **(kwargs or {}))


SHORT: dict[str, Any] = {"batch_size": 4, "depth": 2, "precision": "bf16", "ema": 0.5, "accumulate": 1}
SHARDED: dict[str, dict[str, Any]] = {
    "plain": {"parallel": "fsdp"},
    "eager": {"parallel": "fsdp", "drop_path": 0.2},
    "compiled": {"parallel": "fsdp", "drop_path": 0.2, "compile": "on"},
}


def steps_in_bf16(data: Path, out: Path) -> None:
    """What each process does: steps, what they send, and the graphs that they compile."""
    graphs, compile_module = [], nn.Module.compile

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    nn.Module.compile = lambda self, **options: compile_module(self, backend=record, **options)  # type: ignore[method-assign]
    torch.set_num_threads(1)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()  # what the process before the fork has counted
    torch._dynamo.config.recompile_limit = 2
    found: dict[str, Any] = {}
    world = distributed.world_size()
    for name, options in (SHARDED if world > 1 else {"plain": {}}).items():
        trainer = trainer_of(tiny_config(data, **SHORT, **options))
        batches = trainer.train_loader.epoch(0)
        with Sent() if name == "plain" else contextlib.nullcontext() as sent:
            shares = ({"loss": trainer._training_step(next(batches), 0)} for _ in range(2))
            losses = [distributed.sum_over_processes(share)["loss"] for share in shares]
        found[name] = [float(loss) for loss in losses]
        if sent is not None:
            found["sent"] = sent.dtypes
    found["graphs"] = len(graphs)
    found["breaks"] = dict(torch._dynamo.utils.counters["graph_break"])
    found["weights"] = {p.dtype for p in trainer.module.parameters()}
    found["gradients"] = {
        value.dtype for state in trainer.optimizer.state.values() for value in state.values()
    }
    torch.save(found, out / f"{world}-{distributed.rank()}.pt")


def test_shards_gather_bf16_add_up_float32_and_compile_block_by_block(data, tmp_path) -> None:
    for world in (1, 2):
        assert (
            in_group(world, partial(steps_in_bf16, data, tmp_path), tmp_path / f"store{world}") == [0] * world
        )
    one, two, other = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert two["sent"]["allgather"] - {torch.uint8} == {torch.bfloat16}
    assert two["sent"]["reduce_scatter"] == {torch.float32}
    assert two["weights"] == two["gradients"] == {torch.float32}
    assert two["plain"] == other["plain"] == pytest.approx(one["plain"], rel=0.01)
    assert two["compiled"] == two["eager"]
    assert two["graphs"] == 2  # each block has its own rate of stochastic depth
    assert two["breaks"] == {}
