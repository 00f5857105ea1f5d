"""`vitascope report` and `vitascope compare`: a run on one page, several side by side."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import tyro

from vitascope.cli.parsing import Device, Json
from vitascope.errors import UserError, nearest_path

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
    data: str | None = None
    """Where the run's images are now. Default: where they were in training."""
    device: Device = "auto"

    def call(self) -> None:
        """Write the report and print its path."""
        from vitascope.analysis.report.write import rewrite_report
        from vitascope.training.run.run import Run

        if not os.path.isdir(self.run):
            nearest = nearest_path(self.run)
            raise UserError(f"{self.run}: no local folder{nearest}; reports are written into local runs only")
        report, missing = rewrite_report(Run.open(self.run), data=self.data, device=self.device)
        if missing:
            print(f"vitascope: {missing}", file=sys.stderr)
        print(report)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare runs: options, curves, accuracy or mAP, a paired test.

    The paired test (McNemar's) uses the images that two runs were both tested on.

    On images of several classes, it is a bootstrap of the mAP.

    Runs that differ in their seed only are also averaged.
    """

    runs: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(required)")]
    ]
    """2 to 24 run folders, finished or not."""
    out: Path | None = None
    """Write comparison.txt, and the curves as comparison.png, to this folder; existing files are replaced."""
    json: Json = False

    def call(self) -> None:
        """Compare, print, and write."""
        from vitascope.analysis.report.comparison_figure import compare, write_comparison

        comparison = compare(self.runs)
        written = [] if self.out is None else write_comparison(comparison, self.out)
        if self.json:
            print(json.dumps(comparison.to_dict()))
        else:
            print("\n".join([comparison.text(), *map(str, written)]))
