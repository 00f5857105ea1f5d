"""Atomic writing, write failures and locks."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from tests.forked import fork
from vitascope import storage
from vitascope.errors import UserError
from vitascope.storage import (
    WriteError,
    check_new_folder,
    explaining_failure,
    locked,
    new_folder,
    replacing,
    temporary_folder,
)


def test_a_file_is_replaced_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    with replacing(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_writing_keeps_the_old_file(tmp_path: Path, fault: BaseException) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as aside:
            aside.write_text("ne")
            raise fault

    with pytest.raises(type(fault)):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_failure_names_path_reason_free_space_and_remedy(tmp_path: Path) -> None:
    place = tmp_path / "not" / "yet"
    fault = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError) as raised, explaining_failure(place, "the page", "make room"):
        raise fault
    message = str(raised.value)
    assert message.startswith(f"{place}: the page cannot be written: No space left on device (")
    assert message.endswith(" MB are free there); make room")


def test_a_missing_permission_is_named_without_the_free_space(tmp_path: Path) -> None:
    advice = "make room, or choose another place"
    reason = "the page cannot be written: Permission denied"
    message = f"{tmp_path}: {reason}; make it writable, or choose another place"
    with pytest.raises(UserError) as raised, explaining_failure(tmp_path, "the page", advice):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert str(raised.value) == message


def test_an_error_of_the_file_aside_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "none" / "page.html"
    with pytest.raises(FileNotFoundError) as raised, replacing(path) as aside:
        aside.write_text("new")
    assert raised.value.filename == str(path)


def test_a_write_error_of_weights_names_the_remedy(tmp_path: Path) -> None:
    expected = pytest.raises(UserError, match="model: cannot be written; make room")
    with expected, explaining_failure(tmp_path, "the model", "make room"):
        raise WriteError("model: cannot be written")


def test_a_closed_pipe_is_not_a_write_failure(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), explaining_failure(tmp_path, "the page", "make room"):
        raise BrokenPipeError


def test_two_processes_may_replace_a_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    with replacing(path) as first:
        first.write_text("first")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


LOCK = ".lock"


def hold(run: Path, ready) -> None:
    with locked(run / LOCK):
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
        worker.start()
        ready.put(worker.pid)
        time.sleep(600)


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock and has a worker."""
    context = multiprocessing.get_context("fork")
    ready = context.SimpleQueue()
    process = context.Process(target=hold, args=(tmp_path, ready))
    process.start()
    worker = ready.get()
    yield process
    process.kill()
    process.join()
    os.kill(worker, signal.SIGKILL)


def test_a_second_process_is_rejected_with_the_name_of_the_first(tmp_path: Path, holder) -> None:
    for _ in range(2):  # a rejection changes nothing
        with pytest.raises(UserError, match=rf"{tmp_path} is in use by process {holder.pid} on \S"):  # noqa: SIM117
            with locked(tmp_path / LOCK):
                raise AssertionError("two processes hold one run")


def test_the_lock_of_a_killed_process_is_free_even_if_its_worker_survives(tmp_path: Path, holder) -> None:
    holder.kill()
    holder.join()
    with locked(tmp_path / LOCK):
        assert f"process {os.getpid()} on " in (tmp_path / LOCK).read_text()


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt(), UserError("an end")])
def test_the_lock_is_free_after_any_end_of_the_run(tmp_path: Path, ending) -> None:
    with locked(tmp_path / LOCK), pytest.raises(UserError), locked(tmp_path / LOCK):
        pass
    with nullcontext() if ending is None else pytest.raises(type(ending)), locked(tmp_path / LOCK):
        if ending is not None:
            raise ending
    with locked(tmp_path / LOCK):
        pass


def test_the_lock_file_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(f"process 999999 on a machine with a long name {'x' * 300}\n")
    with locked(tmp_path / LOCK):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
        assert (tmp_path / LOCK).read_text().count("\n") == 1


def test_a_file_system_without_locks_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked(tmp_path / LOCK):
        pass
    assert f"{tmp_path} cannot be locked (No locks available)" in capsys.readouterr().err


def killed_while(holding: Callable[[], AbstractContextManager[object]]) -> None:
    """A process that is killed within a context."""
    read, write = os.pipe()

    def work() -> None:
        with holding():
            os.write(write, b"!")
            time.sleep(60)

    child = fork(work)
    assert os.read(read, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_what_killed_processes_left_is_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    killed_while(lambda: temporary_folder(tmp_path))
    killed_while(lambda: temporary_folder(tmp_path))
    (left,) = (path for path in tmp_path.iterdir() if path.is_dir())  # the second removed that of the first
    with temporary_folder(tmp_path) as one:
        assert not left.exists()
        (one / "file").touch()
        with temporary_folder(tmp_path) as other:
            assert (one / "file").exists()
            assert list(other.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_of_two_that_write_one_new_folder_the_second_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with new_folder(folder):
        with pytest.raises(UserError, match="is in use by process"), new_folder(folder):
            pass
        (folder / "weights").touch()
    with pytest.raises(UserError, match="another process has written it meanwhile"), new_folder(folder):
        pass
    assert [path.name for path in folder.iterdir()] == ["weights"]
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "other"):
        raise KeyboardInterrupt
    assert not (tmp_path / "other").exists()
    killed_while(lambda: new_folder(tmp_path / "killed"))
    check_new_folder(tmp_path / "killed")
    with new_folder(tmp_path / "killed"):
        pass


def test_a_missing_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"), locked(tmp_path / "nowhere" / LOCK):
        pass


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_written_files_follow_the_umask_whatever_wrote_them(
    tmp_path: Path, mask: int, file: int, folder: int
) -> None:
    before = os.umask(mask)
    try:
        with replacing(tmp_path / "made") as aside:
            aside.mkdir(0o700)
            (aside / "model.safetensors").touch(0o600)  # as safetensors writes it
    finally:
        assert os.umask(before) == mask
    assert (tmp_path / "made").stat().st_mode & 0o777 == folder
    assert (tmp_path / "made" / "model.safetensors").stat().st_mode & 0o777 == file


def test_a_signal_may_lock_while_a_lock_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register = storage.register_after_fork

    def interrupted(*registered: object) -> None:  # as by the handler of a signal, in the same thread
        register(*registered)
        monkeypatch.setattr(storage, "register_after_fork", register)
        storage.locked(tmp_path / "of the handler").__enter__()

    monkeypatch.setattr(storage, "register_after_fork", interrupted)
    thread = threading.Thread(target=storage.locked(tmp_path / "lock").__enter__, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_process_that_another_thread_forks_while_a_lock_is_opened_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, opened = storage.register_after_fork, threading.Event()

    def slowly(*given: object) -> None:
        opened.set()
        time.sleep(0.3)
        register(*given)

    def hold_it() -> None:
        with storage.locked(tmp_path / "lock", wait=True):
            pass

    monkeypatch.setattr(storage, "register_after_fork", slowly)
    thread = threading.Thread(target=hold_it)
    thread.start()
    opened.wait()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    thread.join()
    try:
        with storage.locked(tmp_path / "lock"):  # an error if the child holds it
            assert child.is_alive()
    finally:
        child.kill()
        child.join()
