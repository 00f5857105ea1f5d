"""Sharded states: two real processes write over gloo, and one, two or three read."""

import copy
import json
import os
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.forked import in_group
from tests.training.checkpoint import replace_file, save_checkpoint
from vitascope.errors import UserError
from vitascope.training.checkpoint.folders import MANIFEST, checkpoints, load_checkpoint, load_checkpoint_at
from vitascope.training.checkpoint.state import model_state, optimizer_state, restore_model, restore_optimizer
from vitascope.training.distributed import rank

OPTIMIZERS = ("adamw", "sgd")


class Run:
    """A model (7 and 1 rows do not divide by 2 processes), its average and its optimizer after some steps."""

    def __init__(self, optimizer: str, spread: bool, steps: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        if spread:
            for module in (self.model, self.average):
                fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = (
            torch.optim.AdamW(groups, lr=0.01, fused=True)
            if optimizer == "adamw"
            else torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        )
        for step in range(steps):
            self.train(step)

    def train(self, step: int) -> None:
        """Step along an artificial gradient that is the same for sharded and unsharded parameters."""
        for number, parameter in enumerate(self.model.parameters()):
            whole = torch.sin(torch.arange(parameter.numel()) + 10.0 * number + step).view(parameter.shape)
            parameter.grad = _spread_as(parameter, whole)
        self.optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)

    def state(self) -> dict[str, Any]:
        return {
            "model": model_state(self.model, whole=False),
            "average": model_state(self.average, whole=False),
            "optimizer": optimizer_state(self.model, self.optimizer),
            "best_loss": 0.25,
            "sums": {"count": torch.tensor(3.0)},
        }

    def restore(self, run: Path) -> None:
        _, state = load_checkpoint(run)
        assert state["best_loss"] == 0.25
        assert state["sums"]["count"] == 3
        restore_model(self.model, state["model"])
        restore_model(self.average, state["average"])
        restore_optimizer(self.model, self.optimizer, state["optimizer"])


def _spread_as(parameter: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in flat(part, f"{path}/{key}").items()}
    return {path: value.full_tensor() if isinstance(value, DTensor) else value}


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[path], value), path
        else:
            assert json.dumps(found[path]) == json.dumps(value), path  # torch makes lists of betas


def assert_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare with a tolerance: the kernels round other elements where a shard ends."""
    torch.testing.assert_close(flat(found), flat(wanted), rtol=1e-6, atol=1e-7)


def write(folder: Path, spread: bool) -> None:
    for optimizer in OPTIMIZERS:
        trained = Run(optimizer, spread, steps=2)
        save_checkpoint(folder / optimizer, 2, trained.state())
        whole = flat(trained.state())
        if rank() == 0:
            torch.save(whole, folder / optimizer / "whole.pt")


def assert_resumes(folder: Path, spread: bool) -> None:
    for optimizer in OPTIMIZERS:
        restored = Run(optimizer, spread)
        restored.restore(folder / optimizer)
        assert_equal(flat(restored.state()), torch.load(folder / optimizer / "whole.pt"))
        restored.train(2)
        uninterrupted = Run(optimizer, spread=False, steps=3)
        assert_close(restored.model.state_dict(), uninterrupted.model.state_dict())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs whose checkpoints were written by two processes, each its own shards."""
    folder = tmp_path_factory.mktemp("saved")
    assert in_group(2, lambda: write(folder, spread=True), folder / "meeting") == [0] * 2
    return folder


def test_each_process_writes_its_shards_and_the_manifest_lists_them(saved: Path) -> None:
    (folder,) = checkpoints(saved / "adamw")
    names = {"state.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert {path.name for path in folder.iterdir()} == names | {MANIFEST}
    assert json.loads((folder / MANIFEST).read_text())["files"].keys() == names
    assert folder.name.encode() not in (folder / ".metadata").read_bytes()  # and no other local path


def test_sharded_run_resumes_in_one_process(saved: Path) -> None:
    assert_resumes(saved, spread=False)


def test_sharded_run_resumes_in_more_processes(saved: Path, tmp_path: Path) -> None:
    assert in_group(3, lambda: assert_resumes(saved, spread=True), tmp_path / "meeting") == [0] * 3


def test_run_of_one_process_resumes_sharded(tmp_path: Path) -> None:
    write(tmp_path, spread=False)
    assert in_group(2, lambda: assert_resumes(tmp_path, spread=True), tmp_path / "meeting") == [0] * 2


@pytest.mark.parametrize(("failing", "limit"), [(1, 200), (0, 1 << 20)])  # its shards; the state
def test_failure_in_one_process_is_raised_in_all_and_leaves_no_checkpoint(
    tmp_path: Path, failing: int, limit: int
) -> None:
    def save() -> None:
        state = {**Run("sgd", spread=True, steps=1).state(), "large": torch.zeros(1 << 20)}
        save_checkpoint(tmp_path, 1, state)
        if rank() == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(UserError, match="File too large") as caught:
            save_checkpoint(tmp_path, 2, state)
        assert ("in process 1" in str(caught.value)) == (failing == 1)
        assert "\n" not in str(caught.value)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    assert in_group(2, save, tmp_path / "meeting") == [0] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert load_checkpoint(tmp_path)[0] == 1


def forge(saved: Path, run: Path, content: bytes) -> Path:
    shutil.copytree(saved / "adamw", run)
    (folder,) = checkpoints(run)
    replace_file(folder, ".metadata", content)
    return folder


def test_loading_metadata_executes_no_code(saved: Path, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    folder = forge(saved, tmp_path / "run", pickle.dumps(Attack()))
    with pytest.raises(UserError, match=r"\.metadata: .*refers to 'posix\.mkdir") as caught:
        load_checkpoint_at(folder)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()


def change_weight(metadata: Metadata, change: str) -> None:
    """Change what a checkpoint's metadata describe of its first weight, or of all files."""
    entries, name = metadata.state_dict_metadata, "model/0.weight"
    if change == "bytes":  # torch would unpickle the shard
        entries[name] = BytesStorageMetadata()
    elif change == "shape":
        entries[name].size = torch.Size([70000, 5])
    elif change == "tensor":
        del entries[name]
    for stored in metadata.storage_data.values():
        if change == "end":
            stored.offset = 10**12


@pytest.mark.parametrize("change", ["bytes", "shape", "tensor", "end"])
def test_metadata_that_does_not_match_the_tensors_is_rejected(saved, tmp_path, change: str) -> None:
    content = (checkpoints(saved / "adamw")[0] / ".metadata").read_bytes()
    metadata = pickle.loads(content)  # noqa: S301 - ours
    change_weight(metadata, change)
    message = "BytesStorageMetadata" if change == "bytes" else "complete, but this run cannot load it"
    with pytest.raises(UserError, match=message):
        load_checkpoint(forge(saved, tmp_path / "run", pickle.dumps(metadata)).parent.parent)
