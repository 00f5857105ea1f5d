"""The options of `vitascope serve`: address, limits, access. Needs neither torch nor the extra `server`."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitascope.arguments import Range
from vitascope.errors import UserError
from vitascope.models.configuration import traits

TOKEN = "VITASCOPE_TOKEN"
"""The environment variable for the bearer token."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
COUNT, AMOUNT, POSITIVE = Range(ge=1), Range(ge=0), Range(gt=0)
Hosts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The server's address and limits."""

    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 means all IPv4 addresses, :: all addresses; then set a token."""
    port: Annotated[int, Range(ge=0, le=65535)] = 8000
    """The port; 0 means a free one."""
    workers: Annotated[int, COUNT] = 1
    """Processes, each with its own model; they share the port and the cores."""
    threads: Annotated[int, AMOUNT] = 0
    """Threads per model. 0: the cores, divided among the workers; fewer if OMP_NUM_THREADS is less."""
    max_batch: Annotated[int, COUNT] = 32
    """Maximum pictures per batch."""
    queue: Annotated[int, COUNT] = 128
    """Maximum requests in progress per worker; more get 429."""
    deadline_ms: Annotated[float, POSITIVE] = 2000.0
    """Predictions that take longer get 504; X-Deadline-Ms shortens it for one request."""
    explain_deadline_ms: Annotated[float, POSITIVE] = 30000.0
    """Explanations that take longer get 504."""
    max_body_mb: Annotated[float, POSITIVE] = 16.0
    """Maximum megabytes per request; larger ones get 413."""
    max_bodies_mb: Annotated[float, POSITIVE] = 256.0
    """Maximum megabytes of all requests at once, per worker; more get 503."""
    max_megapixels: Annotated[float, POSITIVE] = 50.0
    """Maximum million pixels per picture; larger ones get 413 before they are decoded."""
    max_decode_mb: Annotated[float, POSITIVE] = 512.0
    """Maximum megabytes of memory for decoding a picture; others get 413. Linux only."""
    max_files: Annotated[int, COUNT] = 32
    """Maximum pictures per form."""
    read_timeout_s: Annotated[float, POSITIVE] = 10.0
    """Seconds for a request's body to arrive; slower ones get 408."""
    read_stall_s: Annotated[float, POSITIVE] = 3.0
    """Seconds that a body may pause; longer ones get 408."""
    header_timeout_s: Annotated[float, POSITIVE] = 10.0
    """Seconds for a request's headers to arrive; slower ones get 408."""
    keep_alive_s: Annotated[float, POSITIVE] = 5.0
    """Seconds that a connection stays open between requests; behind a proxy, more than the proxy's own."""
    max_connections: Annotated[int, AMOUNT] = 0
    """Maximum open connections per worker; more get 503. 0: as the limit of open files allows."""
    stalled_s: Annotated[float, POSITIVE] = 60.0
    """Seconds after which a model that does not answer makes the server not ready."""
    grace_s: Annotated[float, AMOUNT] = 30.0
    """Seconds for accepted requests to finish when the server stops."""
    token_file: Path | None = None
    """A file with the bearer token that clients must send; or set VITASCOPE_TOKEN."""
    allowed_hosts: Hosts = ()
    """Accepted Host headers. Default: this machine's own on a loopback --host, else any."""
    protocols: Annotated[
        tuple[Literal["huggingface", "openai", "oip", "kserve"], ...],
        tyro.conf.arg(metavar="{huggingface,openai,oip,kserve} ..."),
    ] = ()
    """Protocols of other servers to answer in, beside our own.
    Hugging Face Inference, OpenAI's embeddings, Open Inference v2 (KServe, Triton), KServe's first.
    Default: none."""
    allow_origin: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ORIGIN ...")] = ()
    """Sites whose pages may send requests, such as https://shop.example. Default: none."""
    root_path: str = ""
    """The path under which a proxy publishes this server, for example /vitascope."""
    access_log: bool = True
    """Log each request."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not ROOT_PATH.fullmatch(self.root_path):
            form = "like /vitascope, without a / at its end"
            raise UserError(f"--root-path must be {form}, not {self.root_path!r}")
        for name, accepted in traits(Settings, Range).items():
            accepted.check(f"--{name.replace('_', '-')}", getattr(self, name))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK or self.host.startswith("127.")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The accepted names in the Host header; empty for any."""
        own = (*LOOPBACK, self.host) if self.is_loopback else ()
        return (*own, *self.allowed_hosts) if own or self.allowed_hosts else ()
