"""What a large ViT needs on several machines: memory, network and reading, on paper, from measured pieces.

    python benchmarks/cluster.py --out

Measured here: the activations that a block keeps per image, and the time for which a checkpoint stops
training. Measured elsewhere: the payload of a step (many_processes.py), the images that a core reads
(reading.py). Everything else is arithmetic with data sheets that the report names; no such cluster was used.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from conditions import Conditions
from contest import positive
from reports import command_line, fill_in, markdown_table, publish
from vitascope.model.config import ViTConfig
from vitascope.model.sizes import named_config
from vitascope.model.vision_model import build
from vitascope.run.run import Run
from vitascope.training.checkpoint.background import CheckpointWriter
from vitascope.training.checkpoint.folders import save_checkpoint
from vitascope.training.memory import bytes_per_image

FP32, BF16 = 4, 2
"""Bytes of a number."""
STATES = {"weights": 1, "gradients": 1, "AdamW's moments": 2, "moving average": 1}
"""Numbers of each parameter, in fp32."""
PAYLOAD = {"ddp": (1, 0), "fsdp": (0, 3), "hsdp": (1, 3)}
"""All-reduces of what a process holds, and gatherings or scatterings of the model, in a step: as counted."""

FLOPS = 989e12
"""bf16 FLOP/s of an H100 SXM, dense."""
USED = 0.4
"""Assumed share of them that training reaches."""
MEMORY = 80e9
NIC = 400e9 / 8
"""Bytes/s of one of a DGX H100's eight network interfaces, for one GPU each."""
IMAGE_BYTES = 138e9 / 1_281_167
"""Mean of ImageNet-1k's training images: the size of its tar over their number."""
IMAGES_PER_CORE = 400
"""Of 500x375 pixels, decoded and cropped to 224 in a second: results/2026-11-21-reading.md, shards."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs, and the images of a step."""

    nodes: int
    gpus: int
    batch: int

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.nodes * self.gpus


def block_bytes(config: ViTConfig) -> int:
    """Bytes of activations per image that a block keeps for the backward pass, in bf16 autocast, measured."""
    two, three = (
        bytes_per_image(build(dataclasses.replace(config, depth=depth)), torch.bfloat16) for depth in (2, 3)
    )
    return three - two


def table(config: ViTConfig, name: str, cluster: Cluster) -> str:
    """The table of a model: a column for each layout."""
    N, L, T, D = config.num_parameters, config.depth, config.num_tokens, config.embed_dim
    images, of_block = cluster.batch / cluster.world, block_bytes(config)
    parameters_of_block = N / L  # the rest is a hundredth
    kept, recomputed = L * of_block * images, (L * T * D * FP32 + of_block) * images
    rows: dict[str, list[str]] = {}

    def row(text: str, *values: float, unit: str, digits: int = 1) -> None:
        rows[f"{text}, {unit}"] = [f"{value:,.{digits}f}" for value in values]

    shards = {"ddp": 1, "fsdp": cluster.world, "hsdp": cluster.gpus}
    for state, numbers in STATES.items():
        row(state, *(numbers * FP32 * N / count / 1e9 for count in shards.values()), unit="GB")
    gathered = [0 if count == 1 else 2 * 2 * FP32 * parameters_of_block for count in shards.values()]
    row("two whole blocks and their gradients", *(size / 1e9 for size in gathered), unit="GB", digits=2)
    sent = [FP32 * N if count == 1 else 0 for count in shards.values()]
    row("copies of the gradients that are sent", *(size / 1e9 for size in sent), unit="GB")
    row("bf16 copies of the weights", *[BF16 * N / 1e9] * 3, unit="GB")
    row(f"activations of {images:.0f} images", *[kept / 1e9] * 3, unit="GB")
    row("the same with --gradient-checkpointing", *[recomputed / 1e9] * 3, unit="GB")
    fixed = [
        sum(STATES.values()) * FP32 * N / count + blocks + copies + BF16 * N
        for count, blocks, copies in zip(shards.values(), gathered, sent, strict=True)
    ]
    row("sum of a GPU", *((it + kept) / 1e9 for it in fixed), unit="GB")
    row("sum of a GPU, with --gradient-checkpointing", *((it + recomputed) / 1e9 for it in fixed), unit="GB")

    model, world, nodes = FP32 * N, cluster.world, cluster.nodes
    between = {  # bytes that leave a machine in a step; rings pass each machine's border once
        "ddp": 2 * (world - 1) / world * model,
        "fsdp": PAYLOAD["fsdp"][1] * (world - 1) / world * model,
        "hsdp": 2 * (nodes - 1) / nodes * model,
    }
    inside = PAYLOAD["hsdp"][1] * (cluster.gpus - 1) / cluster.gpus * model
    row("sent by a machine in a step", *(size / 1e9 for size in between.values()), unit="GB")
    row(
        "sent by a GPU within its machine",
        between["ddp"] / 1e9,
        between["fsdp"] / 1e9,
        inside / 1e9,
        unit="GB",
    )
    row("network, all eight interfaces", *(1e3 * it / (8 * NIC) for it in between.values()), unit="ms")
    row("network, one interface", *(1e3 * it / NIC for it in between.values()), unit="ms", digits=0)
    computing = 3 * config.flops * images / (USED * FLOPS)
    row("computing a step", *[1e3 * computing] * 3, unit="ms", digits=0)
    row("the same with --gradient-checkpointing", *[4 / 3 * 1e3 * computing] * 3, unit="ms", digits=0)

    rate = cluster.batch / computing
    row("images read by a machine", *[rate / nodes] * 3, unit="1/s", digits=0)
    row("bytes read by a machine", *[rate / nodes * IMAGE_BYTES / 1e6] * 3, unit="MB/s", digits=0)
    row("cores that decode, of a machine", *[rate / nodes / IMAGES_PER_CORE] * 3, unit="cores", digits=0)
    whole = (sum(STATES.values()) - 1) * FP32 * N  # without the gradients
    row("checkpoint", *[whole / 1e9] * 3, unit="GB")
    row(
        "of it, the largest part of a process",
        *(whole / it / 1e9 for it in shards.values()),
        unit="GB",
        digits=2,
    )
    size = f"{N / 1e6:.0f} M parameters, {config.flops / 1e9:.0f} GFLOPs per image"
    head = [f"{name}: {size}, {of_block / 1e6:.1f} MB of activations per image and block", *shards]
    return markdown_table(head, [[text, *values] for text, values in rows.items()])


