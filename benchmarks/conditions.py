"""The conditions of a measurement: machine, versions, date and command."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Self

import torch

import vitascope as vs
from vitascope.models.hardware import bf16_units

PEERS = ("timm", "transformers", "torchvision")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """What every report states."""

    machine: str
    versions: str
    date: str
    command: str

    @classmethod
    def now(cls) -> Self:
        """Describe this process; to be called before it puts load on the machine."""
        return cls(
            machine=describe_machine(),
            versions=describe_versions(),
            date=datetime.date.today().isoformat(),
            command=shlex.join(["python", *sys.argv]),
        )

    def heading(self, title: str, **others: str) -> str:
        """The head of a report: the title, then a list of the conditions and of `others`."""
        stated = {
            "machine": self.machine,
            "versions": self.versions,
            "date": self.date,
            "command": f"`{self.command}`",
            **others,
        }
        return f"# {title}\n\n" + "\n".join(f"- {name}: {text}" for name, text in stated.items())


def installed_peers() -> list[str]:
    """The installed ones of the libraries to compare with."""
    return [peer for peer in PEERS if importlib.util.find_spec(peer) is not None]


def describe_machine() -> str:
    """The GPU, if there is one, the CPU, torch's number of threads, and the load of other work."""
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    load = f", load average {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    return (
        f"{gpu}{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{bf16_units() or 'no bf16 units'}{load}"
    )


def cpu_name() -> str:
    """The processor's name from Linux, or Python's elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_versions() -> str:
    """The versions of Python, torch, Pillow, vitascope and the installed peers."""
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "Pillow", *installed_peers())
    ]
    # Of the package that is imported, which need not be installed.
    return ", ".join([f"Python {platform.python_version()}", f"vitascope {vs.__version__}", *versions])
