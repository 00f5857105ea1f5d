"""The options of commands that compute features of images, perhaps on a cluster."""

import dataclasses
from contextlib import AbstractContextManager
from typing import Annotated, Literal

import tyro

from vitascope.cli.exits import exiting_if_stopped
from vitascope.errors import UserError
from vitascope.models.engines.compute import Compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Representation:
    """What is read of the model."""

    layer: int | None = None
    """The layer, from 0, whose output is read; -1 is the last.
    Default: the result of the model's own pooling."""
    pool: Literal["cls", "mean", "cls_mean"] | None = None
    """The class token, the mean of the patches, or both.
    Default with --layer: that of the model, else `mean`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a command on many images computes."""

    engine: Literal["local", "ray"] = "local"
    """`local` computes in this process.
    `ray` computes on the workers of Ray, in parts, into --out; it needs pip install 'vitascope[ray]'.
    Then --workers are the readers of each: by default none, beside a GPU its cores."""
    ray_address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """With --engine ray: `auto` for the cluster that this machine belongs to, or HOST:PORT of its head.
    Default: Ray on this machine alone, for as long as the command runs."""

    @property
    def ray(self) -> str | None:
        """The address of Ray; None without.

        Raises:
            UserError: an address without Ray.
        """
        if self.ray_address is not None and self.engine != "ray":
            raise UserError("--ray-address needs --engine ray")
        return None if self.engine == "local" else self.ray_address or "local"


def exiting_with_cache(compute: Compute) -> AbstractContextManager[None]:
    """SIGINT and SIGTERM stop the command at once; it says what is left."""
    kept = "repeat the command to continue with the cached features"
    return exiting_if_stopped(kept if compute.cache else "nothing is kept")
