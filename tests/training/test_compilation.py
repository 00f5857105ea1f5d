"""torch.compile: when it is used, and that CUDA graphs overwrite nothing that a run keeps."""

import contextlib
import functools
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.forked import in_group
from tests.model import small_model
from tests.training import tiny_config, trainer_of, write_folder
from vitascope.errors import UserError
from vitascope.options.groups import ExecutionOptions
from vitascope.options.recipes import TrainConfig
from vitascope.training import announcement, compilation, distributed
from vitascope.training.compilation import Compilation, choose, estimated_seconds, missing_tool

CUDA = torch.device("cuda")
LONG = compilation.LEAST_SECONDS


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "greys")


@pytest.fixture
def tools(monkeypatch, tmp_path) -> Path:
    """A machine with Triton, Python.h and a C compiler."""
    monkeypatch.setattr(compilation, "has_triton", lambda: True)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CC", "/bin/sh")
    (tmp_path / "Python.h").touch()
    return tmp_path


# The choice


def test_auto_compiles_long_runs_on_a_gpu_and_nothing_else(tools) -> None:
    assert choose("auto", CUDA, seconds=LONG, parts=1) == Compilation("on")
    short = choose("auto", CUDA, seconds=LONG / 2, parts=1)
    assert short.mode == "off"
    assert "from 5 minutes on, and this run takes about 2" in short.in_words()
    for name in ("cpu", "mps"):
        assert choose("auto", torch.device(name), seconds=1e9, parts=1) == Compilation()


def test_auto_names_the_tool_that_is_missing(tools, monkeypatch) -> None:
    assert missing_tool() == ""
    (tools / "Python.h").unlink()
    assert "Python.h" in choose("auto", CUDA, seconds=LONG, parts=1).in_words()
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert choose("auto", CUDA, seconds=LONG, parts=1).in_words() == ", not compiled: no C compiler"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tools))
    assert missing_tool() == "no C compiler"
    monkeypatch.setattr(compilation, "has_triton", lambda: False)
    assert "Triton" in missing_tool()


def test_a_tool_that_another_machine_lacks_turns_it_off_for_all(tools, monkeypatch) -> None:
    monkeypatch.setattr(distributed, "gather", lambda reason: [reason, "no C compiler"])
    assert choose("auto", CUDA, seconds=LONG, parts=1) == Compilation("off", "no C compiler")


def test_the_options_on_and_off_are_taken_as_they_are() -> None:
    for asked in ("on", "off"):
        for device in (CUDA, torch.device("cpu")):
            assert choose(asked, device, seconds=0.0, parts=2).mode == asked


def test_cuda_graphs_are_rejected_where_they_would_overwrite_gradients(monkeypatch) -> None:
    assert choose("graphs", CUDA, seconds=0.0, parts=1) == Compilation("graphs")
    with pytest.raises(UserError, match="this run is on cpu: set compile=on"):
        choose("graphs", torch.device("cpu"), seconds=0.0, parts=1)
    with pytest.raises(UserError, match="in 2 parts, which accumulate gradients"):
        choose("graphs", CUDA, seconds=0.0, parts=2)
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    with pytest.raises(UserError, match="4 processes"):
        choose("graphs", CUDA, seconds=0.0, parts=1)


def test_longer_steps_and_more_of_them_take_longer() -> None:
    config = small_model().config
    least = estimated_seconds(config, steps=100, images=8)
    assert least == 100 * compilation.LEAST_STEP
    assert estimated_seconds(config, steps=100, images=10**8) > 2 * least


def test_the_length_of_a_run_is_that_of_its_minutes_or_steps(data) -> None:
    minutes = trainer_of(tiny_config(data, minutes=7.0))
    assert minutes._seconds_without_compilation() == 420
    steps = trainer_of(tiny_config(data, epochs=3))
    assert steps._seconds_without_compilation() == 3 * steps.steps_per_epoch * compilation.LEAST_STEP


@pytest.mark.parametrize(("old", "new"), [(True, "on"), (False, "off")])
def test_options_of_older_runs_are_read(old: bool, new: str) -> None:
    assert TrainConfig.from_dict({"data": "digits", "compile": old}).execution.compile == new
    with pytest.raises(UserError, match="compile"):
        ExecutionOptions(compile="yes")  # type: ignore[arg-type]


def test_the_line_of_the_run_names_the_compilation(data, capsys) -> None:
    trainer = trainer_of(tiny_config(data))
    announcement.announce_run(trainer)
    trainer.compilation = Compilation("graphs")
    announcement.announce_run(trainer)
    plain, compiled = capsys.readouterr().out.splitlines()
    assert compiled == f"{plain}, compiled to CUDA graphs"


# CUDA graphs


class Memory:
    """Compiles graphs whose outputs lie in memory that the next step overwrites, as CUDA graphs' do."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def overwrite(self) -> None:
        """Begin a step."""
        for buffer in self.buffers:
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))

    def compiler(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        own: list[torch.Tensor | None] = []

        def run(*arguments: Any) -> Any:
            outputs = graph(*arguments)
            if not own:
                own.extend(x.clone() if isinstance(x, torch.Tensor) else None for x in outputs)
                self.buffers.extend(buffer for buffer in own if buffer is not None)
            with torch.no_grad():  # aliases, which autograd takes over as gradients
                return [
                    x if buffer is None else buffer.copy_(x).detach()
                    for x, buffer in zip(outputs, own, strict=True)
                ]

        return make_boxed_func(run)

    @functools.cached_property
    def backend(self) -> Any:
        return aot_autograd(fw_compiler=self.compiler, bw_compiler=self.compiler)


@pytest.fixture
def memory(monkeypatch) -> Iterator[Memory]:
    memory, compile_module = Memory(), nn.Module.compile

    def compile(self: nn.Module, *, dynamic: bool, mode: str) -> None:
        assert mode == "reduce-overhead"
        compile_module(self, dynamic=dynamic, backend=memory.backend)

    monkeypatch.setattr(nn.Module, "compile", compile)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", memory.overwrite)
    torch.compiler.reset()
    yield memory
    torch.compiler.reset()


@pytest.mark.parametrize(
    "options", [{"ema": 0.5, "precision": "bf16"}, {"task": "masked", "ema": 0.0, "optimizer": "muon"}]
)
def test_a_run_keeps_nothing_that_the_next_step_overwrites(data, memory, monkeypatch, options) -> None:
    """Losses, sums and weights are those of a run that keeps all its memory, with a shorter last batch."""
    found = []
    for mode in ("off", "graphs"):
        monkeypatch.setattr(compilation, "choose", lambda *_, mode=mode, **__: Compilation(mode))
        trainer = trainer_of(tiny_config(data, batch_size=6, depth=1, warmup_epochs=0.0, **options))
        losses = [
            float(trainer._training_step(batch, epoch))
            for epoch in range(2)
            for batch in trainer.train_loader.epoch(epoch)
        ]
        weights = torch.cat([p.detach().flatten() for p in trainer.module.parameters()])
        found.append((losses, {name: float(value) for name, value in trainer.sums.items()}, weights))
    assert memory.buffers
    (eager, eager_sums, eager_weights), (losses, sums, weights) = found
    assert losses == pytest.approx(eager, rel=0.02)
    assert sums == pytest.approx(eager_sums, rel=0.02, abs=2)
    torch.testing.assert_close(weights, eager_weights, rtol=0.02, atol=2e-3)


# Shards


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
