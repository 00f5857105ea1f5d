"""Compare the losses of 8 processes with those of one, and count what the processes send.

    python benchmarks/many_processes.py --out

A tiny model is trained on the CPU by one process and by `--processes` of them, over gloo, in every layout:
copies (ddp), shards (fsdp), copies in shards of `--shard-size` processes (hsdp). Two data sets: tars of very
different sizes, and fewer images than processes. The losses of all steps and validations are compared.

The payload of every collective operation of a training step is counted too, in units of the bytes of all
parameters.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vitascope as vs
from conditions import Conditions
from contest import positive
from reports import command_line, markdown_table, publish
from vitascope.run.run import Run
from vitascope.training import distributed, loop

DATA = {"uneven shards": (37, 9, 2), "fewer images than processes": (3,)}
"""Training images in each tar."""
LAYOUTS = ("ddp", "fsdp", "hsdp")
KINDS = {"allreduce": "all-reduce", "allgather": "all-gather", "reduce_scatter": "reduce-scatter"}
SIZE = {"image_size": 16, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 2}


def config_of(folder: Path, data: str, layout: str, shard_size: int) -> vs.TrainConfig:
    """The options of a run; the rate rises all the time, because Adam's first steps at the full rate magnify
    rounding in any run."""
    how = {"parallel": layout, "shard_size": shard_size} if layout == "hsdp" else {"parallel": layout}
    return vs.TrainConfig.from_recipe(
        "base",
        data=str(folder / data),
        run=str(folder / "runs" / f"{data}, {layout}, {distributed.world_size()}"),
        **SIZE,
        **(how if distributed.world_size() > 1 else {}),
        **{
            "batch_size": 18,
            "epochs": 4,
            "precision": "fp32",
            "lr": 1e-3,
            "warmup_epochs": 9.0,
            "device": "cpu",
        },
        model_options={"qkv_bias": "no_key"},
    )


class Payload(TorchDispatchMode):
    """Counts the bytes that each kind of collective operation passes on, per process."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.lower()
        if name.startswith(("c10d::", "_c10d_functional::")):
            found = [kind for kind in KINDS if kind in name.replace("all_", "all")]
            sizes = [tensor.nbytes for tensor in _tensors(args)]
            if found and sizes:
                self.bytes[found[0]] += max(sizes)  # of all-gather and reduce-scatter, the whole side
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return (
        [tensor for value in values for tensor in _tensors(value)] if isinstance(values, list | tuple) else []
    )


def train_all(folder: Path, shard_size: int) -> None:
    """What each process does: every run, and the payload of its last step but one."""
    torch.set_num_threads(1)
    loop.RECORD_EVERY = 1
    step, counted = loop.Trainer._training_step, {}

    def counting(self: loop.Trainer, *arguments: Any) -> Any:
        with Payload() as payload:
            loss = step(self, *arguments)
        parameters = sum(p.numel() * p.element_size() for p in self.module.parameters())
        counted[self.run.path.name] = {kind: sent / parameters for kind, sent in payload.bytes.items()}
        return loss

    loop.Trainer._training_step = counting  # type: ignore[method-assign, assignment]
    distributed.join_processes("cpu")
    for data in DATA:
        for layout in LAYOUTS if distributed.world_size() > 1 else LAYOUTS[:1]:
            vs.train(config_of(folder, data, layout, shard_size))
    if distributed.is_first():
        (folder / f"payload-{distributed.world_size()}.json").write_text(json.dumps(counted))


def losses(run: Path) -> list[float]:
    """The losses of all steps and epochs, and of the test."""
    names = ("loss", "train_loss", "val_loss")
    return [record[name] for record in Run(run).metrics for name in names if name in record]


def write_data(folder: Path) -> None:
    """Shards of pictures of noise, brighter in the second of two classes."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    written = importlib.import_module("tests.training.test_many_processes")
    for name, counts in DATA.items():
        written.write_tars(folder / name, counts)


def compare(folder: Path, processes: int, shard_size: int) -> str:
    """Tables of the largest relative differences and of the payload."""
    payload = json.loads((folder / f"payload-{processes}.json").read_text())
    rows, sent = [], []
    for data in DATA:
        one = losses(folder / "runs" / f"{data}, ddp, 1")
        for layout in LAYOUTS:
            run = f"{data}, {layout}, {processes}"
            many = losses(folder / "runs" / run)
            assert len(one) == len(many)
            apart = max(abs(a - b) / abs(a) for a, b in zip(one, many, strict=True))
            rows.append([data, layout, f"{len(one)}", f"{apart:.1e}"])
            if data == next(iter(DATA)):
                sent.append([layout, *(f"{payload[run].get(kind, 0):.2f}" for kind in KINDS)])
    return (
        markdown_table(["data", "layout", "losses", "largest relative difference"], rows)
        + "\n\nPayload per step and process, in units of the bytes of all parameters "
        + f"(hsdp: {shard_size} shards a copy):\n\n"
        + markdown_table(["layout", *KINDS.values()], sent)
    )


def main() -> None:
    """Run both numbers of processes and print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--processes", type=positive, default=8)
    parser.add_argument(
        "--shard-size", type=positive, default=4, help="processes that hold a copy, with hsdp"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        train_all(arguments.folder, arguments.shard_size)
        return
    conditions = Conditions.now()
    with tempfile.TemporaryDirectory() as place:
        write_data(Path(place))
        for processes in (1, arguments.processes):
            subprocess.run(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(processes), __file__),
                    *("--folder", place, "--shard-size", str(arguments.shard_size)),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                check=True,
            )
        tables = compare(Path(place), arguments.processes, arguments.shard_size)
    heading = conditions.heading(
        f"{arguments.processes} processes against one",
        method="gloo on the CPU, fp32, a ViT of 4 blocks of width 64",
    )
    publish("many_processes", f"{heading}\n\n{tables}", arguments)


if __name__ == "__main__":
    main()
