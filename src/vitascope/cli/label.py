"""`vitascope label`: from a folder of pictures to labels and a classifier, in the browser."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import tyro

from vitascope.cli.parsing import Flag, arguments_of
from vitascope.data.table_options import DataOptions, TableOptions
from vitascope.formatting import counted
from vitascope.models.engines.compute import Compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Label:
    """Label pictures in the browser while a classifier learns.

    The pictures whose labels tell the most come first.

    Each label is saved at once, in a table that train, probe and audit take.

    A repeated command continues; labels that the data have can be corrected.
    """

    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="FOLDER")]]
    """A folder of images, with or without labels, or a table of them."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE", help_behavior_hint="(required)")]
    """The table, FILE.csv: image, label, source and time. An existing one is continued."""
    body: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "cifar10"
    """The model whose features are compared. A large one sees more in photographs."""
    several: Flag = False
    """Let a picture have any number of classes."""
    port: int = 0
    """Of the page on this machine; 0 takes a free one."""
    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = True
    """Open the page in a browser; `--no-open` only prints its address."""
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How a table is read."""
    compute: Compute = dataclasses.field(default_factory=Compute)
    """How images are read and features computed."""

    def call(self) -> dict[str, object]:
        """Serve the page until Ctrl-C, then count the labels."""
        from vitascope.deploy.labelling.label import labelling, serve_session
        from vitascope.training.signals import Stop, interruptible

        with labelling(**arguments_of(self, "body", "compute", "open")) as server:
            pictures = counted(len(server.session.names), "picture")
            print(f"{pictures} at {server.address} (Ctrl-C ends it)", flush=True)
            with suppress(KeyboardInterrupt), interruptible(Stop()):
                serve_session(server, self.body, self.compute, in_browser=self.open)
            labels = len(server.session.table.labels)
        print(f"\n{counted(labels, 'label')} in {self.out}")
        return {"labels_file": self.out} if labels else {}
