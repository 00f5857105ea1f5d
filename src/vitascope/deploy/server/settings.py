"""The options of `vitascope serve`: address, limits, access. Needs neither torch nor the extra `server`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated

import tyro

from vitascope.errors import UserError

TOKEN = "VITASCOPE_TOKEN"
"""The environment variable that may hold the bearer token."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
LEAST = {"port": 0, "workers": 1, "threads": 0, "max_batch": 1, "max_wait_ms": 0, "queue": 1}
LEAST |= {"max_files": 1, "max_connections": 0, "grace_s": 0}
"""The smallest values; other numbers must be above 0."""
MaybeFile = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
Hosts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The server's address and limits.

    Raises:
        UserError: a number out of range.
    """

    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 is every IPv4 address of this machine, :: all; set a token then."""
    port: int = 8000
    """The port; 0 takes a free one."""
    workers: int = 1
    """Processes, each with a model of its own; they share the port and the processor's cores."""
    threads: int = 0
    """Threads that a model computes with. 0: the cores, shared among the workers."""
    max_batch: int = 32
    """Pictures that are computed together, at most."""
    max_wait_ms: float = 0.0
    """How long an idle model waits for more pictures; 0 takes what is there."""
    queue: int = 128
    """Requests that wait or are computed at a time, in each worker; more get 429."""
    deadline_ms: float = 2000.0
    """A prediction that is not done by then gets 504; a request may ask for less by X-Deadline-Ms."""
    explain_deadline_ms: float = 30000.0
    """The same for explanations."""
    max_body_mb: float = 16.0
    """Megabytes of a request, at most; more get 413."""
    max_megapixels: float = 50.0
    """Million pixels of a picture, at most; more get 413 before they are decoded."""
    max_decode_mb: float = 512.0
    """Megabytes of memory that decoding a picture may take; more get 413. Linux only."""
    max_files: int = 32
    """Pictures in a form, at most."""
    read_timeout_s: float = 10.0
    """Seconds in which a request's body has to arrive whole; a slower one gets 408."""
    read_stall_s: float = 3.0
    """Seconds for which a body may pause; then 408. Only whole requests take a place in the queue."""
    header_timeout_s: float = 10.0
    """Seconds in which a request's headers have to arrive; then 408, or the end of an empty connection."""
    keep_alive_s: float = 5.0
    """Seconds that a connection stays open between requests; behind a proxy, more than the proxy keeps it."""
    max_connections: int = 0
    """Open connections of a worker, at most; more get 503. 0: as many as the limit of open files allows."""
    stalled_s: float = 60.0
    """Seconds after which a model that does not answer is reported as not ready."""
    grace_s: float = 30.0
    """Seconds that accepted requests have to finish in when the server is told to stop."""
    token_file: MaybeFile = None
    """A file whose content clients have to send as a bearer token.
    Or the environment variable VITASCOPE_TOKEN."""
    allowed_hosts: Hosts = ()
    """Names under which the server may be addressed.
    Default: those of this machine where --host is one of them, else any."""
    root_path: str = ""
    """The path under which a proxy serves this server: /vitascope."""
    access_log: bool = True
    """Write a line for each request."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not ROOT_PATH.fullmatch(self.root_path):
            form = "like /vitascope, without a / at its end"
            raise UserError(f"--root-path must be {form}, not {self.root_path!r}")
        for name, value in vars(self).items():
            least, option = LEAST.get(name), f"--{name.replace('_', '-')}"
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if least is None and not value > 0:
                raise UserError(f"{option} must be above 0, not {value}")
            if least is not None and not value >= least:
                raise UserError(f"{option} must be at least {least}, not {value}")
        if self.port > 65535:
            raise UserError(f"--port must be at most 65535, not {self.port}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK or self.host.startswith("127.")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names that the Host header may have; empty for any."""
        own = (*LOOPBACK, self.host) if self.is_loopback else ()
        return (*own, *self.allowed_hosts) if own or self.allowed_hosts else ()
