"""torch.compile: when it is used, and that CUDA graphs overwrite nothing that a run keeps."""

import functools
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

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
