"""Measure the start-up of commands: their CPU time over that of `import torch`.

    .venv/bin/python benchmarks/startup.py --out

The CPU time is that of whole processes, user and system. Each round starts every process once, one after the
other, and the least of all rounds counts, so that other work on the machine matters little.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from conditions import Conditions
from reports import command_line, markdown_table, publish
from vitascope.data.samples import PHOTOS

TORCH = "import torch"
VITASCOPE = (sys.executable, "-m", "vitascope.cli")
PROCESSES = {
    TORCH: (sys.executable, "-c", TORCH),
    "vitascope --help": (*VITASCOPE, "--help"),
    "vitascope predict cifar10 photo.jpg": (*VITASCOPE, "predict", "cifar10", str(PHOTOS["horse"])),
    "vitascope train --data digits --steps 1": (*VITASCOPE, "train", "--data", "digits", "--steps", "1"),
}


def cpu_seconds(command: tuple[str, ...]) -> float:
    """The user and system time of a process, in an empty working directory."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, cwd=Path(folder))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=8, help="how often each process is started (default: 8)"
    )
    arguments = parser.parse_args()
    conditions = Conditions.now()
    rounds = [
        {name: cpu_seconds(command) for name, command in PROCESSES.items()} for _ in range(arguments.rounds)
    ]
    least = {name: min(times[name] for times in rounds) for name in PROCESSES}
    rows = [
        (f"`{name}`", f"{seconds:.2f}", f"{seconds / least[TORCH]:.2f}") for name, seconds in least.items()
    ]
    table = markdown_table(("process", "CPU seconds", "of `import torch`"), rows)
    heading = conditions.heading("Start-up of commands", rounds=str(arguments.rounds))
    publish("startup", f"{heading}\n\n{table}", arguments)


if __name__ == "__main__":
    main()
