"""`serve`: the port, the token, one server process, or several (workers) that are watched and replaced.

Of several, the first answers while its model loads; the others accept connections when theirs is loaded.
"""

import functools
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING
from urllib.parse import quote

from vitascope.deploy.server import check_installed
from vitascope.deploy.server.settings import TOKEN, Settings
from vitascope.errors import UserError
from vitascope.models.weights.builtin import model_in_words
from vitascope.network import usable_cores

if TYPE_CHECKING:
    from vitascope.deploy.server.http_server import Deployment
    from vitascope.models.engines.engine import Engine

PAUSE = 1.0  # seconds before a worker that died is replaced
NAMED_MODEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)")
STOP = b""  # the message of a signal; a worker whose model cannot be loaded sends the reason


def serve(
    models: Sequence[str],
    settings: Settings,
    *,
    beside: str | None = None,
    precision: str = "auto",
    device: str = "auto",
) -> None:
    """Serve models until a signal, then answer the accepted requests, and return.

    A model is a run folder, a model folder or file, a hub id, or an exported file; so is `beside`, a model
    that the explorer compares it with. Each of several is `NAME=MODEL`; the first is the default.
    """
    named = by_name(models)
    if beside is not None and "" not in named:
        raise UserError("--beside is for one MODEL without a name; each NAME has an explorer, /models/NAME/")
    check_installed()
    from vitascope.deploy.server import http_server
    from vitascope.deploy.server.admission import connection_limit

    # OpenMP reads it when torch is first imported: waiting threads sleep. By default they spin, on the core
    # that the event loop, another worker or another program needs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    connection_limit(settings)
    token = read_token(settings)
    with listen(settings) as port:
        announce(models, settings, port, token)
        threads = settings.threads or threads_per_model(settings.workers)
        opening = functools.partial(open_for_serving, precision=precision, device=device, threads=threads)
        other = None if beside is None else functools.partial(opening, beside)
        engines = {name: functools.partial(opening, ref) for name, ref in named.items()}
        deployment = http_server.Deployment(engines.get("", engines), settings, token, other)
        if settings.workers == 1:
            http_server.serve_until_signal(deployment, port)
        else:
            supervise(deployment, port)


def threads_per_model(workers: int) -> int:
    """The threads that OMP_NUM_THREADS allows, as torch reads it, at most a worker's share of the cores."""
    share = max(1, usable_cores() // workers)
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(share, max(1, int(first))) if first.isdecimal() else share


def by_name(models: Sequence[str]) -> dict[str, str]:
    """Models by name, from `NAME=MODEL`; one model alone may have none, which is empty here."""
    named: dict[str, str] = {}
    for model in models:
        part = None if os.path.exists(model) else NAMED_MODEL.fullmatch(model)
        if part is None and len(models) > 1:
            raise UserError(f"each of several models needs a name: NAME={model}")
        name, ref = part.groups() if part else ("", model)
        if name in named:
            raise UserError(f"two models have the name {name}: {named[name]} and {ref}")
        named[name] = ref
    return named


def open_for_serving(ref: str, precision: str, device: str, threads: int) -> "Engine":
    """The engine of a model or an exported file, with a number of threads to compute with."""
    import torch

    from vitascope.models.engines.runtimes import open_engine
    from vitascope.models.hardware import reuse_freed_memory

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


def announce(models: Sequence[str], settings: Settings, port: socket.socket, token: str | None) -> None:
    """Print the server's address and who may use it.

    Only on a terminal does the link contain the token (in the fragment, which browsers send to no server):
    redirected output may end up in a log.
    """
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{name}:{port.getsockname()[1]}"
    if token is not None and sys.stdout.isatty():
        address += f"/#token={quote(token, safe='')}"
    names = ", ".join(map(model_in_words, models))
    print(f"{names} at {address} (once loaded; /docs for its API; Ctrl-C stops it)", flush=True)
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
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source} cannot be read: {getattr(error, 'strerror', error)}") from error
    if token is None:
        return None
    if not token.strip():
        raise UserError(f"{source} is empty: give a token, or none at all")
    return token.strip()


def supervise(deployment: "Deployment", port: socket.socket) -> None:
    """Run `settings.workers` processes until a signal, which is forwarded, and replace those that die.

    Raises `UserError` if the model cannot be loaded.
    """
    from prometheus_client import multiprocess as metrics_of_workers

    from vitascope.deploy.server.http_server import heeds_hangup
    from vitascope.deploy.server.metrics import SHARED_FOLDER

    spawn = multiprocessing.get_context("spawn")  # a fork would inherit threads' locks
    processes: dict[int, BaseProcess] = {}
    reasons, sender = spawn.Pipe(duplex=False)  # handlers of signals only write, which interrupts no step
    kill_at, failure = math.inf, b""

    def start(number: int, *, wait_for_model: bool) -> None:
        process = spawn.Process(target=work, args=(deployment, port, sender, os.getpid(), wait_for_model))
        process.start()
        processes[number] = process

    def stop() -> None:
        """Tell all workers to finish; the second time, to end at once."""
        nonlocal kill_at
        kill_at = min(kill_at, time.monotonic() + deployment.settings.grace_s + 5)
        port.close()  # new clients cannot connect once the workers close it too
        for process in processes.values():
            process.terminate()

    with tempfile.TemporaryDirectory(prefix="vitascope-metrics-") as shared:
        os.environ[SHARED_FOLDER] = shared  # before a worker imports prometheus_client
        for signum in (signal.SIGTERM, signal.SIGINT, *[signal.SIGHUP] * heeds_hangup()):
            signal.signal(signum, lambda *_: sender.send_bytes(STOP))
        for number in range(deployment.settings.workers):
            start(number, wait_for_model=number > 0)
        while processes:
            wait([reasons, *(process.sentinel for process in processes.values())], timeout=1)
            if reasons.poll():
                reason = reasons.recv_bytes()
                failure = failure or reason
                stop()
            for number, process in list(processes.items()):
                if process.is_alive():
                    if time.monotonic() > kill_at:
                        process.kill()
                    continue
                process.join()
                del processes[number]
                metrics_of_workers.mark_process_dead(process.pid)  # type: ignore[no-untyped-call]
                if kill_at == math.inf and not reasons.poll():
                    ended = f"worker {number} ended ({process.exitcode})"
                    print(f"vitascope: {ended}; starting another", file=sys.stderr)
                    if not reasons.poll(PAUSE):
                        start(number, wait_for_model=True)
    if failure:
        raise UserError(failure.decode("utf-8", "replace"))


def work(
    deployment: "Deployment",
    port: socket.socket,
    reasons: "Connection[bytes, bytes]",
    parent: int,
    wait_for_model: bool,
) -> None:
    """Serve in a worker process."""
    from vitascope.deploy.server.http_server import serve_until_signal

    try:
        serve_until_signal(deployment, port, parent, wait_for_model=wait_for_model)
    except UserError as error:
        reasons.send_bytes(str(error).encode()[:4000])  # more might be mixed with another worker's
