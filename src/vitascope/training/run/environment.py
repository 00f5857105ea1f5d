"""The environment of a run: enough to explain why another one differs, and nothing that names a person."""

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from vitascope._version import __version__
from vitascope.models.hardware import bf16_units, memory_of, resolve_device


def describe_environment(device: str, processes: int = 1) -> dict[str, Any]:
    """Date, command, versions and machine, for `environment.json`; unknown values are left out.

    It contains no environment variables, no host or user name, and the home folder is `~`.
    """
    where, memory = resolve_device(device), memory_of(torch.device("cpu"))
    values = {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": without_home(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "vitascope": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "bf16_units": bf16_units(),
        "threads": torch.get_num_threads(),
        "processes": processes,
        "device": where.type,
        "gpu": torch.cuda.get_device_name(where) if where.type == "cuda" else None,
        "cuda": torch.version.cuda if where.type == "cuda" else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def describe_installation() -> str:
    """The machine and the versions of the libraries, one value per line, for a report of an error."""
    values = describe_environment("auto") | {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
        "cuda": torch.version.cuda,
    }
    requirements = importlib.metadata.requires("vitascope") or []  # of the extras too
    for name in sorted({re.split(r"[^\w.-]", requirement)[0] for requirement in requirements} - {"torch"}):
        for distribution in importlib.metadata.distributions(name=name):
            values[name] = distribution.version
    of_a_run = ("started", "command", "vitascope", "threads", "processes")
    return "\n".join(f"{name}: {value}" for name, value in values.items() if value and name not in of_a_run)


def cpu_name() -> str | None:
    """The model name of the CPU, or its architecture if the system does not report the name."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or platform.machine() or None
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        for line in listed.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine() or None


def without_home(text: str) -> str:
    """A text with `~` in place of the home folder's path, which names a person."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
