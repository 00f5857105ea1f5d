"""Parts computed on Ray: actors hold the model, and Ray Data gives each a part, and another if one dies."""

import dataclasses
import functools
import logging
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitascope._version import __version__
from vitascope.data.rows.parts import Images, PartDone, Parts, PartTask
from vitascope.errors import UserError
from vitascope.models.engines.engine import Engine, TorchEngine
from vitascope.models.engines.runtimes import as_engine, open_engine
from vitascope.models.hardware import reuse_freed_memory
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.loading import save_pretrained
from vitascope.remote import StoredImage, source_at
from vitascope.storage import WINDOWS

if TYPE_CHECKING:
    from ray.data import Dataset

MODEL = "model"
"""The folder, among the parts, of a model that was made in memory."""
CONNECT_SECONDS, PROBE_SECONDS, START_SECONDS, STOP_SECONDS = 5.0, 1.0, 30.0, 10.0
LOST_SECONDS = 45.0
"""After which a head that does not answer is given up: after 60 s Ray would end this process, unexplained."""
AUTO, LOCAL = "auto", "local"
_NOT_THERE = re.compile(
    r"No module named 'vitascope[\w.]*'|Can't get attribute '\w+' on <module 'vitascope[\w.]*'"
)


def versions() -> dict[str, str]:
    """What the processes of a job have to have in common, without the builds of torch for CPUs and GPUs."""
    return {"vitascope": __version__, "torch": torch.__version__.partition("+")[0]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerModel:
    """The model that every worker opens, in a process like the one that began the job."""

    model: str
    """A MODEL."""
    digest: str
    """SHA-256 of its weights."""
    precision: str
    device: str
    views: int = 1
    home: str = dataclasses.field(default_factory=os.getcwd)
    """The working folder, from which relative paths begin."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=versions)

    def open(self) -> Engine:
        """The engine.

        Raises:
            UserError: other versions, another working folder or another model here.
        """
        if versions() != self.versions:
            here, there = (
                ", ".join(f"{name} {version}" for name, version in each.items())
                for each in (versions(), self.versions)
            )
            raise UserError(f"this worker has {here}, and the command {there}: install the same on all nodes")
        try:
            os.chdir(self.home)
        except OSError as error:
            raise UserError(
                f"{self.home}: no such folder here; start the command in a folder that all nodes share"
            ) from error
        reuse_freed_memory()
        engine = open_engine(self.model, precision=self.precision, device=self.device, views=self.views)
        if engine.digest != self.digest:
            raise UserError(
                f"{self.model} is another model here: SHA-256 {engine.digest[:12]}, not {self.digest[:12]}"
            )
        return engine

    def check_images(self, images: Images) -> None:
        """Reject a node that sees none of the images. Single ones may have vanished, which is their error."""
        files = [source_at(texts[0]) for texts in images]
        if not any(isinstance(file, StoredImage) or os.path.exists(file) for file in files):
            raise UserError(
                f"none of the images from {files[0]} to {files[-1]} is here: they must be in a folder that "
                "all nodes share; if they were removed, begin again"
            )


class RayPartWorker:
    """Computes parts for Ray Data, in which a batch is a part's number; the model is opened for the first."""

    def __init__(self, parts: Parts, task: PartTask, model: WorkerModel) -> None:
        self.parts, self.task, self.model = parts, task, model

    @functools.cached_property
    def engine(self) -> Engine:
        """The engine of this process."""
        return self.model.open()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compute a part, unless a worker did that died before it could report it."""
        part, error = int(batch["part"][0]), ""
        deaths = self.parts.deaths(part)
        try:
            if not self.parts.file(part).exists():
                self.model.check_images(self.parts.texts(part))
                ((_, deaths),) = self.parts.compute(self.task, self.engine, [part])
        except UserError as fault:
            error = f"{socket.gethostname()}: {fault}"
        return {"part": np.array([part]), "deaths": np.array([deaths]), "error": np.array([error])}


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be connected to a cluster: `auto` for that of this machine or of `RAY_ADDRESS`, `HOST:PORT` of a head,
    `local` for one on this machine that lives as long as the context. Signals are handled as before.
    Meanwhile nothing can be printed on standard output, where Ray describes the death of a worker at length.

    Raises:
        UserError: no Ray; no cluster there, or one of another version.
    """
    if WINDOWS:
        raise UserError("--engine ray needs Linux or macOS; leave it out, or use WSL")
    # A thread of Ray Data that works on after the end would start a cluster.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError(f"--engine ray needs ray: pip install 'vitascope[ray]' ({error})") from error
    check_reachable(address)
    # Ray would report its use to its makers, and Ray Data log on any actor that Ray may restart.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what it raises, `explained` explains
    local: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    started, ended = Future[None](), threading.Event()
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def begin() -> None:
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False, **local)
            started.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            started.set_exception(error)
        ended.wait()  # the processes of Ray end with the thread that has started them

    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        try:
            with _without_errors():
                threading.Thread(target=begin, daemon=True).start()
                started.result(None if address == LOCAL else START_SECONDS)
        except TimeoutError as error:
            raise UserError(
                f"Ray at {address} has not answered for {START_SECONDS:g} s: its head may have ended; start "
                "it again with `ray start --head`, or leave out the address for Ray on this machine"
            ) from error
        except (ray.exceptions.RayError, RuntimeError, ValueError, OSError) as error:
            raise UserError(f"Ray at {address}: {ray_message(error)}") from error
        try:
            if threading.current_thread() is threading.main_thread():  # only it may set them
                for number, handler in signals.items():  # Ray's C++ has set its own
                    signal.signal(number, handler)
            ray.data.DataContext.get_current().enable_progress_bars = False
            yield
        finally:
            disconnect()
            ended.set()


