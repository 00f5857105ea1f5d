"""`vitascope models`, `convert`, `compress` and `pack`: models and data in other forms."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitascope.cli.parsing import Device, Folder, Json, Model, Precision, arguments_of
from vitascope.data.table_options import DataOptions, TableOptions
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.models.config import ViTConfig
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.sizes import NAMED_SIZES, ModelConfig, named_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a model in another library's format, and compare both."""

    model: Model
    """A run folder, a model folder, a weights file, a hub id, or a name like torchvision/vit_b_16."""
    out: Folder
    """The new folder."""
    format: Annotated[
        Literal["vitascope", "timm", "huggingface", "torchvision", "jax", "deit", "dinov2", "dinov3"],
        tyro.conf.arg(aliases=["--to"]),
    ] = "vitascope"
    """The library to load it with; `deit`, `dinov2` and `dinov3` are their own repositories."""
    images: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PICTURE ...")] = ()
    """Pictures to compare the outputs on.
    Default: two photographs from scikit-learn; random tensors for a model without 1 or 3 channels."""

    def call(self) -> None:
        """Convert, compare, print."""
        from vitascope.models.weights.convert import convert

        print(convert(self.model, self.out, format=self.format, images=self.images))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """List the named models with size, parameters, cost and source."""

    image_size: int | None = None
    """Image side in pixels for the counts. Default: each model's own, mostly 224."""
    num_classes: int = 1000
    """Number of classes of the heads."""
    json: Json = False

    def call(self) -> None:
        """Count from the shapes and print."""
        overrides: dict[str, Any] = {} if self.image_size is None else {"image_size": self.image_size}
        configs: dict[str, ModelConfig] = {}
        misfits = {}
        for name in NAMED_SIZES:
            try:
                config = named_config(name, **overrides)
                with_head = config.gives_classes
                configs[name] = config.replace(num_classes=self.num_classes) if with_head else config
            except UserError as error:
                misfits[name] = error
        if not configs:
            raise next(iter(misfits.values()))
        if self.json:
            print(json.dumps({name: self._row(name, config) for name, config in configs.items()}))
            return
        tables = []
        for kind, header in _HEADERS.items():
            if lines := [_line(*item) for item in configs.items() if isinstance(item[1], kind)]:
                tables.append("\n".join([header, *lines]))
        print("\n\n".join(tables))
        for name, reason in misfits.items():
            print(f"{name:<20} left out: {reason}")
        print(
            f"\nParameters with {self.num_classes} classes, where a model has a head (DINO's have none).\n"
            "FLOPs of one image's forward pass; a multiply-add counts as 2, in papers' FLOPs mostly as 1."
        )

    @staticmethod
    def _row(name: str, config: ModelConfig) -> dict[str, Any]:
        """A model in JSON."""
        return {
            "architecture": "resnet" if isinstance(config, ResNetConfig) else "vit",
            **config.to_dict(),
            "parameters": config.num_parameters,
            "flops": config.flops,
            "source": NAMED_SIZES[name].source,
        }


_HEADERS: dict[type[ModelConfig], str] = {
    ViTConfig: "name                 pixels  tokens  width  depth  heads   parameters   GFLOPs  source",
    ResNetConfig: "name                 pixels     units   width       root   parameters   GFLOPs  source",
}


def _line(name: str, config: ModelConfig) -> str:
    if isinstance(config, ResNetConfig):
        sizes = f"{','.join(map(str, config.layers)):>9} {config.width:>7} {config.root:>10}"
    else:
        sizes = f"{config.num_tokens:>7} {config.embed_dim:>6} {config.depth:>6} {config.num_heads:>6}"
    return (
        f"{name:<20} {config.image_hw[0]:>6} {sizes} {config.num_parameters / 1e6:>10.2f} M "
        f"{config.flops / 1e9:>8.1f}  {NAMED_SIZES[name].source}"
    )


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
    merge: int | None = None
    """Patches that every block merges with the most similar ones: 8 to 16 of 196; 0 removes merging."""
    heads: int | None = None
    """Attention heads to keep in every block."""
    mlp_ratio: float | None = None
    """Width of the MLPs' hidden layers to keep, over `embed_dim`: 4 in most models."""
    data: str | None = None
    """DATA with the model's classes: training images decide what is pruned, test images measure the accuracy.
    Default: the run's own, and its validation images if it has less than 1,000 test images."""
    images: int = 512
    """Training images that pruning uses."""
    batch_size: int = 8
    """Images per batch when speed is measured."""
    precision: Precision = "auto"
    device: Device = "auto"

    def call(self) -> dict[str, object]:
        """Compress and print the comparison."""
        from vitascope.deploy.export.compress import compress
        from vitascope.models.hardware import reuse_freed_memory

        reuse_freed_memory()
        result = compress(**arguments_of(self, "images"), num_images=self.images)
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
        return {"pruned": result.folder, "data": result.data or "DATA"} if result.pruned else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pack:
    """Write images as tar shards, which train faster from slow disks."""

    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, or any other DATA of `vitascope train`."""
    out: Folder
    """The new folder."""
    image_size: int | None = None
    """Shrink larger images to this shorter side, in pixels, as JPEG of quality 95.
    Default: copy every file unchanged."""
    shard_mb: int = 256
    """Size of a shard, in megabytes."""
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""

    def call(self) -> None:
        """Pack, and print a summary."""
        from vitascope.data.pack import pack

        packed = pack(**arguments_of(self))
        for reason in packed.unreadable:
            print(f"left out: {reason}")
        for split, shards in packed.index.splits.items():
            megabytes = sum(shard.bytes for shard in shards) / 1e6
            print(
                f"{split:<6} {counted(packed.index.images(split), 'image')} in "
                f"{counted(len(shards), 'shard')}, {megabytes:,.1f} MB"
            )
