"""Four processes against one, in every layout of the model: uneven shards, fewer images than processes."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data import noise
from tests.data.formats.test_archive import write_tar
from tests.forked import torchrun
from tests.training import tiny_config, undrawn
from vitascope.errors import UserError
from vitascope.options.groups import ExecutionOptions
from vitascope.options.recipes import TrainConfig
from vitascope.run.run import Run
from vitascope.training import distributed, loop, optimizers, train
from vitascope.training.checkpoint.folders import checkpoints, load_checkpoint_at

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "hsdp": {"parallel": "hsdp", "shard_size": 2},
}
DATA = {"uneven": (9, 4, 1), "few": (2, 1)}
"""Training images in each tar: in batches of 6, the last one has 2 of 14; 3 images for 4 processes."""


def write_tars(folder: Path, counts: tuple[int, ...]) -> None:
    """Shards of so many training images, and of 2 to validate and to test with."""
    (folder / "classes.txt").parent.mkdir(parents=True)
    (folder / "classes.txt").write_text("dark\nlight\n")
    number = 0
    for split, sizes in {"train": counts, "val": (2,), "test": (2,)}.items():
        (folder / split).mkdir()
        for shard, size in enumerate(sizes):
            members = {}
            for _ in range(size):
                label = number % 2
                picture, file = noise(16, 16, seed=number) // 2 + np.uint8(100 * label), io.BytesIO()
                Image.fromarray(picture).save(file, "png")
                members |= {f"{number:03}.png": file.getvalue(), f"{number:03}.cls": str(label).encode()}
                number += 1
            write_tar(folder / split / f"{shard}.tar", members)


def config_of(place: Path, data: str, name: str, **options: Any) -> TrainConfig:
    # The rate rises all the time: at the full rate, Adam's first steps magnify rounding in any run.
    shared: dict[str, Any] = {"batch_size": 6, "epochs": 2, "precision": "fp32", "lr": 1e-3, "ema": 0.9}
    shared |= {"warmup_epochs": 5.0, "mixup": 0.8, "randaugment": 2, "optimizer": "muon"}
    shared["model_options"] = {"qkv_bias": "no_key"}  # whose gradient is only rounding
    shared["streams"] = 2  # each from its own shards
    return tiny_config(place / data, run=str(place / "runs" / f"{data}-{name}"), **shared | options)


def run_all(place: Path, layouts: dict[str, dict[str, Any]]) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    loop.RECORD_EVERY = 1
    optimizers.has_bf16 = lambda device: False  # whose rounding is more than the tolerance
    with undrawn():
        for data in DATA:
            for name, options in layouts.items():
                train.train(config_of(place, data, name, **options))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("many")
    for name, counts in DATA.items():
        write_tars(root / name, counts)
    for count, layouts in ((1, {"one": {}}), (4, LAYOUTS)):
        output = root / f"{count}.txt"
        assert torchrun(count, output, run_all, root, layouts) == 0, output.read_text()[-4000:]
    return root


def losses(run: Path) -> list[tuple[int, str, float]]:
    names = ("loss", "train_loss", "val_loss")
    return [(it["step"], name, it[name]) for it in Run(run).metrics for name in names if name in it]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_processes_reproduce_the_losses_of_one(place, data: str, layout: str) -> None:
    one, four = (losses(place / "runs" / f"{data}-{name}") for name in ("one", layout))
    assert len(one) == {"uneven": 2 * (3 + 2), "few": 2 * (1 + 2)}[data] + 1
    assert [where[:2] for where in four] == [where[:2] for where in one]
    assert [loss for *_, loss in four] == pytest.approx([loss for *_, loss in one], rel=1e-6)


def test_checkpoint_of_copies_in_shards_has_each_tensor_once(place) -> None:
    one, four = (
        load_checkpoint_at(checkpoints(place / "runs" / f"uneven-{name}")[-1])[1] for name in ("one", "hsdp")
    )
    for part in ("model", "average"):
        for name, tensor in one[part].items():
            torch.testing.assert_close(four[part][name], tensor, rtol=1e-4, atol=1e-5)
    sizes = {
        name: sum(
            file.stat().st_size for file in checkpoints(place / "runs" / f"uneven-{name}")[-1].iterdir()
        )
        for name in ("fsdp", "hsdp")
    }
    assert sizes["hsdp"] < 1.5 * sizes["fsdp"]


def test_a_copy_takes_the_processes_of_a_machine_by_default(monkeypatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 8)
    monkeypatch.setattr(distributed, "largest", lambda *values: values)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert distributed.shards_of_copy(None) == 4
    assert distributed.shards_of_copy(2) == 2
    with pytest.raises(
        UserError, match=r"divides 8 processes into .* 3 each, which leaves 2; set shard_size"
    ):
        distributed.shards_of_copy(3)
    with pytest.raises(UserError, match=r"shard_size=2 has no effect with parallel=fsdp"):
        ExecutionOptions(parallel="fsdp", shard_size=2)
