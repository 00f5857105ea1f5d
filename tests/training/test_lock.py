import errno
import fcntl
import multiprocessing
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from vitascope.errors import UserError
from vitascope.training.lock import LOCK, run_lock


def hold(run: Path, ready) -> None:
    with run_lock(run):
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
        ready.put(worker.pid)
        time.sleep(60)


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the folder, and a worker of its own."""
    context = multiprocessing.get_context("fork")
    ready = context.SimpleQueue()
    process = context.Process(target=hold, args=(tmp_path, ready))
    process.start()
    worker = ready.get()
    yield process
    process.kill()
    process.join()
    os.kill(worker, signal.SIGKILL)


def test_a_second_process_is_refused_and_told_who_is_there(tmp_path: Path, holder) -> None:
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(UserError, match=rf"{tmp_path} is in use by process {holder.pid} on \S"):  # noqa: SIM117
            with run_lock(tmp_path):
                raise AssertionError("two processes hold one run")


def test_a_killed_process_holds_nothing_even_where_a_worker_outlives_it(tmp_path: Path, holder) -> None:
    holder.kill()
    holder.join()
    with run_lock(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / LOCK).read_text()


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt(), UserError("an end")])
def test_it_is_free_again_however_the_run_ends(tmp_path: Path, ending) -> None:
    with run_lock(tmp_path), pytest.raises(UserError), run_lock(tmp_path):
        pass
    with nullcontext() if ending is None else pytest.raises(type(ending)), run_lock(tmp_path):
        if ending is not None:
            raise ending
    with run_lock(tmp_path):
        pass


def test_a_file_of_a_dead_process_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(f"process 999999 on a machine with a long name {'x' * 300}\n")
    with run_lock(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
        assert (tmp_path / LOCK).read_text().count("\n") == 1


def test_without_locks_in_the_file_system_the_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with run_lock(tmp_path):
        pass
    assert f"{tmp_path} cannot be locked (No locks available)" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"), run_lock(tmp_path / "nowhere"):
        pass