@contextmanager
def _without_errors() -> Iterator[None]:
    """Drop what Ray's C++ writes to standard error; what it raises is reported."""
    errors, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(errors, 2)
        os.close(errors)


def disconnect() -> None:
    """End the workers; a head that is lost is not awaited."""
    import ray

    with _without_errors(), suppress(TimeoutError):
        in_thread(ray.shutdown).result(STOP_SECONDS)


def in_thread(function: Callable[[], None]) -> Future[None]:
    """The end of a function in another thread: in Ray's C++, one may wait for ever, and hears no signal."""
    future = Future[None]()

    def run() -> None:
        try:
            function()
            future.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where the end is awaited
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def rows_of(computed: "Dataset", address: str) -> Iterator[dict[str, Any]]:
    """The rows of a data set of Ray, while the head at an address answers."""
    rows = queue.SimpleQueue[dict[str, Any]]()

    def read() -> None:
        for row in computed.iter_rows():
            rows.put(row)

    reading, answered = in_thread(read), time.monotonic()
    while not (reading.done() and rows.empty()):
        try:
            yield rows.get(timeout=PROBE_SECONDS)
            continue
        except queue.Empty:
            pass
        if probed(address) is None:
            answered = time.monotonic()
        elif time.monotonic() > answered + LOST_SECONDS:
            raise UserError(
                f"the head of Ray at {address} has not answered for {LOST_SECONDS:g} s; the parts that are "
                "done are kept"
            )
    reading.result()


def check_reachable(address: str) -> None:
    """Reject an address at which no process listens, where Ray would wait for long and end the process."""
    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS", AUTO)
    if address in (AUTO, LOCAL):
        return
    _, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise UserError(
            f"the address of Ray is auto or HOST:PORT, not {address!r}: for a cluster elsewhere, run the "
            "command there with `ray job submit`"
        )
    if error := probed(address):
        raise UserError(
            f"Ray at {address} cannot be reached: {error}; start it with `ray start --head`, or leave out "
            "the address for Ray on this machine"
        )


def probed(address: str) -> Exception | None:
    """Why no connection to HOST:PORT is accepted; None if one is."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        return error
    return None


def ray_message(error: BaseException) -> str:
    """The message of one of Ray's exceptions, without its advice on further lines."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__


