"""A run folder in a store: the local copy in which the run is worked on, and what of it is uploaded.

The copy is in `$VITASCOPE_CACHE/remote/runs/`. The store has whole files only. A checkpoint's manifest is
uploaded last and removed first. A run's configuration comes after the other files of its start, and that of
the finished model after everything else. A hidden object names the process that writes the run: the last one
that has begun or resumed it. Any other one stops before its next upload.
"""

import os
import secrets
import shutil
import socket
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from vitascope import layout
from vitascope.cache import ADVICE, fault_in_words
from vitascope.errors import UserError
from vitascope.remote.cache import download, fetched
from vitascope.remote.outputs import local_copy
from vitascope.remote.stores import (
    ChangedError,
    MissingError,
    RemoteObject,
    StoreError,
    exists,
    find_object,
    list_folder,
    name_in,
    remove,
    upload,
    walk,
)
from vitascope.serialization import check_record, explaining_faults, parse_json
from vitascope.storage import check_room, explaining_failure, locked, replacing

_FINISHED = f"{layout.MODEL}/config.json"
_WRITER = ".writer"
ATTEMPTS, PAUSE = 6, 0.5
"""Attempts to fetch a run that another process still writes, and seconds before the second, then doubled."""


class OtherWriterError(StoreError):
    """Another process has resumed or finished the run."""


