"""What a server may use, and for how long: its limits, in one place. Needs no torch."""

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
MaybeFile = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
Hosts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The server's address and limits.

    Raises:
        UserError: a number that makes no sense.
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
        """Refuse what makes no sense."""
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port must be in 0 to 65535, not {self.port}")
        if not ROOT_PATH.fullmatch(self.root_path):
            raise UserError(
                f"--root-path must be like /vitascope, without a / at its end, not {self.root_path!r}"
            )
        for name in ("workers", "max_batch", "queue", "max_files"):
            if getattr(self, name) < 1:
                raise UserError(f"{_option(name)} must be at least 1, not {getattr(self, name)}")
        for name in ("threads", "max_wait_ms", "grace_s", "max_connections"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{_option(name)} must be at least 0, not {getattr(self, name)}")
        positive = ("deadline_ms", "explain_deadline_ms", "max_body_mb", "max_megapixels", "max_decode_mb")
        times = ("read_timeout_s", "read_stall_s", "header_timeout_s", "keep_alive_s", "stalled_s")
        for name in (*positive, *times):
            if not getattr(self, name) > 0:
                raise UserError(f"{_option(name)} must be above 0, not {getattr(self, name)}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK or self.host.startswith("127.")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names that the Host header may have; empty for any."""
        own = (*LOOPBACK, self.host) if self.is_loopback else ()
        return (*own, *self.allowed_hosts) if own or self.allowed_hosts else ()


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
