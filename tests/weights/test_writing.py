"""Files that are whole or the old ones, and failures to write them."""

import errno
import os
from pathlib import Path

import pytest

from vitascope.errors import UserError
from vitascope.weights.files import CheckpointError
from vitascope.weights.writing import explaining_failure, replacing


def test_a_file_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    with replacing(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_interrupts_writing_leaves_the_old_file_alone(tmp_path: Path, fault: BaseException) -> None:
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


def test_a_failure_to_write_names_the_place_the_reason_the_room_and_the_way_out(tmp_path: Path) -> None:
    place = tmp_path / "not" / "yet"
    fault = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError) as refused, explaining_failure(place, "the page", "make room"):
        raise fault
    said = str(refused.value)
    assert said.startswith(f"{place}: the page cannot be written: No space left on device (")
    assert said.endswith(" MB are free there); make room")


def test_weights_that_cannot_be_written_get_the_way_out_too(tmp_path: Path) -> None:
    expected = pytest.raises(UserError, match="model: cannot be written; make room")
    with expected, explaining_failure(tmp_path, "the model", "make room"):
        raise CheckpointError("model: cannot be written")


def test_a_closed_pipe_is_no_failure_to_write_a_file(tmp_path: Path) -> None:
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