class StoredRun:
    """The run folder of a URL.

    Attributes:
        url: the folder in the store.
        path: the local copy.
        complete: whether the store has the finished run, as far as this process knows.

    Raises:
        UserError: a URL without the name of a folder, or of a web server.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.path = local_copy(self.url, "runs")
        self.complete = False
        self._uploaded: dict[str, tuple[int, int]] = {}
        """Size and time of change, by name, of the local files that the store has."""
        self._steps: set[int] = set()
        """The checkpoints that the store has, complete or not."""
        self._writer = b""
        """The content of the object that makes this process the writer; empty until `claim`."""

    def is_new(self) -> bool:
        """Whether the store has no run at this URL, nor other files; raises as `find_object`.

        A run that was killed before it had uploaded its configuration can only be started again.
        """
        if not exists(self.url):
            return True
        return exists(f"{self.url}/{_WRITER}") and not exists(f"{self.url}/{layout.CONFIG}")

    def fetch(self) -> None:
        """Make the local copy as new as the store, with its newest complete checkpoint.

        A copy whose newest checkpoint is as new stays as it is. Processes of a machine wait for each other.
        A run that is changed meanwhile is fetched again, after a `claim`, so that whoever writes it stops.

        Raises:
            StoreError: the store does not answer.
            UserError: the local copy is of another run, or in use; no room on the disk.
        """
        with explaining_failure(self.path, "the run", ADVICE):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.parent / layout.LOCK, wait=True):
                for attempt in range(ATTEMPTS):
                    try:
                        return self._fetch()
                    except (ChangedError, MissingError) as error:
                        if attempt == ATTEMPTS - 1:
                            raise StoreError(f"{self.url}: {error}; it is written elsewhere") from error
                    self.claim()
                    time.sleep(PAUSE * 2**attempt)

    def _fetch(self) -> None:
        objects, folders = ([], []) if self.is_new() else list_folder(self.url)
        files = {name_in(object.url, self.url): object for object in objects}
        if layout.CONFIG not in files:
            return
        self.complete = f"{self.url}/{layout.MODEL}" in folders and exists(f"{self.url}/{_FINISHED}")
        if self.complete:
            return
        if layout.is_run(self.path):
            self._check_same(files.get(layout.ENVIRONMENT))
        checkpoints = f"{self.url}/{layout.CHECKPOINTS}"
        saved = list_folder(checkpoints)[1] if checkpoints in folders else []
        complete = dict(self._complete_steps(saved))
        local = self._local_steps()
        for step in local & complete.keys():
            folder = f"{layout.CHECKPOINTS}/{layout.step_name(step)}"
            if (self.path / folder / layout.MANIFEST).read_bytes() == complete[step]:
                self._note(name for name in self._names() if name.startswith(f"{folder}/"))
        newest = max(complete, default=-1)
        if layout.is_run(self.path) and max(local, default=-1) >= newest:
            return
        for model in saved:
            if layout.step_of_folder(model.rpartition("/")[2]) is None:
                files |= {name_in(file.url, self.url): file for file in walk(model)}
        if complete:
            files |= self._files_of(newest, complete[newest])
        self._replace(files)

    def _check_same(self, environment: RemoteObject | None) -> None:
        """Reject a local copy of another run, by the record of its start."""
        local = self.path / layout.ENVIRONMENT
        if environment is not None and local.is_file() and fetched(environment.url) != local.read_bytes():
            raise UserError(
                f"{self.url} is another run than the one in {self.path}, which was interrupted here: move "
                "this folder away, or remove it"
            )

    def _complete_steps(self, folders: list[str]) -> Iterator[tuple[int, bytes]]:
        """The complete ones of the checkpoints in the store, with their manifests; all are noted."""
        for folder in folders:
            step = layout.step_of_folder(folder.rpartition("/")[2])
            if step is None:
                continue
            self._steps.add(step)
            if exists(f"{folder}/{layout.MANIFEST}"):
                yield step, fetched(f"{folder}/{layout.MANIFEST}")

    def _files_of(self, step: int, manifest: bytes) -> dict[str, RemoteObject]:
        """The files of a checkpoint, as its manifest lists them: `list_folder` leaves out hidden ones."""
        folder = f"{layout.CHECKPOINTS}/{layout.step_name(step)}"
        with explaining_faults(f"{self.url}/{folder}/{layout.MANIFEST}", "remove this checkpoint"):
            record = check_record(parse_json(manifest.decode()), {"files": Mapping}, ("files",))
            names = [*record["files"]]
            if any("/" in name or name in ("", ".", "..") for name in names):
                raise ValueError("it lists other files")
        paths = [f"{folder}/{name}" for name in (*names, layout.MANIFEST)]
        files = {path: find_object(f"{self.url}/{path}") for path in paths}
        return {path: file for path, file in files.items() if file is not None}

    def _replace(self, files: dict[str, RemoteObject]) -> None:
        """Make these the files of the local copy, which is older."""
        former = self.path.with_name(f".former.{self.path.name}")
        check_room(self.path, sum(file.size for file in files.values()))
        with replacing(self.path) as aside:
            for name, file in files.items():
                download(file, aside / name)
            if self.path.exists():
                with locked(self.path / layout.LOCK):  # by no process that trains
                    shutil.rmtree(former, ignore_errors=True)
                    os.replace(self.path, former)
        shutil.rmtree(former, ignore_errors=True)
        self._uploaded = {}
        self._note(files)

    def claim(self) -> None:
        """Become the writer of the run in place of any other process; raises as `upload`."""
        process = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
        content = f"{process}\n{secrets.token_hex(8)}\n".encode()
        path = self.path.with_name(_WRITER)
        try:
            path.write_bytes(content)
            upload(path, f"{self.url}/{_WRITER}")
        except OSError as error:
            raise StoreError(f"{self.url}: {fault_in_words(error)}") from error
        finally:
            path.unlink(missing_ok=True)
        self._writer = content

    def check_writer(self) -> None:
        """Claim the run once, and reject to go on after any other process has."""
        if not self._writer:
            return self.claim()
        marker = f"{self.url}/{_WRITER}"
        try:
            writer = fetched(marker) if exists(marker) else b""
        except ChangedError as error:
            raise StoreError(f"{marker}: {error}") from error
        if writer != self._writer:
            name = writer.decode(errors="replace").partition("\n")[0]
            state = f"is written by {name}" if name else "was finished or removed by another process"
            raise OtherWriterError(f"{self.url} {state}, so this process stops; its own copy is {self.path}")

    def upload(self) -> None:
        """Upload what has changed, and remove the checkpoints that are not here any more.

        Raises:
            OtherWriterError: another process has resumed or finished the run.
            StoreError: the store does not answer, or cannot be written to; the next call continues.
        """
        self.check_writer()
        self._upload(self._names())
        local = self._local_steps()
        for step in sorted(self._steps - local):
            folder = f"{self.url}/{layout.CHECKPOINTS}/{layout.step_name(step)}"
            remove(f"{folder}/{layout.MANIFEST}")
            remove(folder)
            self._steps.discard(step)

    def try_to_upload(self) -> None:
        """As `upload`; a store that does not answer is one printed line."""
        try:
            self.upload()
        except OtherWriterError:
            raise
        except StoreError as error:
            print(
                f"vitascope: not uploaded: {error}; everything is in {self.path}, and the next checkpoint "
                "uploads what is missing",
                file=sys.stderr,
            )

    def finish(self, again: str) -> None:
        """Upload the finished run without its checkpoints, and remove those in the store.

        Raises:
            OtherWriterError: as `upload`.
            StoreError: as `upload`; it says that `again` uploads the rest.
        """
        try:
            self.check_writer()
            self._upload(name for name in self._names() if not name.startswith(f"{layout.CHECKPOINTS}/"))
        except OtherWriterError:
            raise
        except StoreError as error:
            raise StoreError(f"{error}; the finished run is in {self.path}: {again}") from error
        self.complete = True
        try:
            remove(f"{self.url}/{layout.CHECKPOINTS}")
            remove(f"{self.url}/{_WRITER}")
        except StoreError as error:
            print(f"vitascope: the checkpoints of the finished run stay: {error}", file=sys.stderr)

    def remove_with(self, result: object) -> None:
        """Remove the local copy of a run that is uploaded, together with the result that reads it."""
        weakref.finalize(result, shutil.rmtree, self.path.parent, ignore_errors=True)

    def _upload(self, names: Iterator[str]) -> None:
        for name in sorted(names, key=lambda name: (_rank(name), name)):
            path = self.path / name
            try:
                stamp = _stamp(path)
                if self._uploaded.get(name) == stamp:
                    continue
                if (step := layout.step_of_folder(path.parent.name)) is not None:
                    self._steps.add(step)
                self._upload_file(path, name)
            except (StoreError, OSError) as error:
                if not path.exists():
                    continue  # training writes this model anew
                if isinstance(error, StoreError):
                    raise
                raise StoreError(f"{self.url}/{name}: {fault_in_words(error)}") from error
            self._uploaded[name] = stamp

    def _upload_file(self, path: Path, name: str) -> None:
        if "/" in name:  # replaced as a whole, if at all
            upload(path, f"{self.url}/{name}")
            return
        snapshot = self.path.with_name(".upload")  # training appends to the metrics
        try:
            shutil.copyfile(path, snapshot)
            upload(snapshot, f"{self.url}/{name}")
        finally:
            snapshot.unlink(missing_ok=True)

    def _names(self) -> Iterator[str]:
        """The local files by their paths in the run folder, without locks and what is being written."""
        for folder, folders, names in os.walk(self.path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            in_checkpoint = layout.step_of_folder(Path(folder).name) is not None
            for name in names:
                if in_checkpoint or not name.startswith("."):
                    yield os.path.relpath(os.path.join(folder, name), self.path)

    def _local_steps(self) -> set[int]:
        """The complete checkpoints of the local copy."""
        manifests = self.path.glob(f"{layout.CHECKPOINTS}/*/{layout.MANIFEST}")
        return {step for path in manifests if (step := layout.step_of_folder(path.parent.name)) is not None}

    def _note(self, names: Iterator[str] | dict[str, RemoteObject]) -> None:
        """Note that the store has these files."""
        self._uploaded |= {name: _stamp(self.path / name) for name in names}


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _rank(name: str) -> int:
    """The place of a file in an upload: what makes others complete comes after them."""
    if name == _FINISHED:
        return 4
    folder, _, file = name.rpartition("/")
    if layout.step_of_folder(folder.rpartition("/")[2]) is None:
        return 1 if name == layout.CONFIG else 0  # by which a run is known
    return 3 if file == layout.MANIFEST else 2
