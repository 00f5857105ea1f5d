"""`vitascope audit`: what is wrong with the images of a data set."""

import dataclasses
import json
from typing import Annotated

import tyro

from vitascope.cli.features import exiting_with_cache
from vitascope.cli.parsing import Json, arguments_of
from vitascope.data.table_options import DataOptions, TableOptions
from vitascope.formatting import counted, duration
from vitascope.models.engines.compute import Compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """Find wrong labels, copies and other faults of images.

    It plants such faults too, and says how many of them it finds.

    You decide on the page audit.html what to drop or relabel.

    train, probe and evaluate take the decisions as --audit.
    """

    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, a table, or another DATA, with or without labels."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(required)")]
    """A new folder for audit.csv, audit.html, and the scores of images and classes."""
    body: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL ...")] = ("cifar10",)
    """Models whose features are compared. A large one sees more in photographs."""
    seed: int = 0
    """Of the folds, and of what is planted."""
    json: Json = False
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""
    compute: Compute = dataclasses.field(default_factory=Compute)
    """How images are read and features computed."""

    def call(self) -> None:
        """Audit, and print the number of findings and how much is noticed."""
        from vitascope.analysis.auditing.audit import audit

        with exiting_with_cache(self.compute):
            found = audit(**arguments_of(self, "body", "json"), bodies=self.body)
        if self.json:
            planted = [dataclasses.asdict(each) for each in found.planted]
            values = {"images": len(found.names), "findings": dict(found.counts), "planted": planted}
            files = {"csv": str(found.csv), "page": str(found.page), "scores": list(map(str, found.scores))}
            print(json.dumps({**values, "notes": list(found.notes), **files}))
            return
        heading = f"{counted(len(found.names), 'image')}, {duration(found.seconds)}"
        print("\n".join([heading, *found.lines(), *map(str, (found.csv, *found.scores, found.page))]))
