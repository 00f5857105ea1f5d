"""What the machine decides: device, precision, the parts of a batch that fit in the memory, compilation."""

import copy
import dataclasses
import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from vitascope.models.encoder import Block
from vitascope.models.hardware import memory_of, resolve_precision, suitable_threads
from vitascope.models.vision_model import VisionModel
from vitascope.training import distributed
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.plan import Plan

SHARE = 0.5
"""The share of the memory for activations; weights, gradients, moments, data and copies get the rest."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """How this process computes a plan."""

    device: torch.device
    precision: torch.dtype
    """Of matrix products."""
    parts: int
    """In which each process computes a batch, one after the other."""


def place(plan: Plan, model: VisionModel, device: torch.device) -> Placement:
    """Choose the parts and the precision of a model on its device."""
    options = plan.config
    parts = parts_of_batch(options, model, device)
    images = images_at_once(options.option("batch_size"), parts)
    precision = resolve_precision(options.execution.precision, plan.model, device, images, training=True)
    return Placement(device, precision, parts)


def images_at_once(batch_size: int, parts: int) -> int:
    """The number of images that a process computes at once."""
    return max(1, batch_size // (distributed.world_size() * parts))


def parts_of_batch(config: TrainConfig, model: VisionModel, device: torch.device) -> int:
    """The number of parts in which each process computes a batch, so that its activations fit in memory.

    `config.execution.accumulate` where that is set; else the same number in all processes.

    Args:
        config: of the run.
        model: on the device.
        device: of this process.
    """
    if config.execution.accumulate is not None:
        return config.execution.accumulate
    images = math.ceil(config.option("batch_size") / distributed.world_size())
    memory, parts = memory_of(device), 1
    if memory is not None and not config.optimization.freeze:  # a frozen body keeps no activations
        dtype = resolve_precision(config.execution.precision, model.config, device, images, training=True)
        available = SHARE * memory / distributed.processes_sharing(device)
        parts = math.ceil(images * bytes_per_image(model, dtype) / available)
    (parts,) = map(int, distributed.largest(parts))
    return min(max(1, parts), images)


def bytes_per_image(model: VisionModel, dtype: torch.dtype = torch.float32) -> int:
    """The bytes of activations that a training step keeps for the backward pass, per image, measured.

    Args:
        model: on the device that will train it: the devices' kernels keep different tensors.
        dtype: of the matrix products.
    """
    device = next(model.parameters()).device
    with suitable_threads(model.config, device, 3), torch.random.fork_rng(devices=[]):
        # Of a copy: batch normalization in training mode changes its averages.
        trained = copy.deepcopy(model).train()
        # Without the weights, which are kept once; 2, because batch normalization cannot train on 1 image.
        return _kept_bytes(trained, 3, dtype) - _kept_bytes(trained, 2, dtype)


def _kept_bytes(model: VisionModel, images: int, dtype: torch.dtype) -> int:
    """The bytes of all tensors that a forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}  # the storages' sizes by address, because several tensors may share one

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    config, device = model.config, next(model.parameters()).device
    pixels = torch.zeros(images, config.in_channels, *config.image_hw, device=device)  # (B, C, H, W)
    with (
        torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        output = model(pixels)  # keeps its graph, so that no address is used twice
    del output
    return sum(kept.values())


def compile_module(module: nn.Module) -> None:
    """Compile a module in place at its first call; names of parameters stay.

    If it is sharded, each block is compiled by itself: FSDP gathers a block's weights before its compiled
    part, so that this has no graph breaks. Blocks of equal shapes and options share a graph.
    """
    if not distributed.is_sharded(module):
        module.compile(dynamic=False)
        return
    blocks = [part for part in module.modules() if isinstance(part, Block)]
    # Each block may have its own rate of stochastic depth; two kinds of queries, four sizes of images.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 8 * len(blocks))
    for block in blocks:
        block.compile(dynamic=False)


def eager_unless(compiles: bool) -> AbstractContextManager[None]:
    """A context of passes that run eagerly where compiling does not pay: other batches have many sizes."""
    return nullcontext() if compiles else torch.compiler.set_stance("force_eager")
