"""Processes that do not agree on data, options or versions stop with one line, before a run is created."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from PIL import Image

from tests.forked import in_group
from tests.training import tiny_config, undrawn, write_folder
from vitascope.errors import UserError
from vitascope.storage import locked
from vitascope.training import agreement, train


def another_image(folder: Path) -> None:
    shutil.copy(folder / "dark" / "000.png", folder / "dark" / "999.png")


def another_name(folder: Path) -> None:
    for path in sorted((folder / "light").iterdir()):
        path.rename(path.with_stem(f"{path.stem}-copy"))


def another_content(folder: Path) -> None:
    for path in sorted((folder / "light").iterdir()):
        Image.open(path).transpose(Image.Transpose.ROTATE_90).save(path)


def another_class(folder: Path) -> None:
    (folder / "light").rename(folder / "grey")


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        (
            another_image,
            {},
            r"the number of the train images: 21, not 20; give every process the same command",
        ),
        (another_name, {}, "the SHA-256 of names and labels of the train images"),
        (another_content, {}, "the SHA-256 of some contents of the train images"),
        (
            another_class,
            {},
            r"the class names of the train images: \('dark', 'grey'\), not \('dark', 'light'\)",
        ),
        (None, {"lr": 0.5}, r"the option lr: 0\.5, not 0\.001"),
        (None, {"depth": 1}, r"the option depth: 1, not 2"),
    ],
)
def test_other_data_or_options_in_one_process_stop_all_before_a_run_is_created(
    tmp_path: Path, change: Callable[[Path], None] | None, options: dict[str, Any], expected: str
) -> None:
    ours, theirs = (write_folder(tmp_path / name / "greys") for name in ("a", "b"))
    if change is not None:
        change(theirs)

    def begin() -> None:
        folder, own = (ours, {}) if dist.get_rank() == 0 else (theirs, options)
        with pytest.raises(
            UserError, match=rf"^process 1 of 2 \(.*\) differs from process 0 .*{expected}"
        ) as it:
            train.train(tiny_config(folder, run=str(tmp_path / "run"), **own))
        assert it.value.printed_elsewhere == (dist.get_rank() == 1)

    assert in_group(2, begin, tmp_path / "store") == [0, 0]
    assert not (tmp_path / "run").exists()


def test_other_data_in_one_process_stop_a_resumed_run_and_nothing_is_lost(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "greys")
    with undrawn():
        run = train.train(tiny_config(data, run=str(tmp_path / "run"), epochs=1)).run
    (run / "model" / "config.json").unlink()  # the run is unfinished
    before = sorted(run.rglob("*"))

    def begin() -> None:
        if dist.get_rank() == 1:
            agreement.names_and_labels = lambda images: "others"
        with pytest.raises(UserError, match="names and labels of the train images: 'others', not"):
            train.resume(run)

    assert in_group(2, begin, tmp_path / "store") == [0, 0]
    assert sorted(run.rglob("*")) == before


def test_processes_of_another_version_are_rejected_in_all(tmp_path: Path) -> None:
    def begin() -> None:
        if dist.get_rank() == 1:
            agreement.__version__ = "0.0.1"
        with pytest.raises(
            UserError, match=r"in the version of vitascope: 0\.0\.1, not .*; install the same"
        ):
            train.train(tiny_config(tmp_path / "nowhere", run=str(tmp_path / "run")))

    assert in_group(2, begin, tmp_path / "store") == [0, 0]


def test_processes_with_another_copy_of_a_run_in_a_store_are_rejected_in_all(tmp_path: Path) -> None:
    copies = [tmp_path / "a", tmp_path / "b"]
    for copy in copies:
        copy.mkdir()

    def begin() -> None:
        own = copies[dist.get_rank()]
        with locked(own / ".lock") if own == copies[0] else nullcontext():
            dist.barrier()
            agreement.check_folder_is_shared(copies[0])
            with pytest.raises(UserError, match=r"holder of the run folder: none, .* set VITASCOPE_CACHE"):
                agreement.check_folder_is_shared(own)

    assert in_group(2, begin, tmp_path / "store") == [0, 0]
