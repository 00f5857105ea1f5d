"""Output of benchmarks: dated files in `results/`, and sections between the markers of a page."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from chinese import in_chinese
from conditions import Conditions

RESULTS = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
"""Where reports go: $OUT if it is set."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, also aligned as plain text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        for row in (header, rule, *rows)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's description, with the option --out of `publish`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", action="store_true", help="also write the report to benchmarks/results")
    return parser


def publish(name: str, report: str, arguments: argparse.Namespace) -> None:
    """Print the report; with --out, also write it to benchmarks/results."""
    print(report)
    if arguments.out:
        path = RESULTS / f"{datetime.date.today().isoformat()}-{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{report}\n", encoding="utf-8")
        note(f"wrote {path}")


class Numbers(Conditions, ABC):
    """The raw numbers of a benchmark and their conditions: a dataclass of plain values, stored as JSON."""

    name: ClassVar[str]
    """The benchmark's name."""

    @classmethod
    @abstractmethod
    def from_plain(cls, values: dict[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`."""

    @classmethod
    def newest(cls) -> Self:
        """Read the newest measurement; raises FileNotFoundError without any."""
        return cls.from_plain(json.loads(newest_numbers(cls.name).read_text(encoding="utf-8")))

    def write(self) -> None:
        """Write all raw numbers."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{datetime.date.today().isoformat()}-{self.name}.json"
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def newest_numbers(name: str) -> Path:
    """Return the newest JSON file of a benchmark.

    Raises:
        FileNotFoundError: there is no such file.
    """
    found = sorted(RESULTS.glob(f"????-??-??-{name}.json"))
    if not found:
        raise FileNotFoundError(f"no {name} in {RESULTS} yet: measure with --out first")
    return found[-1]


def between(text: str, marker: str) -> str:
    """The text between `<!-- marker -->` and `<!-- /marker -->`."""
    found = re.search(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", text, re.DOTALL)
    if found is None:
        raise ValueError(f"no <!-- {marker} --> with its <!-- /{marker} -->")
    return found[1]


def fill_in(page: Path, marker: str, content: str) -> None:
    """Replace the text between the markers of a page, and of the Chinese page beside it."""
    _replace(page, marker, content)
    chinese = page.with_suffix(".zh.md")
    if chinese.is_file():
        _replace(chinese, marker, in_chinese(content).rstrip())


def _replace(page: Path, marker: str, content: str) -> None:
    text = page.read_text(encoding="utf-8")
    old = f"<!-- {marker} -->\n{between(text, marker)}"
    page.write_text(text.replace(old, f"<!-- {marker} -->\n{content}\n"), encoding="utf-8")
    note(f"filled in {page}")


def note(message: str) -> None:
    """Log progress to stderr; stdout is for the report only."""
    print(message, file=sys.stderr, flush=True)
