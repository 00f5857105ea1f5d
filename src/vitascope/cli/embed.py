"""`vitascope embed`: the features of images in a file."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitascope.cli.cluster import Cluster
from vitascope.cli.exits import exit_if_left_out
from vitascope.cli.features import Computation, Representation
from vitascope.cli.parsing import Json, Model
from vitascope.data.table_options import TableOptions
from vitascope.formatting import counted, speed

if TYPE_CHECKING:
    from vitascope.predict.embed import EmbeddedFile, Embeddings


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
    table: TableOptions = dataclasses.field(default_factory=TableOptions)
    """How a table is read."""
    computation: Computation = dataclasses.field(default_factory=Computation)
    """How images are read and features computed."""
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    """Where features are computed."""

    def call(self) -> None:
        """Compute, write and print a summary."""
        self.cluster.check()
        started = time.monotonic()
        with self.computation.exiting_if_stopped():
            found = self._on_ray() if self.cluster.engine == "ray" else self._here()
        if self.json:
            counts = {"images": len(found), "unreadable": len(found.unreadable), "computed": found.computed}
            print(json.dumps({"out": self.out, **counts}))
        else:
            print(
                f"{counted(len(found), 'image')} in {self.out}, {found.computed:,} of them computed now; "
                f"{speed(len(found) / (time.monotonic() - started))}"
            )
        exit_if_left_out(len(found), found.unreadable)

    def _here(self) -> Embeddings:
        """Compute in this process."""
        from vitascope.predict.embed import embed

        return embed(
            self.model,
            self.data,
            out=self.out,
            **dataclasses.asdict(self.representation),
            **dataclasses.asdict(self.table),
            **self.computation.options(),
        )

    def _on_ray(self) -> EmbeddedFile:
        """Compute on the workers of Ray; the file is not read, because it may be larger than the memory."""
        from vitascope.predict.embed import embed_on_ray
        from vitascope.predict.features import FeatureSpec

        options = self.computation.options()
        del options["cache"]  # the parts are what a repeated command continues with
        return embed_on_ray(
            *(self.model, self.data, Path(self.out), self.cluster.ray_address),
            spec=FeatureSpec(**dataclasses.asdict(self.representation)),
            table=self.table,
            **options,
        )
