"""`vitascope report`: a run on one page."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import tyro

from vitascope.training.options import MaybeText

RunFolder = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Write a run's report.html: curves, mistakes, attention.

    One page that needs nothing else: open it, print it, send it.

    Training writes it at its end; this writes it and the figures again.

    Of an unfinished run it shows how far it is.
    """

    run: RunFolder
    """A run folder."""
    data: MaybeText = None
    """Where the run's images are now. Default: where they were in training."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `mps`."""

    def call(self) -> None:
        """Write the report and say where it is."""
        from vitascope.report.write import write_again
        from vitascope.run.run import Run

        report, missing = write_again(Run.open(self.run), data=self.data, device=self.device)
        if missing:
            print(f"vitascope: {missing}", file=sys.stderr)
        print(report)