@dataclasses.dataclass(frozen=True)
class RayLoop:
    """Computes parts on the cluster that this process is connected to, one worker per CPU or per GPU."""

    model: str | VisionModel
    """A MODEL, or a model with its preprocessing, which is saved among the parts."""
    precision: str = "auto"
    device: str = "auto"
    views: int = 1
    """These three as for `Predictor`, in each worker."""

    @functools.cached_property
    def engine(self) -> Engine:
        """That of this process, on the CPU, which computes nothing."""
        return as_engine(self.model, precision=self.precision, device="cpu", views=self.views)

    def __call__(self, parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        """Compute parts.

        Raises:
            UserError: of any worker; a cluster without room for a worker; workers without vitascope.
        """
        import ray
        from ray.data import ActorPoolStrategy

        model = self.worker_model(parts)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus, gpus, workers = share_of(model.device, task.workers, nodes)
        if task.workers is None:
            task = dataclasses.replace(task, workers=cpus - 1)
        # A block per part: what is computed again if a worker dies. A second one waits at each, without which
        # Ray Data would start no workers on nodes that join later.
        blocks = ray.data.from_items([{"part": part} for part in wanted], override_num_blocks=len(wanted))
        computed = blocks.map_batches(
            RayPartWorker,
            batch_size=1,
            batch_format="numpy",
            fn_constructor_args=(parts, task, model),
            compute=ActorPoolStrategy(
                min_size=1,
                initial_size=min(workers, len(wanted)),
                max_size=len(wanted),
                max_tasks_in_flight_per_actor=2,
            ),
            num_cpus=cpus,
            num_gpus=gpus,
        )
        try:
            for row in rows_of(computed, ray.get_runtime_context().gcs_address):
                if row["error"]:
                    raise UserError(str(row["error"]))
                yield PartDone(int(row["part"]), int(row["deaths"]))
        except ray.exceptions.RayError as error:
            raise ray_fault(error) from error
        finally:
            disconnect()  # else other workers would write parts when this process has left their folder

    def worker_model(self, parts: Parts) -> WorkerModel:
        """What the workers open."""
        model = self.model
        if not isinstance(model, str):
            model = os.path.abspath(save_pretrained(model, parts.folder / MODEL))
        on_cpu = self.device == "auto" and not isinstance(self.engine, TorchEngine)  # an exported model
        return WorkerModel(
            model=model,
            digest=self.engine.digest,
            precision=self.precision,
            device="cpu" if on_cpu else self.device,
            views=self.views,
        )


def share_of(device: str, readers: int | None, nodes: Sequence[dict[str, float]]) -> tuple[int, int, int]:
    """The CPUs and GPUs that a worker takes, and how many workers fit into the cluster.

    A worker takes a GPU where there are any, with its share of the CPUs to read with; else a CPU.

    `nodes` have the resources of each node, `CPU` and `GPU`.

    Raises:
        UserError: no node with so much.
    """
    sizes = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]
    with_gpu = [(cpus, gpus) for cpus, gpus in sizes if gpus]
    gpus = int(device.startswith("cuda") or (device == "auto" and bool(with_gpu)))
    if readers is None:
        readers = max(0, min((each // gpu for each, gpu in with_gpu), default=1) - 1) if gpus else 0
    workers = sum(
        min(each // (1 + readers), *[gpu] * gpus) if gpus else each // (1 + readers) for each, gpu in sizes
    )
    if not workers:
        found = ", ".join(f"{each} CPUs and {gpu} GPUs" for each, gpu in sorted(set(sizes)))
        raise UserError(
            f"no node of Ray has the {1 + readers} CPUs{' and the GPU' * gpus} of a worker: they have "
            f"{found or 'nothing'}"
        )
    return 1 + readers, gpus, workers


def ray_fault(error: Exception) -> Exception:
    """What a user can do about an exception of Ray; a fault in our own code keeps its traceback."""
    from ray.exceptions import RayTaskError

    if missing := _NOT_THERE.search(str(error)):
        return UserError(
            f"a worker cannot load vitascope ({missing.group()}): install the same version on all nodes"
        )
    if isinstance(error, RayTaskError):
        return error
    return UserError(f"Ray failed: {ray_message(error)}; the parts that are done are kept")
