"""`vitascope pack`: images to a few large files that are read fast."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated

import tyro

from vitascope.report.wording import counted
from vitascope.training.options import MaybeInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pack:
    """Write images as tar shards, which train faster from slow disks."""

    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, or what else `vitascope train --data` takes."""
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
    """The new folder."""
    image_size: MaybeInt = None
    """Make pictures whose shorter side is longer this small, in pixels: JPEG, quality 95.
    Default: every file keeps its bytes."""
    shard_mb: int = 256
    """Megabytes of a shard."""

    def call(self) -> None:
        """Pack, and say what was written."""
        from vitascope.data.pack import pack

        packed = pack(self.data, self.out, shard_mb=self.shard_mb, image_size=self.image_size)
        for reason in packed.unreadable.values():
            print(f"left out: {reason}")
        for split, shards in packed.index.splits.items():
            megabytes = sum(shard.bytes for shard in shards) / 1e6
            print(
                f"{split:<6} {counted(packed.index.images(split), 'image')} in "
                f"{counted(len(shards), 'shard')}, {megabytes:,.1f} MB"
            )
        print(f"train on them: vitascope train --data {shlex.quote(str(self.out))}")
