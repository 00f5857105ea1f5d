"""Processes that do not agree on data, options or versions stop with one line, before a run is created."""

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from PIL import Image

from tests.forked import in_group
from tests.training import planned, tiny_config, undrawn, write_folder
from vitascope import runs
from vitascope.data.datasets import open_data
from vitascope.errors import UserError
from vitascope.storage import locked
from vitascope.training import identity
from vitascope.training.identity import check_identity, run_identity
from vitascope.training.options.groups import ExecutionOptions
from vitascope.training.options.recipes import TrainConfig


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


DIFFERENCES: tuple[tuple[Callable[[Path], None] | None, dict[str, Any], str], ...] = (
    (another_image, {}, r"train images: 21, not 20; give every process the same command"),
    (another_name, {}, "SHA-256 of names and labels of the train images"),
    (another_content, {}, "SHA-256 of some contents of the train images"),
    (another_class, {}, r"classes of the train images: \['dark', 'grey'\], not \['dark', 'light'\]"),
    (None, {"lr": 0.5}, r"lr: 0\.5, not 0\.001"),
    (None, {"depth": 1}, r"(model: )?depth: 1, not 2"),
)


def test_other_data_or_options_in_one_process_stop_all_before_a_run_is_created(tmp_path: Path) -> None:
    ours, *theirs = (write_folder(tmp_path / f"{number}" / "greys") for number in range(7))
    for folder, (change, *_) in zip(theirs, DIFFERENCES, strict=True):
        if change is not None:
            change(folder)

    def begin() -> None:
        for folder, (_, options, expected) in zip(theirs, DIFFERENCES, strict=True):
            data, own = (ours, {}) if dist.get_rank() == 0 else (folder, options)
            message = rf"^process 1 of 2 \(.*\) differs from process 0 .*{expected}"
            with pytest.raises(UserError, match=message) as it:
                runs.train(tiny_config(data, run=str(tmp_path / "run"), **own))
            assert it.value.printed_elsewhere == (dist.get_rank() == 1)

    assert in_group(2, begin, tmp_path / "store") == [0, 0]
    assert not (tmp_path / "run").exists()


def test_other_data_in_one_process_stop_a_resumed_run_and_nothing_is_lost(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "greys")
    with undrawn():
        run = runs.train(tiny_config(data, run=str(tmp_path / "run"), epochs=1)).run
    (run / "model" / "config.json").unlink()  # the run is unfinished
    before = sorted(run.rglob("*"))

    def begin() -> None:
        if dist.get_rank() == 1:
            identity.images_facts = lambda images: {"train images": 1}
        with pytest.raises(UserError, match="train images: 1, not 20"):
            runs.resume(run)

    assert in_group(2, begin, tmp_path / "store") == [0, 0]
    assert sorted(run.rglob("*")) == before


def test_processes_of_another_version_are_rejected_in_all(tmp_path: Path) -> None:
    def begin() -> None:
        if dist.get_rank() == 1:
            identity.__version__ = "0.0.1"
        with pytest.raises(UserError, match=r"in version of vitascope: 0\.0\.1, not .*; install the same"):
            runs.train(tiny_config(tmp_path / "nowhere", run=str(tmp_path / "run")))

    assert in_group(2, begin, tmp_path / "store") == [0, 0]


def test_processes_with_another_copy_of_a_run_in_a_store_are_rejected_in_all(tmp_path: Path) -> None:
    copies = [tmp_path / "a", tmp_path / "b"]
    for copy in copies:
        copy.mkdir()

    def begin() -> None:
        own = copies[dist.get_rank()]
        with locked(own / ".lock") if own == copies[0] else nullcontext():
            dist.barrier()
            identity.check_folder_is_shared(copies[0])
            with pytest.raises(UserError, match=r"holder of the run folder: none, .* set VITASCOPE_CACHE"):
                identity.check_folder_is_shared(own)

    assert in_group(2, begin, tmp_path / "store") == [0, 0]


# The identity of a run


def identity_of(config: TrainConfig) -> dict[str, Any]:
    splits = open_data(config.data, seed=config.seed)
    resolved, model_config = planned(config, splits)
    return run_identity(resolved, model_config)


CHANGES: dict[str, Any] = {
    **{"epochs": 4, "batch_size": 5, "optimizer": "sgd", "lr_batch": 8, "schedule": "linear"},
    **{"warmup_steps": 1, "patience": 2, "ema": 0.5, "keep": "last", "flip": 0.0, "mixup": 0.8},
    **{"corrupt": 0.25, "task": "masked", "seed": 1, "embed_dim": 32, "dropout": 0.1},
    "model_options": {"positions": "rotary"},
}


def test_option_that_changes_the_result_is_rejected_by_name(data) -> None:
    saved = identity_of(tiny_config(data))
    for option, value in CHANGES.items():
        now = identity_of(tiny_config(data, **{option: value}))
        shown = "positions" if option == "model_options" else option
        with pytest.raises(
            UserError, match=rf"(not of this run: |; )(model: )?{shown} was .*, is "
        ) as rejected:
            check_identity(saved, now)
        assert "\n" not in str(rejected.value)


def test_engine_options_and_moved_files_may_differ(data, tmp_path) -> None:
    moved = tmp_path / "elsewhere" / "greys"
    moved.parent.mkdir()
    moved.symlink_to(data)
    saved = identity_of(tiny_config(data, run="here"))
    engine = {
        **{"precision": "bf16", "device": "meta", "workers": 3, "compile": "on", "accumulate": 2},
        **{"gradient_checkpointing": True, "parallel": "fsdp", "tracker": "mlflow"},
        **{"checkpoint_seconds": 1.0, "keep_checkpoints": 7, "keep_state": True},
    }
    assert set(engine) == {field.name for field in dataclasses.fields(ExecutionOptions)}
    check_identity(saved, identity_of(tiny_config(moved, run="there", **engine)))
