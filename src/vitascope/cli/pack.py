"""`vitascope pack`: images to a few large files that are read fast."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Annotated

import tyro

from vitascope.cli.parsing import Folder, MaybeInt
from vitascope.data.table_options import TableOptions
from vitascope.formatting import counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pack:
    """Write images as tar shards, which train faster from slow disks."""

    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, or any other DATA of `vitascope train`."""
    out: Folder
    """The new folder."""
    image_size: MaybeInt = None
    """Shrink larger images to this shorter side, in pixels, as JPEG of quality 95.
    Default: copy every file unchanged."""
    shard_mb: int = 256
    """Size of a shard, in megabytes."""
    table: TableOptions = dataclasses.field(default_factory=TableOptions)
    """How a table is read."""

    def call(self) -> None:
        """Pack, and print a summary."""
        from vitascope.data.pack import pack

        packed = pack(
            self.data, self.out, shard_mb=self.shard_mb, image_size=self.image_size, table=self.table
        )
        for reason in packed.unreadable.values():
            print(f"left out: {reason}")
        for split, shards in packed.index.splits.items():
            megabytes = sum(shard.bytes for shard in shards) / 1e6
            print(
                f"{split:<6} {counted(packed.index.images(split), 'image')} in "
                f"{counted(len(shards), 'shard')}, {megabytes:,.1f} MB"
            )
        print(f"train on them: vitascope train --data {shlex.quote(str(self.out))}")
