"""The options of commands that compute features of images: groups that several share."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal

import tyro

from vitascope.cli.exits import exiting_if_stopped
from vitascope.cli.parsing import Device, Flag, MaybeInt, Precision, Workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Representation:
    """What is read of the model."""

    layer: MaybeInt = None
    """The layer, from 0, whose output is read; -1 is the last.
    Default: the result of the model's own pooling."""
    pool: Annotated[
        Literal["cls", "mean", "cls_mean"] | None,
        tyro.conf.arg(metavar="{cls,mean,cls_mean}", help_behavior_hint=""),
    ] = None
    """The class token, the mean of the patches, or both.
    Default with --layer: that of the model, else `mean`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """How images are read and features computed."""

    no_cache: Flag = False
    """Compute all features, and keep none in the cache."""
    batch_size: MaybeInt = None
    """Images per batch. Default: 64; on a GPU as many as keep it busy."""
    workers: Workers = None
    precision: Precision = "auto"
    device: Device = "auto"

    def options(self) -> dict[str, Any]:
        """The keywords of the library's functions."""
        values = dataclasses.asdict(self)
        return {"cache": not values.pop("no_cache"), **values}

    def exiting_if_stopped(self) -> AbstractContextManager[None]:
        """SIGINT and SIGTERM stop the command at once; it says what is left."""
        kept = "repeat the command to continue with the cached features"
        return exiting_if_stopped("nothing is kept" if self.no_cache else kept)
