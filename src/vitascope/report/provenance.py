"""How a run is done again: its configuration, and where it was started."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping
from typing import Any

from vitascope.report.html import Section, code, definitions, folded, join, note, paragraph, table
from vitascope.run.environment import without_home
from vitascope.run.run import Run


def date(text: str) -> str:
    """A moment of ISO 8601 as people write it."""
    return datetime.datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z")


def configuration_section(run: Run) -> Section:
    """Every option of the run, and the command that does the same again."""
    rows = [
        (code(name), "" if value is None else without_home(_plain(value)))
        for name, value in run.config.items()
    ]
    command = "train" if run.classifies else "pretrain"
    path = shlex.quote(without_home(str(run.config_file)))
    again = code(f"vitascope {command} --config {path} --run NEW")
    return Section(
        "configuration",
        "Configuration",
        join(
            [
                paragraph(again, " does the same again."),
                folded("Every option", table(("option", "value"), rows)),
            ]
        ),
    )


def environment_section(run: Run) -> Section:
    """The machine and the versions that the run was started with."""
    if not run.environment:
        text = "This run did not record its environment: it is older than such records."
        return Section("environment", "Environment", note(text))
    return Section("environment", "Environment", definitions(environment_rows(run.environment)))


def environment_rows(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    """What `environment.json` says, named as people name it."""
    names = {
        "started": "Started",
        "command": "Command",
        "vitascope": "vitascope",
        "torch": "PyTorch",
        "python": "Python",
        "platform": "System",
        "cpu": "CPU",
        "cores": "Cores",
        "threads": "Threads",
        "memory_gib": "Memory",
        "bf16_units": "bf16 in hardware",
        "processes": "Processes",
        "device": "Device",
        "gpu": "GPU",
        "cuda": "CUDA",
    }
    units = {"memory_gib": " GiB"}
    rows: list[tuple[str, object]] = []
    for key, name in names.items():
        if key in found:
            value = date(found[key]) if key == "started" else f"{found[key]}{units.get(key, '')}"
            rows.append((name, code(value) if key == "command" else value))
    return rows


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(str(part) for part in value)
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
