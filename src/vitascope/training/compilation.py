"""torch.compile: the parts of a module and the batches that are compiled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from vitascope.model.encoder import Block
from vitascope.training import distributed


def compile_module(module: nn.Module) -> None:
    """Compile a module in place at its first call; names of parameters stay.

    If it is sharded, each block is compiled by itself: FSDP gathers a block's weights before its compiled
    part, so that this has no graph breaks. Blocks of equal shapes and options share a graph.
    """
    if not distributed.is_sharded(module):
        module.compile(dynamic=False)
        return
    blocks = [part for part in module.modules() if isinstance(part, Block)]
    # Each block may have its own rate of stochastic depth; two kinds of queries, two sizes of images.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(blocks))
    for block in blocks:
        block.compile(dynamic=False)


def eager_unless(compiles: bool) -> AbstractContextManager[None]:
    """The context of a forward pass that runs eagerly where compiling does not pay: batches that are not full
    have many sizes."""
    return nullcontext() if compiles else torch.compiler.set_stance("force_eager")
