"""`serve`: the port, the token, one server process or several."""

from __future__ import annotations

import functools
import os
import socket
import sys
from typing import TYPE_CHECKING
from urllib.parse import quote

from vitascope.deploy.server import check_installed
from vitascope.deploy.server.settings import TOKEN, Settings
from vitascope.errors import UserError

if TYPE_CHECKING:
    from vitascope.deploy.predict.engine import Engine

YIELDING_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")
"""For OpenMP, which reads it when torch is first imported: waiting threads sleep. By default they spin, on
the core that the event loop, another worker or another program needs."""


def serve(ref: str, settings: Settings, *, precision: str = "auto", device: str = "auto") -> None:
    """Serve a model until a signal, then answer the accepted requests, and return.

    Args:
        ref: a run folder, a model folder or file, a hub id, or an exported file.
        settings: the address and the limits.
        precision: `auto`, `fp32` or `bf16`.
        device: `auto`, or a torch device.

    Raises:
        UserError: the extra `server` is not installed, the address cannot be used, or the model or the token
            cannot be read.
    """
    check_installed()
    from vitascope.deploy.server import http_server, supervisor

    os.environ.setdefault(*YIELDING_THREADS)
    http_server.connection_limit(settings)
    token = read_token(settings)
    with listen(settings) as port:
        announce(ref, settings, port, token)
        threads = settings.threads or max(1, cores() // settings.workers)
        opening = functools.partial(open_for_serving, ref, precision, device, threads)
        if settings.workers == 1:
            http_server.run(opening, settings, token, port)
        else:
            supervisor.supervise(opening, settings, token, port)


def open_for_serving(ref: str, precision: str, device: str, threads: int) -> Engine:
    """The engine of a model or an exported file, with a number of threads to compute with."""
    import torch

    from vitascope.deploy.predict.runtimes import open_engine
    from vitascope.model.hardware import reuse_freed_memory

    reuse_freed_memory()
    torch.set_num_threads(threads)
    return open_engine(ref, precision=precision, device=device)


def listen(settings: Settings) -> socket.socket:
    """A listening socket; `::` listens on all addresses, of IPv4 too where the system can."""
    address = settings.host, settings.port
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        both = settings.host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # the address again, in parentheses
        place = f"{settings.host}:{settings.port}"
        raise UserError(f"cannot listen on {place}: {reason}; try another --port or --host") from error


def announce(ref: str, settings: Settings, port: socket.socket, token: str | None) -> None:
    """Print the server's address and who may use it.

    On a terminal the link contains the token, in the fragment, which browsers send to no server. Redirected
    output may end up in a log, so there the link does not contain it.
    """
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{name}:{port.getsockname()[1]}"
    if token is not None and sys.stdout.isatty():
        address += f"/#token={quote(token, safe='')}"
    print(f"{ref} at {address} (/docs for its API; Ctrl-C stops it)", flush=True)
    if token is None and not settings.is_loopback:
        advice = f"set a token by --token-file or {TOKEN}"
        print(f"vitascope: anyone who reaches this address may use it; {advice}", file=sys.stderr, flush=True)


def read_token(settings: Settings) -> str | None:
    """The bearer token that clients must send, if any."""
    token, source = os.environ.get(TOKEN), TOKEN
    if settings.token_file is not None:
        source = f"--token-file {settings.token_file}"
        try:
            token = settings.token_file.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{source} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if token is None:
        return None
    if not token.strip():
        raise UserError(f"{source} is empty: give a token, or none at all")
    return token.strip()


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
