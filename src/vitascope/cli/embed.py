"""`vitascope embed`: the features of images in a file."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vitascope.cli.exits import exit_if_left_out, exiting_if_stopped, state_of_features
from vitascope.cli.parsing import Device, Flag, Json, MaybeInt, Model, Precision, Workers
from vitascope.data.table_options import TableOptions
from vitascope.formatting import counted, speed

if TYPE_CHECKING:
    from vitascope.predict.embed import Embeddings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embed:
    """Write the features of images to a file.

    Computed features are cached: a repeated command continues an interrupted one.
    """

    model: Model
    """A run folder, a model folder or file, a hub id, or a file of `export --features`."""
    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, with or without labels, a table, or another DATA."""
    out: Path
    """New file: FILE.npz, FILE.npy (with FILE.npy.json beside it) or FILE.parquet."""
    layer: MaybeInt = None
    """The layer, from 0, whose output is read; -1 is the last.
    Default: the result of the model's own pooling."""
    pool: Annotated[
        Literal["cls", "mean", "cls_mean"] | None,
        tyro.conf.arg(metavar="{cls,mean,cls_mean}", help_behavior_hint=""),
    ] = None
    """The class token, the mean of the patches, or both.
    Default with --layer: that of the model, else `mean`."""
    no_cache: Flag = False
    """Compute all features, and keep none in the cache."""
    table: TableOptions = dataclasses.field(default_factory=TableOptions)
    """How a table is read."""
    batch_size: int = 64
    """Images per batch."""
    workers: Workers = None
    precision: Precision = "auto"
    device: Device = "auto"
    json: Json = False

    def call(self) -> None:
        """Compute, write and print a summary."""
        started = time.monotonic()
        with exiting_if_stopped(state_of_features(cached=not self.no_cache)):
            found = self._embed()
        if self.json:
            counts = {"images": len(found), "unreadable": len(found.unreadable), "computed": found.computed}
            print(json.dumps({"out": os.fspath(self.out), **counts}))
        else:
            print(
                f"{counted(len(found), 'image')} in {self.out}, {found.computed:,} of them computed now; "
                f"{speed(len(found) / (time.monotonic() - started))}"
            )
        exit_if_left_out(len(found), found.unreadable)

    def _embed(self) -> Embeddings:
        from vitascope.predict.embed import embed

        return embed(
            self.model,
            self.data,
            out=self.out,
            layer=self.layer,
            pool=self.pool,
            **dataclasses.asdict(self.table),
            batch_size=self.batch_size,
            workers=self.workers,
            precision=self.precision,
            device=self.device,
            cache=not self.no_cache,
        )
