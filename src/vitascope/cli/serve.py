"""`vitascope serve`: a model behind HTTP."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from vitascope.cli.parsing import Device, MaybeModel, Precision
from vitascope.deploy.server.settings import Settings
from vitascope.weights.builtin import DEFAULT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP, with the attention explorer at /.

    Pictures go to /v1/predict, /v1/explain and /v1/embed; /docs has examples.

    Needs an extra: pip install 'vitascope[server]'.

    SIGTERM or Ctrl-C stops it after all accepted requests are answered.
    """

    model: MaybeModel = DEFAULT
    """A run folder, a model folder or file, a hub id, or an exported file. Default: the built-in cifar10."""
    beside: Annotated[str | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = None
    """Another model, which the explorer compares with this one on the same picture."""
    precision: Precision = "auto"
    device: Device = "auto"
    settings: Annotated[Settings, tyro.conf.arg(name="server")] = dataclasses.field(default_factory=Settings)

    def call(self) -> None:
        """Serve until SIGTERM or Ctrl-C."""
        from vitascope.deploy.server.server import serve

        serve(self.model, self.settings, beside=self.beside, precision=self.precision, device=self.device)
