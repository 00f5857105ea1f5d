"""`vitascope report`: a run on one page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

RunFolder = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Write a run's report.html: curves, mistakes, attention.

    One page that needs nothing else: open it, print it, send it.

    Training writes it at its end; this makes it anew, also of an unfinished run.
    """

    run: RunFolder
    """A run folder."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `mps`."""

    def call(self) -> None:
        """Write the report and say where it is."""
        from vitascope.report.write import write_report

        print(write_report(Path(self.run), device=self.device))
