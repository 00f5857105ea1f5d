"""Devices, the fastest precision on them, threads and memory.

The precisions of a model, in training and prediction:

- fp32 is float32 throughout: on a GPU, matrix products and convolutions do without TF32 (`without_tf32`).
  PyTorch's default is TF32 for convolutions alone.
- bf16 in training is autocast over float32 weights, moments and losses. All tokens between the layers, the
  residual stream, are bf16 on every device; norms take and return bf16, and compute in float32 inside.
  FSDP gathers bf16 weights instead, and adds up gradients in float32.
- bf16 in prediction is a model of bf16 weights.
- fp16 is as bf16, with scaled losses.
"""

import ctypes
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vitascope.errors import UserError, check_choice
from vitascope.models.sizes import ModelConfig

PRECISIONS = ("auto", "fp32", "bf16")
TRAINING_PRECISIONS = (*PRECISIONS, "fp16")
"""Only training scales its losses for the narrow range of fp16."""
FREE_GPU_MEMORY_OVER_IMAGES, MEMORY_OVER_IMAGES = 4, 8
"""A GPU's free memory, and the memory of another device, over the part that a run's images may take."""
GPU_TOKENS = 2**16
"""Tokens of a batch that keep a GPU busy."""
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The memory in bytes that a container may use, or `max` (cgroup v2)."""


def resolve_device(device: str) -> torch.device:
    """The device of a name; `auto` is the first of CUDA, MPS and CPU that this machine has."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device {device!r} cannot be used here: {reason}; try the device 'auto'") from error
    return torch.device(device)


def resolve_precision(
    precision: str, config: ModelConfig, device: torch.device, batch_size: int, *, training: bool
) -> torch.dtype:
    """The dtype to compute in; `auto` is bf16 where it is faster, else fp32.

    With AMX, matrix products are about 8 times faster, with AVX-512 BF16 twice; small ones do not outweigh
    the conversions. The limits are those of benchmarks/results/2026-11-20-precision.md.
    """
    check_choice("precision", precision, TRAINING_PRECISIONS if training else PRECISIONS)
    if precision != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    if device.type == "cuda":
        return torch.bfloat16 if has_bf16(device) else torch.float32
    units = bf16_units() if device.type == "cpu" else None
    if units is None:
        return torch.float32
    tokens = batch_size * config.num_tokens
    work = tokens * config.embed_dim**2  # multiply-adds of one square layer
    # Training also converts weights and gradients, which takes longer than the products on AMX.
    pays = work >= 2**23 and tokens >= 256 if training and units == "AMX" else work >= 2**21
    return torch.bfloat16 if pays else torch.float32


def without_tf32(device: torch.device) -> None:
    """Compute float32 as float32 on a GPU, for the whole process. TF32 keeps 10 bits of its factors, and who
    asks for fp32 there, where `auto` is bf16, wants exact numbers."""
    if device.type == "cuda":
        # These set both interfaces of PyTorch, which fail to read each other's settings if these differ.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False


def has_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bf16; torch emulates it on others, on a CPU many times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "cpu" or bf16_units() is not None


def bf16_units() -> str | None:
    """The CPU's units for bf16: `AMX` (matrices), `AVX-512 BF16` (vectors) or None."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX-512 BF16" if torch.cpu._is_avx512_bf16_supported() else None


def memory_of(device: torch.device) -> int | None:
    """The memory of a device in bytes; None if the system does not report it.

    That of a CPU is the machine's, or less if a container limits it.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.is_file() else "max"
    return min(memory, int(limit)) if limit.isdigit() else memory


def room_for_images(device: torch.device, processes: int = 1) -> int:
    """The bytes of a run's images that may stay on a device, for each process that shares its memory.

    That is a quarter of a GPU's free memory. Of other memory (`memory_of`) it is an eighth, or 0 where the
    system does not report it.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // FREE_GPU_MEMORY_OVER_IMAGES
    return (memory_of(device) or 0) // MEMORY_OVER_IMAGES // processes


def images_per_batch(config: ModelConfig, device: torch.device, on_cpu: int) -> int:
    """The default number of images per batch where a model predicts, `on_cpu` on a CPU.

    On a GPU it is the largest power of two with at most `GPU_TOKENS` tokens, and at most 1,024: 256 images of
    224 pixels for a ViT-B/16. Larger batches take memory.
    """
    if device.type != "cuda":
        return on_cpu
    return min(2 ** int(math.log2(max(1, GPU_TOKENS // config.num_tokens))), 1024)


@contextmanager
def suitable_threads(config: ModelConfig, device: torch.device, batch_size: int) -> Iterator[None]:
    """Use one CPU thread for small layers: two that wait for each other may take 10 times as long."""
    threads = torch.get_num_threads()
    if device.type == "cpu" and batch_size * config.num_tokens * config.embed_dim < 2**18:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def explaining_memory() -> Iterator[None]:
    """Raise `UserError` for an allocation that fails, on a GPU or a CPU."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is one
        reason = str(error)
        on_cpu = isinstance(error, MemoryError) or "can't allocate memory" in reason
        if not on_cpu and not isinstance(error, torch.OutOfMemoryError):
            raise
        size = re.search(r"(\d+) bytes|Tried to allocate ([\d.]+ \w+)", reason)
        more = f" ({size[2] or f'{int(size[1]) / 2**30:,.1f} GiB'} more requested)" if size else ""
        raise UserError(
            f"out of memory{more}; try a smaller batch size, accumulating gradients, "
            "gradient checkpointing, or a smaller image size or model"
        ) from error


def return_freed_memory() -> None:
    """Let glibc give the memory that is free now back to the system."""
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def reuse_freed_memory() -> None:
    """Let glibc keep freed memory, for the whole process: faulting it in again costs a fifth of a step."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # the numbers are those of malloc.h
        libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks too come from the heap ...
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: ... which never shrinks
