"""`vitascope embed`: the features of images in a file."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

import tyro

from vitascope.cli.exits import exit_if_left_out, exiting_with_parts
from vitascope.cli.features import Cluster, Representation, exiting_with_cache
from vitascope.cli.parsing import Json, Model, arguments_of
from vitascope.data.table_options import DataOptions, TableOptions
from vitascope.formatting import counted, speed
from vitascope.models.engines.compute import Compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embed:
    """Write the features of images to a file.

    Computed features are cached: a repeated command continues an interrupted one.
    """

    model: Model
    """A run folder, a model folder or file, a hub id, or a file of `export --features`."""
    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, with or without labels, a table, or another DATA."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """New file: FILE.npz, FILE.npy (with FILE.npy.json beside it) or FILE.parquet, also in a store (s3://...)."""
    json: Json = False
    representation: Representation = dataclasses.field(default_factory=Representation)
    """What is read of the model."""
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""
    compute: Compute = dataclasses.field(default_factory=Compute)
    """How images are read and features computed."""
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    """Where features are computed."""

    def call(self) -> None:
        """Compute, write and print a summary."""
        from vitascope.data.features.embed import embed

        ray = self.cluster.ray
        started = time.monotonic()
        stopping = exiting_with_cache(self.compute)
        if ray is not None:
            stopping = exiting_with_parts(Path(self.out), self.out, "repeat the command to continue")
        with stopping:
            options = arguments_of(self, "json", "representation", "cluster")
            found = embed(**options, **dataclasses.asdict(self.representation), ray=ray)
        if self.json:
            counts = {"images": len(found), "unreadable": len(found.unreadable), "computed": found.computed}
            print(json.dumps({"out": self.out, **counts}))
        else:
            print(
                f"{counted(len(found), 'image')} in {self.out}, {found.computed:,} of them computed now; "
                f"{speed(len(found) / (time.monotonic() - started))}"
            )
        exit_if_left_out(len(found), found.unreadable)
