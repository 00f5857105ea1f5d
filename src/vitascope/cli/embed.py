"""`vitascope embed`: the features of images in a file."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitascope.cli.parsing import Device, Flag, Json, MaybeInt, Model, Precision, Workers
from vitascope.data.table_options import TableOptions
from vitascope.formatting import counted, speed

NAMED = 10
"""Unreadable images whose reasons are printed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embed:
    """Write the features of images to a file.

    Computed features are cached: a repeated command continues an interrupted one.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, with or without labels, a table, or another DATA; all its images."""
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
        from vitascope.predict.embed import embed
        from vitascope.training.signals import Stop, interruptible

        stop, started = Stop(), time.monotonic()
        try:
            with interruptible(stop):
                found = embed(
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
        except KeyboardInterrupt:
            kept = "" if self.no_cache else "; repeat the command to continue with the cached features"
            print(f"vitascope: stopped by {signal.Signals(stop.signum).name}{kept}", file=sys.stderr)
            sys.exit(128 + stop.signum)
        seconds = time.monotonic() - started
        unreadable = len(found.unreadable)
        if self.json:
            counts = {"images": len(found), "unreadable": unreadable, "computed": found.computed}
            print(json.dumps({"out": os.fspath(self.out), **counts}))
        else:
            print(
                f"{counted(len(found), 'image')} in {self.out}, {found.computed:,} of them computed now; "
                f"{speed(len(found) / seconds)}"
            )
        if unreadable:
            print(f"{counted(unreadable, 'image')} could not be read:", file=sys.stderr)
            for reason in found.unreadable[:NAMED]:
                print(f"  {reason}", file=sys.stderr)
            if unreadable > NAMED:
                print(f"  and {unreadable - NAMED:,} more", file=sys.stderr)
            sys.exit(1)
