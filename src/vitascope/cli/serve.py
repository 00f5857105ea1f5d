"""`vitascope serve`: a model behind HTTP."""

from __future__ import annotations

import dataclasses
from typing import Literal

from vitascope.cli.parsing import Model
from vitascope.deploy.server.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP, with the attention explorer at /.

    Pictures go to /v1/predict, /v1/explain and /v1/embed; /docs shows how.

    SIGTERM or Ctrl-C ends it when all that it has accepted is answered.
    """

    model: Model
    """A run folder, a model folder or file, a hub id, or an exported file."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto` takes bf16 where this machine is faster with it."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `mps`."""
    settings: Settings = dataclasses.field(default_factory=Settings)

    def call(self) -> None:
        """Serve until a signal."""
        from vitascope.deploy.server.server import serve

        serve(self.model, self.settings, precision=self.precision, device=self.device)
