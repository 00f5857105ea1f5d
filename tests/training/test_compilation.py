"""torch.compile of shards, and the dtypes that these send."""

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
from tests.training import tiny_config, trainer_of, write_folder
from vitascope.training import announcement, distributed


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "greys")


@pytest.mark.parametrize(("option", "words"), [("off", ""), ("on", ", compiled")])
def test_the_line_of_the_run_names_the_compilation(
    data, capsys, monkeypatch, option: str, words: str
) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: None)
    announcement.announce_run(trainer_of(tiny_config(data, compile=option)))
    assert capsys.readouterr().out.endswith(f" on cpu{words}\n")


class Sent(TorchDispatchMode):
    """The dtypes that each collective operation has."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {"allgather": set(), "reduce_scatter": set()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name, found in self.dtypes.items():
            if name in str(function._schema.name).replace("all_", "all"):
                found.update(x.dtype for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor))
        return function(*args, **(kwargs or {}))


SHORT: dict[str, Any] = {"batch_size": 4, "depth": 3, "precision": "bf16", "ema": 0.5, "accumulate": 1}
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
    torch._dynamo.config.recompile_limit = 2
    found: dict[str, Any] = {}
    world = distributed.world_size()
    for name, options in (SHARDED if world > 1 else {"plain": {}}).items():
        trainer = trainer_of(tiny_config(data, **SHORT, **options))
        batches = trainer.train_loader.epoch(0)
        with Sent() if name == "plain" else contextlib.nullcontext() as sent:
            losses = [distributed.add_up(trainer._training_step(next(batches), 0)) for _ in range(3)]
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
    assert two["graphs"] == 3  # each block has its own rate of stochastic depth
    assert two["breaks"] == {}
