"""torch.compile: the runs that it pays for, the parts of a module and the batches that are compiled."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.utils._triton import has_triton

from vitascope.errors import UserError
from vitascope.model.encoder import Block
from vitascope.model.sizes import ModelConfig
from vitascope.training import distributed

# These numbers are assumptions: they were not measured on a GPU.
LEAST_SECONDS = 300.0
"""The shortest run without compilation that `auto` compiles."""
FLOPS_PER_SECOND = 1e14
"""Of a GPU in a training step, as the length of a run is estimated: a third of an A100's peak in bf16."""
LEAST_STEP = 0.01
"""Seconds of a step however small its model is: a thousand launches, of some 10 microseconds each."""


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Whether a run's module is compiled, and if `auto` does not, why."""

    mode: Literal["on", "off", "graphs"] = "off"
    reason: str = ""

    def in_words(self) -> str:
        """For the line about how a run is computed: ", compiled"; empty if there is nothing to say."""
        words = {"on": ", compiled", "graphs": ", compiled to CUDA graphs"}
        return words.get(self.mode, f", not compiled: {self.reason}" if self.reason else "")

    def apply(self, module: nn.Module) -> None:
        """Compile a module in place at its first call; names of parameters stay.

        If it is sharded, each block is compiled by itself: FSDP gathers a block's weights before its compiled
        part, so that this has no graph breaks. Blocks of equal shapes and options share a graph.

        With CUDA graphs, outputs and gradients lie in memory that the next step overwrites. So whatever the
        loop keeps is computed from outputs outside of the module, and gradients are released in each step.
        """
        if self.mode == "off":
            return
        options = {"mode": "reduce-overhead"} if self.mode == "graphs" else {}
        blocks = [part for part in module.modules() if isinstance(part, Block)]
        if not distributed.is_sharded(module):
            module.compile(dynamic=False, **options)
            return
        # Each block may have its own rate of stochastic depth; two kinds of queries, two sizes of images.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(blocks))
        for block in blocks:
            block.compile(dynamic=False)

    def step(self, *, full: bool) -> AbstractContextManager[None]:
        """The context of a forward pass; one that is not of a full batch, of which there are many sizes,
        runs eagerly."""
        if self.mode == "off":
            return nullcontext()
        if not full:
            return torch.compiler.set_stance("force_eager")
        if self.mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        return nullcontext()


def choose(asked: str, device: torch.device, *, seconds: float, parts: int) -> Compilation:
    """The compilation of a run, the same in all processes.

    `auto` compiles on CUDA, if Triton and a C compiler are there and the run takes at least 5 minutes without
    it. This assumes, without a measurement, that compiling a ViT takes up to a minute and a compiled step
    three quarters of the time, so that 5 minutes gain it back. CUDA graphs are only used if asked for.

    Args:
        asked: the option `compile`.
        device: of this process.
        seconds: that the run takes, as given or as `estimated_seconds` has it.
        parts: in which each batch is computed.

    Raises:
        UserError: CUDA graphs where they do not work.
    """
    if asked == "graphs":
        _check_graphs(device, parts)
        return Compilation("graphs")
    if asked == "on":
        return Compilation("on")
    if asked == "off" or device.type != "cuda":
        return Compilation()
    reason = missing_tool()
    if not reason and seconds < LEAST_SECONDS:
        reason = (
            f"it pays from {LEAST_SECONDS / 60:.0f} minutes on, and this run takes about {seconds / 60:.1g}"
        )
    reason = next(filter(None, distributed.gather(reason)), "")
    return Compilation("off", reason) if reason else Compilation("on")


def _check_graphs(device: torch.device, parts: int) -> None:
    """Reject what CUDA graphs do not support."""
    where = ""
    if device.type != "cuda":
        where = f"this run is on {device}"
    elif distributed.world_size() > 1:
        where = f"this run has {distributed.world_size()} processes, which exchange gradients"
    elif parts > 1:  # gradients of a part would be overwritten by those of the next one
        where = f"this run computes each batch in {parts} parts, which accumulate gradients"
    if where:
        raise UserError(
            f"compile=graphs needs a GPU and one process that computes each batch at once, and {where}: set "
            "compile=on"
        )


def missing_tool() -> str:
    """The part that torch.compile lacks on this machine's GPU, in words; empty if it has all."""
    if not has_triton():
        return "no Triton for this GPU"
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]  # Triton's choice
    if not any(shutil.which(compiler) for compiler in compilers):
        return "no C compiler"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no Python.h, of the package python3-dev"
    return ""


def estimated_seconds(config: ModelConfig, *, steps: int, images: int) -> float:
    """The seconds of so many training steps on a GPU, without compilation, roughly.

    Args:
        config: of the model.
        steps: of the run.
        images: per step in this process.
    """
    return steps * max(LEAST_STEP, 3 * config.flops * images / FLOPS_PER_SECOND)
