"""The options of `vitascope serve`: address, limits, access. Needs neither torch nor the extra `server`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated

import tyro

from vitascope.errors import UserError

TOKEN = "VITASCOPE_TOKEN"
"""The environment variable for the bearer token."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
LEAST = {"port": 0, "workers": 1, "threads": 0, "max_batch": 1, "max_wait_ms": 0, "queue": 1}
LEAST |= {"max_files": 1, "max_connections": 0, "grace_s": 0}
"""The smallest values; other numbers must be above 0."""
MaybeFile = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
Hosts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The server's address and limits; a number out of range is a `UserError`."""

    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 means all IPv4 addresses, :: all addresses; then set a token."""
    port: int = 8000
    """The port; 0 means a free one."""
    workers: int = 1
    """Processes, each with its own model; they share the port and the cores."""
    threads: int = 0
    """Threads per model. 0: the cores, divided among the workers."""
    max_batch: int = 32
    """Maximum pictures per batch."""
    max_wait_ms: float = 0.0
    """Time that an idle model waits for more pictures."""
    queue: int = 128
    """Maximum requests in progress per worker; more get 429."""
    deadline_ms: float = 2000.0
    """Predictions that take longer get 504; X-Deadline-Ms shortens it for one request."""
    explain_deadline_ms: float = 30000.0
    """Explanations that take longer get 504."""
    max_body_mb: float = 16.0
    """Maximum megabytes per request; larger ones get 413."""
    max_megapixels: float = 50.0
    """Maximum million pixels per picture; larger ones get 413 before they are decoded."""
    max_decode_mb: float = 512.0
    """Maximum megabytes of memory for decoding a picture; others get 413. Linux only."""
    max_files: int = 32
    """Maximum pictures per form."""
    read_timeout_s: float = 10.0
    """Seconds for a request's body to arrive; slower ones get 408."""
    read_stall_s: float = 3.0
    """Seconds that a body may pause; longer ones get 408."""
    header_timeout_s: float = 10.0
    """Seconds for a request's headers to arrive; slower ones get 408."""
    keep_alive_s: float = 5.0
    """Seconds that a connection stays open between requests; behind a proxy, more than the proxy's own."""
    max_connections: int = 0
    """Maximum open connections per worker; more get 503. 0: as the limit of open files allows."""
    stalled_s: float = 60.0
    """Seconds after which a model that does not answer makes the server not ready."""
    grace_s: float = 30.0
    """Seconds for accepted requests to finish when the server stops."""
    token_file: MaybeFile = None
    """A file with the bearer token that clients must send; or set VITASCOPE_TOKEN."""
    allowed_hosts: Hosts = ()
    """Accepted Host headers. Default: this machine's own on a loopback --host, else any."""
    root_path: str = ""
    """The path under which a proxy publishes this server, for example /vitascope."""
    access_log: bool = True
    """Log each request."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not ROOT_PATH.fullmatch(self.root_path):
            form = "like /vitascope, without a / at its end"
            raise UserError(f"--root-path must be {form}, not {self.root_path!r}")
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            least = LEAST.get(name)
            if not (value > 0 if least is None else value >= least):
                accepted = "above 0" if least is None else f"at least {least}"
                raise UserError(f"--{name.replace('_', '-')} must be {accepted}, not {value}")
        if self.port > 65535:
            raise UserError(f"--port must be at most 65535, not {self.port}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK or self.host.startswith("127.")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The accepted names in the Host header; empty for any."""
        own = (*LOOPBACK, self.host) if self.is_loopback else ()
        return (*own, *self.allowed_hosts) if own or self.allowed_hosts else ()
