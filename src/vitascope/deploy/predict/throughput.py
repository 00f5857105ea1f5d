"""How many images a second an engine answers on this machine, beside what its matrix products reach."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from vitascope.deploy.predict.engine import Engine, TorchEngine
from vitascope.deploy.predict.runtimes import open_engine
from vitascope.errors import UserError
from vitascope.model.classifier import build
from vitascope.model.hardware import has_bf16, resolve_device, resolve_precision
from vitascope.model.sizes import NAMED_SIZES, ModelConfig, named_config
from vitascope.weights.loading import from_pretrained

Step = Callable[[], object]
"""What is timed."""

ROUNDS = 3
CPU_PRODUCT, GPU_PRODUCT = 2048, 8192
"""Sides of square matrices that are large enough to reach what a CPU, or a GPU, can."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PRECISION_OF = {dtype: name for name, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """One precision and batch."""

    batch_size: int
    """Images at a time."""
    precision: str
    """`fp32` or `bf16`; of an exported file, whatever is in it."""
    is_auto: bool
    """Whether this is what `auto` takes."""
    seconds: tuple[float, ...]
    """Of every batch that was timed."""
    flops: int | None
    """Floating-point operations of an image, a multiply-add counting as 2; None where they are not known."""
    ceiling: float | None
    """Floating-point operations a second of this machine's fastest matrix product in this precision: a large
    square one, or one of the model's shape, whichever was measured to be faster."""

    @property
    def images_per_second(self) -> float:
        """Of the median batch."""
        return self.batch_size / statistics.median(self.seconds)

    @property
    def share(self) -> float | None:
        """Of the ceiling; None where that or the operations are not known."""
        if self.flops is None or self.ceiling is None:
            return None
        return self.images_per_second * self.flops / self.ceiling


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entrant:
    """One precision and batch, ready to be timed."""

    batch_size: int
    precision: str
    is_auto: bool
    flops: int | None
    step: Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured: a model in several precisions, or an exported file in its own."""

    engines: dict[str, Engine]
    """By precision."""
    description: str
    """For people."""
    left_out: tuple[str, ...] = ()
    """Why a precision is not measured, for people."""

    def measure(self, batch_sizes: Sequence[int], seconds: float) -> list[Throughput]:
        """Throughput in every precision and batch, in interleaved rounds beside the matrix products.

        A machine that slows down in the middle thus slows down for all. Every batch is of random pixels: they
        do not change the time. It begins with bytes on the CPU and ends with probabilities there.

        Args:
            batch_sizes: images at a time.
            seconds: of timed work for all of them together; each batch is computed twice, whatever it takes.

        Raises:
            UserError: a batch of nothing.
        """
        entrants = [
            self._entrant(precision, batch_size) for batch_size in batch_sizes for precision in self.engines
        ]
        products = [
            (precision, *product)
            for precision, engine in self.engines.items()
            if isinstance(engine, TorchEngine)
            for product in (
                square_product(_DTYPES[precision], engine.device),
                model_product(engine.config, max(batch_sizes), _DTYPES[precision], engine.device),
            )
        ]
        steps = [entrant.step for entrant in entrants] + [step for _, step, _ in products]
        times = take_turns(steps, seconds)
        ceilings: dict[str, float] = {}
        for (precision, _, flops), found in zip(products, times[len(entrants) :], strict=True):
            ceilings[precision] = max(ceilings.get(precision, 0.0), flops / min(found))
        return [
            Throughput(
                batch_size=entrant.batch_size,
                precision=entrant.precision,
                is_auto=entrant.is_auto,
                seconds=tuple(found),
                flops=entrant.flops,
                ceiling=ceilings.get(entrant.precision),
            )
            for entrant, found in zip(entrants, times, strict=False)
        ]

    def _entrant(self, precision: str, batch_size: int) -> _Entrant:
        if batch_size < 1:
            raise UserError(f"a batch has at least 1 image, not {batch_size}")
        engine = self.engines[precision]
        fit = engine.preprocess
        pixels = torch.randint(256, (batch_size, fit.channels, *fit.image_size), dtype=torch.uint8)
        is_auto, flops = True, None
        if isinstance(engine, TorchEngine):
            auto = resolve_precision("auto", engine.config, engine.device, batch_size, training=False)
            is_auto, flops = _PRECISION_OF[auto] == precision, engine.config.flops
        return _Entrant(
            batch_size=batch_size,
            precision=precision,
            is_auto=is_auto,
            flops=flops,
            step=lambda: engine.outputs(pixels),
        )


def subject(ref: str | os.PathLike[str], *, precisions: Sequence[str], device: str = "auto") -> Subject:
    """What a MODEL argument, an exported file or a named size means here.

    Args:
        ref: a named size has random weights, which take as long as others.
        precisions: `fp32`, `bf16`; an exported file has its own. bf16 is left out where the device would
            emulate it.
        device: `auto`, or a torch device.

    Raises:
        CheckpointError: as `from_pretrained`.
        UserError: as `open_engine`, an unknown precision, or nothing but an emulated one.
    """
    name = os.fspath(ref)
    if name in NAMED_SIZES and not Path(name).exists():
        config = named_config(name)
        if not config.gives_classes:
            config = config.replace(head="linear")
        model, weights = build(config), ", random weights"
    else:
        from vitascope.deploy.predict.runtimes import exported_file_at

        if exported_file_at(ref) is not None:
            engine = open_engine(ref, device=device)
            return Subject(engines={"as exported": engine}, description=engine.description)
        model, weights = from_pretrained(ref), ""
    place = resolve_device(device)
    native = [precision for precision in precisions if precision != "bf16" or has_bf16(place)]
    reason = f"bf16 is not measured: this {place.type} has no units for it, and emulating it is far slower"
    left_out = (f"{reason} than fp32",)
    if not native:
        raise UserError(f"{left_out[0]}; measure fp32")
    engines = {precision: TorchEngine(model, precision=precision, device=device) for precision in native}
    return Subject(
        engines=dict(engines),
        description=f"{model.config.summary}{weights}, on {place}",
        left_out=() if len(native) == len(precisions) else left_out,
    )


def take_turns(steps: Sequence[Step], seconds: float) -> list[list[float]]:
    """Seconds of each step, every time: a round of all after another, each for an equal part of the time.

    Every step is timed once at least; once the time is over, no other is begun.
    """
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step()  # what is made once is made here
    over = time.perf_counter() + seconds
    for _ in range(ROUNDS):
        for step, found in zip(steps, times, strict=True):
            begun = time.perf_counter()
            if found and begun >= over:
                continue
            end = begun + seconds / (ROUNDS * len(steps))
            while True:
                start = time.perf_counter()
                step()
                now = time.perf_counter()
                found.append(now - start)
                if now >= end:
                    break
    return times


def square_product(dtype: torch.dtype, device: torch.device) -> tuple[Step, int]:
    """One product of large square matrices, and its operations."""
    size = CPU_PRODUCT if device.type == "cpu" else GPU_PRODUCT
    return product_step((size, size, size), dtype, device)


def model_product(
    config: ModelConfig, batch_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Step, int]:
    """One linear layer D to 4D for all tokens of a batch, and its operations.

    A library may have a better kernel for a model's shapes than for square matrices.
    """
    D = config.embed_dim
    return product_step((batch_size * config.num_tokens, D, 4 * D), dtype, device)


@torch.inference_mode()
def product_step(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Step, int]:
    """A linear layer's product (M, K) x (K, N), and its operations."""
    M, K, N = sizes
    inputs, weight = (
        torch.randn(M, K, device=device, dtype=dtype),
        torch.randn(N, K, device=device, dtype=dtype),
    )

    @torch.inference_mode()
    def step() -> None:
        F.linear(inputs, weight)[0, 0].item()  # waits for the device

    return step, 2 * M * K * N
