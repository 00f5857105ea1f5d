"""`vitascope models` and `vitascope convert`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitascope.cli.parsing import Folder, Json, MaybeInt, Model
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.model.resnet_config import ResNetConfig
from vitascope.model.sizes import NAMED_SIZES, ModelConfig, named_config


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
    images: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PICTURE ...", help_behavior_hint="")] = ()
    """Pictures to compare the outputs on.
    Default: two photographs from scikit-learn; random tensors for a model without 1 or 3 channels."""

    def call(self) -> None:
        """Convert, compare, print."""
        from vitascope.weights.convert import convert

        print(convert(self.model, self.out, format=self.format, images=self.images))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """List the named models with size, parameters, cost and source."""

    image_size: MaybeInt = None
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
            if lines := [_line(*each) for each in configs.items() if isinstance(each[1], kind)]:
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
