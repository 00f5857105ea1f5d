"""`vitascope bench`: this machine's throughput, by precision and batch size."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitascope.cli.parsing import Device, Json, MaybeModel
from vitascope.errors import UserError

if TYPE_CHECKING:
    from vitascope.predict.throughput import Throughput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure this machine's throughput.

    A batch starts as bytes and ends as probabilities; decoding is not measured.
    """

    model: MaybeModel = "vit_b16"
    """A run folder, a model folder or file, a hub id, or an exported model.
    Or a name from `vitascope models`, with random weights. Default: vit_b16."""
    batch_sizes: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT ...")] = (1, 8)
    """Images per batch."""
    precisions: Annotated[
        tuple[Literal["fp32", "bf16"], ...],
        tyro.conf.arg(metavar="{fp32,bf16} ..."),
    ] = ("fp32", "bf16")
    """Precisions to compare; the choice of `--precision auto` is marked.
    bf16 is left out if the device only emulates it."""
    seconds: float = 12.0
    """Total measuring time, without loading. Each batch is computed at least twice, however long it takes."""
    device: Device = "auto"
    json: Json = False

    def call(self) -> None:
        """Measure and print."""
        if not self.seconds > 0:
            raise UserError(f"--seconds must be above 0, not {self.seconds:g}")
        from vitascope.model.hardware import reuse_freed_memory
        from vitascope.predict.throughput import Benchmark, machine

        reuse_freed_memory()
        benchmark = Benchmark.open(
            self.model, precisions=list(dict.fromkeys(self.precisions)), device=self.device
        )
        rows = benchmark.measure(list(dict.fromkeys(self.batch_sizes)), self.seconds)
        if self.json:
            plain = {"left_out": benchmark.left_out, "rows": [as_plain(row) for row in rows]}
            print(json.dumps({"model": self.model, **machine(), **plain}))
            return
        print(f"{self.model}: {benchmark.description}\n{number_in_words(machine())}\n")
        print("\n".join(table(rows)))
        ceilings = {row.precision: row.ceiling for row in rows if row.ceiling is not None}
        if ceilings:
            found = ", ".join(f"{ceiling / 1e9:,.0f} in {name}" for name, ceiling in ceilings.items())
            print(f"\nThe ceiling: GFLOP per second of this machine's matrix products: {found}.")
        for reason in benchmark.left_out:
            print(f"{reason}.")


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


def as_plain(row: Throughput) -> dict[str, Any]:
    """One row for JSON."""
    return {
        "batch_size": row.batch_size,
        "precision": row.precision,
        "auto": row.is_auto,
        "images_per_second": row.images_per_second,
        "slowest": row.batch_size / max(row.seconds),
        "fastest": row.batch_size / min(row.seconds),
        "steps": len(row.seconds),
        "ceiling_flops_per_second": row.ceiling,
        "share_of_ceiling": row.share,
    }
