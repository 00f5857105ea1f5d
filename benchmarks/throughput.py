"""Measure this machine's throughput with a model, by precision and batch size, beside its matrix products.

    python benchmarks/throughput.py runs/small --batch-sizes 1 8 --seconds 12

MODEL is a run, a model folder or file, a hub id, an exported file, or a named size with random weights. A
batch starts as bytes and ends as probabilities; decoding is not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vitascope.deploy.export.throughput import Step, take_turns, timed_step
from vitascope.errors import UserError
from vitascope.models.engines.engine import Engine, TorchEngine
from vitascope.models.engines.runtimes import exported_file_at, open_engine
from vitascope.models.hardware import (
    bf16_units,
    has_bf16,
    resolve_device,
    resolve_precision,
    reuse_freed_memory,
)
from vitascope.models.sizes import NAMED_SIZES, named_config
from vitascope.models.vision_model import VisionModel, build
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.preprocess import default_preprocess

ROUNDS = 3
CPU_PRODUCT, GPU_PRODUCT = 2048, 8192
"""Sides of square matrices, large enough to reach the peak of a CPU or a GPU."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Throughput:
    """One precision and batch size."""

    batch_size: int
    precision: str
    """`fp32`, `bf16`, or `as exported`."""
    is_auto: bool
    """Whether precision `auto` chooses this one."""
    seconds: tuple[float, ...]
    """Of every timed batch."""
    flops: int | None
    """Floating-point operations per image, a multiply-add counting as 2; None if unknown."""
    ceiling: float | None
    """Floating-point operations per second of this machine's fastest matrix product in this precision: a
    large square one or one of the model's shape, whichever is faster."""

    @property
    def images_per_second(self) -> float:
        """Of the median batch."""
        return self.batch_size / statistics.median(self.seconds)

    @property
    def share(self) -> float | None:
        """The share of the ceiling; None if that or the operations are unknown."""
        if self.flops is None or self.ceiling is None:
            return None
        return self.images_per_second * self.flops / self.ceiling

    def __repr__(self) -> str:
        return (
            f"Throughput(batch {self.batch_size}, {self.precision}: {self.images_per_second:,.1f} images/s)"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A model in several precisions, or an exported model in its own."""

    engines: dict[str, Engine]
    """By precision."""
    description: str
    """For people."""
    left_out: tuple[str, ...] = ()
    """Reasons why a precision is not measured, for people."""

    @classmethod
    def open(
        cls, ref: str | os.PathLike[str], *, precisions: Sequence[str], device: str = "auto"
    ) -> Benchmark:
        """Open a MODEL reference, an exported model, or a named size with random weights.

        bf16 is left out if the device would emulate it; an exported model has a precision of its own.
        """
        if not precisions:
            raise UserError("nothing to measure: precisions is empty")
        name = os.fspath(ref)
        weights = ""
        if name in NAMED_SIZES and not Path(name).exists():
            config = named_config(name)
            model: VisionModel = build(config if config.gives_classes else config.replace(head="linear"))
            model.preprocess = default_preprocess(config)
            weights = ", random weights"
        elif exported_file_at(ref) is not None:
            engine = open_engine(ref, device=device)
            return cls(engines={"as exported": engine}, description=engine.description)
        else:
            model = from_pretrained(ref)
        place = resolve_device(device)
        native = [precision for precision in precisions if precision != "bf16" or has_bf16(place)]
        emulated = f"bf16 is not measured: this {place.type} would emulate it, far slower than fp32"
        if not native:
            raise UserError(f"{emulated}; measure fp32")
        return cls(
            engines={
                precision: TorchEngine(model, precision=precision, device=device) for precision in native
            },
            description=f"{model.config.summary}{weights}, on {place}",
            left_out=() if len(native) == len(precisions) else (emulated,),
        )

    def measure(self, batch_sizes: Sequence[int], seconds: float) -> list[Throughput]:
        """Measure every precision and batch size in turns with the matrix products.

        So a machine that slows down meanwhile slows down all of them alike.
        """
        if not batch_sizes:
            raise UserError("nothing to measure: batch_sizes is empty")
        if min(batch_sizes) < 1:
            raise UserError(f"a batch has at least 1 image, not {min(batch_sizes)}")
        cases = [(size, precision) for size in batch_sizes for precision in self.engines]
        steps = [timed_step(self.engines[precision], size) for size, precision in cases]
        products: list[tuple[str, int]] = []  # precision and operations
        for precision, engine in self.engines.items():
            if isinstance(engine, TorchEngine):
                side = CPU_PRODUCT if engine.device.type == "cpu" else GPU_PRODUCT
                D, tokens = engine.config.embed_dim, max(batch_sizes) * engine.config.num_tokens
                # Square matrices, and a layer of the model, for which a library may have a faster kernel.
                for M, K, N in ((side, side, side), (tokens, D, 4 * D)):
                    steps.append(product(M, K, N, _DTYPES[precision], engine.device))
                    products.append((precision, 2 * M * K * N))
        times = take_turns(steps, rounds=ROUNDS, seconds=seconds)
        ceilings: dict[str, float] = {}
        for (precision, flops), found in zip(products, times[len(cases) :], strict=True):
            ceilings[precision] = max(ceilings.get(precision, 0.0), flops / min(found))
        rows = []
        for (size, precision), found in zip(cases, times, strict=False):
            engine, is_auto = self.engines[precision], True
            if isinstance(engine, TorchEngine):
                auto = resolve_precision("auto", engine.config, engine.device, size, training=False)
                is_auto = _DTYPES[precision] == auto
            rows.append(
                Throughput(
                    batch_size=size,
                    precision=precision,
                    is_auto=is_auto,
                    seconds=tuple(found),
                    flops=engine.config.flops if isinstance(engine, TorchEngine) else None,
                    ceiling=ceilings.get(precision),
                )
            )
        return rows


@torch.inference_mode()
def product(M: int, K: int, N: int, dtype: torch.dtype, device: torch.device) -> Step:
    """A linear layer's product (M, K) x (K, N)."""
    inputs = torch.randn(M, K, device=device, dtype=dtype)
    weight = torch.randn(N, K, device=device, dtype=dtype)

    @torch.inference_mode()
    def step() -> None:
        F.linear(inputs, weight)[0, 0].item()  # waits for the device

    return step


def machine() -> dict[str, Any]:
    """The machine, in plain values."""
    return {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bf16_units": bf16_units(),
    }


def number_in_words(found: dict[str, Any]) -> str:
    """The machine in one line."""
    units = found["bf16_units"] or "no units for bf16"
    return f"torch {found['torch']}, {found['threads']} threads on {found['cores']} cores, {units}"


def table(rows: Sequence[Throughput]) -> list[str]:
    """One line per row, under a header."""
    lines = ["batch  precision    images/s  slowest to fastest  ms/image  of the ceiling"]
    for row in rows:
        slowest, fastest = (row.batch_size / pick(row.seconds) for pick in (max, min))
        share = "-" if row.share is None else f"{row.share:.0%}"
        spread = f"{slowest:,.1f} to {fastest:,.1f}"
        lines.append(
            f"{row.batch_size:>5}  {row.precision:<11} {row.images_per_second:>9,.1f}  {spread:>18}  "
            f"{1000 / row.images_per_second:>8,.1f}  {share:>14}{'  <- auto' if row.is_auto else ''}"
        )
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="vit_b16")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--precisions", nargs="+", choices=list(_DTYPES), default=list(_DTYPES))
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    reuse_freed_memory()
    benchmark = Benchmark.open(asked.model, precisions=asked.precisions, device=asked.device)
    rows = benchmark.measure(asked.batch_sizes, asked.seconds)
    print(f"{asked.model}: {benchmark.description}\n{number_in_words(machine())}\n")
    print("\n".join(table(rows)))
    ceilings = {row.precision: row.ceiling for row in rows if row.ceiling is not None}
    if ceilings:
        words = ", ".join(f"{ceiling / 1e9:,.0f} in {name}" for name, ceiling in ceilings.items())
        print(f"\nThe ceiling: GFLOP per second of this machine's matrix products: {words}.")
    for reason in benchmark.left_out:
        print(f"{reason}.")


if __name__ == "__main__":
    main()
