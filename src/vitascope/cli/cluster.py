"""The options of commands that may compute on a cluster."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import tyro

from vitascope.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a command on many images computes."""

    engine: Annotated[Literal["local", "ray"], tyro.conf.arg(metavar="{local,ray}")] = "local"
    """`local` computes in this process.
    `ray` computes on the workers of Ray, in parts, into --out; it needs pip install 'vitascope[ray]'.
    Then --workers are the readers of each: by default none, beside a GPU its cores."""
    ray_address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="")] = None
    """With --engine ray: `auto` for the cluster that this machine belongs to, or HOST:PORT of its head.
    Default: Ray on this machine alone, for as long as the command runs."""

    def check(self) -> None:
        """Reject an address without Ray."""
        if self.ray_address is not None and self.engine != "ray":
            raise UserError("--ray-address needs --engine ray")
