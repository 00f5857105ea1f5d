"""`vitascope report`: a run on one page."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import tyro

from vitascope.cli.parsing import Device, MaybeText
from vitascope.errors import UserError
from vitascope.remote.stores import is_url

RunFolder = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Write a run's report.html: curves, mistakes, attention.

    The report is one self-contained page: open it, print it, send it.

    Training writes it at the end; this command writes it and the figures again.

    For an unfinished run it shows the progress.
    """

    run: RunFolder
    """A run folder."""
    data: MaybeText = None
    """Where the run's images are now. Default: where they were in training."""
    device: Device = "auto"

    def call(self) -> None:
        """Write the report and print its path."""
        from vitascope.report.write import rewrite_report
        from vitascope.run.run import Run

        if is_url(self.run):
            raise UserError(f"{self.run}: pages are written into local runs only: copy it to a local folder")
        report, missing = rewrite_report(Run.open(self.run), data=self.data, device=self.device)
        if missing:
            print(f"vitascope: {missing}", file=sys.stderr)
        print(report)
