"""Compare the seconds of `vitascope predict` on one machine with and without Ray, from the first to the last.

The rounds are interleaved (without, with, without, with, ...), and every command is a process of its own, so
Ray starts in each. The files that both write are compared.

    python benchmarks/bulk_ray.py --data cifar10
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from conditions import Conditions
from contest import positive
from reports import command_line, markdown_table, note, publish

ENGINES = {
    "one process, reading in others": ["--engine", "local"],
    "Ray on the same machine": ["--engine", "ray"],
}


def seconds_of(model: str, data: Path, out: Path, options: Sequence[str]) -> float:
    """Seconds of a command, from its start to its end."""
    command = [
        sys.executable,
        "-m",
        "vitascope.cli",
        "predict",
        model,
        os.fspath(data),
        "--out",
        os.fspath(out),
    ]
    start = time.perf_counter()
    subprocess.run([*command, *options], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def differing(one: Path, other: Path) -> int:
    """The number of lines that differ."""
    pair = [path.read_text(encoding="utf-8").splitlines() for path in (one, other)]
    return sum(first != second for first, second in zip(*pair, strict=True))


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of images")
    parser.add_argument("--models", nargs="+", default=["cifar10"], help="MODEL arguments")
    parser.add_argument("--rounds", type=positive, default=5, help="interleaved rounds (default 5)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    conditions = Conditions.now()
    rows = []
    for model in arguments.models:
        found: dict[str, list[float]] = {name: [] for name in ENGINES}
        with tempfile.TemporaryDirectory() as scratch:
            outs = {name: Path(scratch) / f"{options[-1]}.jsonl" for name, options in ENGINES.items()}
            for number in range(1, arguments.rounds + 1):
                for name, options in ENGINES.items():
                    outs[name].unlink(missing_ok=True)
                    found[name].append(seconds_of(model, arguments.data, outs[name], options))
                    note(f"{model}, round {number}/{arguments.rounds}, {name}: {found[name][-1]:.1f} s")
            first, second = outs.values()
            images, wrong = len(first.read_bytes().splitlines()), differing(first, second)
        for name, times in found.items():
            spread = f"{min(times):.1f} to {max(times):.1f}"
            lines = f"{wrong:,} of {images:,}" if name == list(ENGINES)[1] else ""
            rows.append((model, name, f"{statistics.median(times):.1f}", spread, lines))
    header = ("model", "workers", "median s", "lowest to highest", "differing lines")
    method = f"interleaved rounds: {arguments.rounds}; whole commands, with the start of Python and of Ray"
    head = conditions.heading("Bulk prediction with and without Ray", method=method)
    publish("bulk_ray", f"{head}\n\n{markdown_table(header, rows)}", arguments)


if __name__ == "__main__":
    main()
