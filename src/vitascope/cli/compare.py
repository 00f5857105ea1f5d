"""`vitascope compare`: several runs side by side."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import tyro

from vitascope.cli.parsing import Json, MaybePath


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
    out: MaybePath = None
    """Write comparison.html and comparison.png to this folder, or NAME.html and NAME.png.
    Existing files are replaced."""
    json: Json = False

    def call(self) -> None:
        """Compare, print, and write."""
        from vitascope.report.comparison_page import compare, write_comparison

        comparison = compare(self.runs)
        written = [] if self.out is None else write_comparison(comparison, self.out)
        if self.json:
            print(json.dumps(comparison.to_dict()))
        else:
            print("\n".join([comparison.text(), *map(str, written)]))