def checkpoint_times(megabytes: int, rounds: int) -> str:
    """Seconds for which saving a state stops the caller, waiting for the disk and in a thread; medians."""
    torch.set_num_threads(1)  # several wait for each other where other programs run
    state = {"model": {str(number): torch.rand(2**18) for number in range(megabytes)}}
    waiting, stopped, whole = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(Run(folder), keep=2)
        for number in range(rounds):
            os.sync()
            began = time.monotonic()
            save_checkpoint(Path(folder), 2 * number, state)
            waiting.append(time.monotonic() - began)
            os.sync()
            began = time.monotonic()
            writer.save(2 * number + 1, state)
            stopped.append(time.monotonic() - began)
            writer.wait()
            whole.append(time.monotonic() - began)
        writer.close()
    times = [f"{statistics.median(seconds):.2f}" for seconds in (waiting, waiting, stopped, whole)]
    return markdown_table(
        [
            f"a checkpoint of {megabytes:,} MiB, {rounds} rounds, one thread",
            "training stops, s",
            "complete after, s",
        ],
        [["waiting for the disk", *times[:2]], ["written by a thread", *times[2:]]],
    )


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["vit_h14", "vit_l16"])
    parser.add_argument("--nodes", type=positive, default=8)
    parser.add_argument("--gpus", type=positive, default=8, help="of a node")
    parser.add_argument("--batch", type=positive, default=4096, help="images of a step, over all GPUs")
    parser.add_argument("--megabytes", type=positive, default=512, help="of the checkpoint that is timed")
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="replace the tables of a page, docs/scale.md"
    )
    arguments = parser.parse_args()
    cluster = Cluster(nodes=arguments.nodes, gpus=arguments.gpus, batch=arguments.batch)
    conditions = Conditions.now()
    tables = [table(_config(name), name, cluster) for name in arguments.models]
    times = checkpoint_times(arguments.megabytes, 5)
    sources = [
        f"H100 SXM, {FLOPS / 1e12:.0f} TFLOP/s of dense bf16 and {MEMORY / 1e9:.0f} GB: NVIDIA's data sheet",
        "DGX H100, eight network interfaces of 400 Gb/s: its data sheet",
        "ImageNet-1k, 138 GB for 1,281,167 training images: the size of its tar",
        f"{IMAGES_PER_CORE} images per second and core: 2026-11-21-reading.md",
    ]
    heading = conditions.heading(
        f"{cluster.nodes} machines of {cluster.gpus} GPUs, on paper",
        batch=f"{cluster.batch:,} images of 224 pixels",
        sources="; ".join(sources),
        assumed=f"{USED:.0%} of the FLOP/s; rings over all GPUs; fp32 in all collective operations",
    )
    publish("cluster", "\n\n".join([heading, *tables, times]), arguments)
    if arguments.docs is not None:
        stated = (
            f"{cluster.batch:,} images of 224 pixels per step. Sources: {'; '.join(sources)}. Assumed: "
            f"{USED:.0%} of these FLOP/s; rings over all GPUs. Collective operations are in fp32. "
            f"Measured on {conditions.machine.split(',')[0]}, {conditions.date}: activations, checkpoints."
        )
        fill_in(arguments.docs, "cluster", "\n\n".join([*tables, times, stated]))


def _config(name: str) -> ViTConfig:
    config = named_config(name)
    assert isinstance(config, ViTConfig)
    return config


if __name__ == "__main__":
    main()
