"""`vitascope compress`: a smaller or faster model, with its cost and gain."""

from __future__ import annotations

import dataclasses

from vitascope.cli.parsing import Device, Folder, MaybeFloat, MaybeInt, MaybeText, Model, Precision
from vitascope.formatting import counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compress:
    """Make a model faster: merge tokens, prune heads and MLPs.

    Writes an ordinary model folder and compares both models.

    Merging needs no training. After pruning: `vitascope train --weights FOLDER`.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    out: Folder
    """The new folder."""
    merge: MaybeInt = None
    """Patches that every block merges with the most similar ones: 8 to 16 of 196; 0 removes merging."""
    heads: MaybeInt = None
    """Attention heads to keep in every block."""
    mlp_ratio: MaybeFloat = None
    """Width of the MLPs' hidden layers to keep, over `embed_dim`: 4 in most models."""
    data: MaybeText = None
    """DATA with the model's classes: training images decide what is pruned, test images measure the accuracy.
    Default: the run's own, and its validation images if it has less than 1,000 test images."""
    images: int = 512
    """Training images that pruning uses."""
    batch_size: int = 8
    """Images per batch when speed is measured."""
    precision: Precision = "auto"
    device: Device = "auto"

    def call(self) -> None:
        """Compress and print the comparison."""
        from vitascope.deploy.export.compress import compress
        from vitascope.model.hardware import reuse_freed_memory

        reuse_freed_memory()
        result = compress(
            self.model,
            self.out,
            merge=self.merge,
            heads=self.heads,
            mlp_ratio=self.mlp_ratio,
            data=self.data,
            num_images=self.images,
            batch_size=self.batch_size,
            precision=self.precision,
            device=self.device,
        )
        costs = (result.before, result.after)
        rows = [
            ("", "before", "after"),
            ("parameters", *(f"{cost.parameters:,}" for cost in costs)),
            ("GFLOPs per image", *(f"{cost.flops / 1e9:,.3g}" for cost in costs)),
            (f"images/s, batch {result.batch_size}", *(f"{cost.images_per_second:,.1f}" for cost in costs)),
        ]
        found = result.paired
        if found is not None:
            measured, intervals = zip(*found.rows(), strict=True)
            images = counted(found.total, f"{result.measured_on} image")
            rows += [(f"{found.name}, {images}", *measured), ("95% interval", *intervals)]
        width = max(len(row[0]) for row in rows)
        for title, *values in rows:
            print(f"{title:<{width}}" + "".join(f"{value:>18}" for value in values))
        if found is not None:
            print(f"loses {found}")
        print(f"written to {result.folder}")
        if result.pruned:
            print(
                f"continue training: vitascope train --data {result.data or 'DATA'} --weights {result.folder}"
            )
