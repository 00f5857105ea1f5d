"""Compare the training throughput of ViTs on a GPU: bare steps of ours and timm's, and our complete loop.

    python benchmarks/gpu_training.py --out
    python benchmarks/gpu_training.py --peak-tflops 989 --out
    python benchmarks/gpu_training.py --device cpu --depth 1 --batch-sizes 4 4 --steps 1 --matmul 256

ViT-S/16 at 224 pixels and ViT-Ti/4 at 32, eager and under torch.compile, in bf16 autocast. Bare steps use one
batch in GPU memory: forward, cross-entropy, backward, fused AdamW, zero_grad. Ours and timm's differ only in
the model. The loop's steps are those of `vitascope train` with our model, AdamW and the recipe `small-data`
without progressive resizing: the next batch of random images in GPU memory, crop or shift, flip, RandAugment,
random erasing, clipping, the running average, and reading the loss every tenth step. All take turns in one
process. The third command only tests the script on a CPU. The script takes a few minutes on an H200, most of
them for compilation.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import vitascope as vs
from conditions import Conditions
from contest import positive, rate, ratio
from contestants import make_torchvision_importable
from reports import markdown_table, note, publish
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.targets import ClassIndices
from vitascope.model.config import ViTConfig
from vitascope.model.hardware import resolve_device
from vitascope.model.vit import VisionTransformer
from vitascope.run.run import Run
from vitascope.training.loop import RECORD_EVERY
from vitascope.training.optim import optimizer_of
from vitascope.training.train import build_trainer, prepare

Step = Callable[[], object]

OURS, TIMM, LOOP, MATMUL = "vitascope, bare step", "timm, bare step", "vitascope, complete loop", "matmul"
MODES = ("eager", "compiled")
BATCHES_AN_EPOCH = 4
"""Batches per epoch of the loop's data, all of the same size."""

NOTES = """\
Medians over the rounds. The time of a round is that of all its steps, from an idle GPU to an idle GPU. "of
timm": images per second over timm's in the same mode. "of the bare step": the loop's images per second over
our bare step's. "of the ceiling": operations per second of the model's matrix products, counted for every
token through every block, three forward passes per step, over those of the large bf16 product that took turns
with the models. "of the data sheet": the same over --peak-tflops. "first step": with compilation; the loop's
model is already compiled for the bare step. Random weights, random images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its training data."""

    title: str
    model: str
    image_size: int
    patch_size: int
    num_classes: int
    batch_size: int
    depth: int | None = None

    def config(self, **changes: object) -> vs.TrainConfig:
        """The loop's options: `small-data` with a plain ViT, AdamW and images of one size."""
        return vs.TrainConfig.from_recipe(
            "small-data",
            data=f"{BATCHES_AN_EPOCH * self.batch_size} random images",
            model=self.model,
            image_size=self.image_size,
            patch_size=self.patch_size,
            depth=self.depth,
            batch_size=self.batch_size,
            optimizer="adamw",
            progressive=0.0,
            model_options={"init": "paper"},
            **changes,
        )


CASES = (
    Case(
        title="ViT-S/16 at 224 pixels",
        model="vit_s16",
        image_size=224,
        patch_size=16,
        num_classes=1000,
        batch_size=256,
    ),
    Case(
        title="ViT-Ti/4 at 32 pixels",
        model="vit_ti16",
        image_size=32,
        patch_size=4,
        num_classes=10,
        batch_size=1024,
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The device and the precision of all entrants."""

    device: torch.device
    dtype: torch.dtype

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, step: Step, count: int) -> float:
        """Seconds per step, over `count` steps from idle to idle."""
        self.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            step()
        self.synchronize()
        return (time.perf_counter() - begun) / count


@dataclasses.dataclass(kw_only=True)
class Entrant:
    """A competitor, and its seconds per step in each round."""

    name: str
    mode: str
    step: Step
    images: int
    """Images per step; 0 for a matrix product."""
    flops: int
    """Floating-point operations per step; a multiply-add counts as 2."""
    first: float = 0.0
    """Duration of the first step in seconds."""
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def images_per_second(self) -> float:
        """In the median round."""
        return self.images / statistics.median(self.times)

    @property
    def flops_per_second(self) -> float:
        """In the median round."""
        return self.flops / statistics.median(self.times)


def random_splits(case: Case) -> Splits:
    """Images of noise, in all classes, that fill complete batches."""
    generator = np.random.default_rng(0)
    count, side = BATCHES_AN_EPOCH * case.batch_size, case.image_size
    pixels = generator.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    names = tuple(str(label) for label in range(case.num_classes))
    images = ImageSet("train", list(pixels), ClassIndices(np.arange(count) % case.num_classes, names))
    return Splits(images, images.subset("val", np.arange(1)), None, channels=3)


def bare_step(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, setting: Setting) -> Step:
    """Forward, loss, backward and update, always on the same random batch."""
    device, side = setting.device, case.image_size
    images = torch.randn(case.batch_size, 3, side, side, device=device)
    labels = torch.randint(case.num_classes, (case.batch_size,), device=device)
    mixed = setting.dtype != torch.float32

    def step() -> None:
        with torch.autocast(device.type, setting.dtype, enabled=mixed):
            loss = F.cross_entropy(model(images).float(), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(case: Case, config: ViTConfig, setting: Setting, mode: str) -> Step:
    """Our model with the optimizer of `vitascope train`."""
    model = VisionTransformer(config).to(setting.device).train()
    if mode == "compiled":
        model.compile()
    return bare_step(model, optimizer_of(model, case.config().optimization), case, setting)


def timm_step(case: Case, config: ViTConfig, setting: Setting, mode: str) -> Step:
    """timm's model of the same sizes, with the same optimizer over all its parameters.

    Raises:
        ValueError: it has another number of parameters, so the two cannot be compared.
    """
    make_torchvision_importable()
    import timm

    model = timm.create_model(
        "vit_base_patch16_224",
        img_size=config.image_hw,
        patch_size=config.patch_hw,
        num_classes=config.num_classes,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != config.num_parameters:
        raise ValueError(f"timm's model has {count:,} parameters, ours {config.num_parameters:,}")
    model = model.to(setting.device).train()
    if mode == "compiled":
        model.compile()
    options = case.config().optimization
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, weight_decay=options.weight_decay, fused=True
    )
    return bare_step(model, optimizer, case, setting)


def loop_step(case: Case, splits: Splits, setting: Setting, mode: str, run: Path) -> Step:
    """The loop's next step, epoch after epoch, without validation and checkpoints."""
    precision = "bf16" if setting.dtype == torch.bfloat16 else "fp32"
    config = case.config(precision=precision, compile=mode == "compiled")
    trainer = build_trainer(Run(run), prepare(config, splits), setting.device)
    trainer.module.train()
    batches = ((batch, epoch) for epoch in itertools.count() for batch in trainer.train_loader.epoch(epoch))

    def step() -> None:
        loss = trainer._training_step(*next(batches))
        if trainer.step % RECORD_EVERY == 0:
            trainer._check_finite(float(loss))  # reads the loss, as the loop does

    return step


def matmul(side: int, device: torch.device) -> Entrant:
    """The ceiling: a square product of random bf16 matrices."""
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    return Entrant(
        name=MATMUL,
        mode="eager",
        step=lambda: torch.mm(a, b, out=product),
        images=0,
        flops=2 * side**3,
    )


def entrants(
    case: Case, setting: Setting, modes: Sequence[str], names: Sequence[str], run: Path
) -> list[Entrant]:
    """Build all entrants of a case and run their first steps."""
    splits = random_splits(case)
    config = prepare(case.config(), splits).plan.model
    assert isinstance(config, ViTConfig)
    found = []
    for mode, name in itertools.product(modes, names):
        note(f"{case.title}: building {name}, {mode}")
        if name == LOOP:
            step = loop_step(case, splits, setting, mode, run)
        else:
            step = {OURS: our_step, TIMM: timm_step}[name](case, config, setting, mode)
        flops = 3 * config.flops * case.batch_size
        entrant = Entrant(name=name, mode=mode, step=step, images=case.batch_size, flops=flops)
        entrant.first = setting.seconds(step, 1)
        found.append(entrant)
    return found


def take_turns(found: Sequence[Entrant], setting: Setting, *, rounds: int, warmup: int, steps: int) -> None:
    """Run interleaved rounds, A B C, A B C, ..., so a change of the GPU's clocks affects all entrants."""
    for number, entrant in itertools.product(range(1, rounds + 1), found):
        setting.seconds(entrant.step, warmup)
        entrant.times.append(setting.seconds(entrant.step, steps))
        note(f"round {number}/{rounds}: {entrant.name}, {entrant.mode} {1e3 * entrant.times[-1]:.2f} ms")


def table(found: Sequence[Entrant], peak_tflops: float | None) -> str:
    """One row per entrant; the matrix product is the ceiling."""
    (ceiling,) = (entrant.flops_per_second for entrant in found if entrant.name == MATMUL)
    models = [entrant for entrant in found if entrant.name != MATMUL]
    rates = {(entrant.name, entrant.mode): entrant.images_per_second for entrant in models}
    header = ["entrant", "mode", "images/s", "slowest to fastest round", "of timm", "of the bare step"]
    header += ["of the ceiling", *(["of the data sheet"] if peak_tflops else []), "first step"]
    rows = []
    for entrant in models:
        speeds = [entrant.images / seconds for seconds in entrant.times]
        shares = [ceiling, peak_tflops * 1e12] if peak_tflops else [ceiling]
        bare = rates.get((OURS, entrant.mode)) if entrant.name == LOOP else None
        rows.append(
            (
                entrant.name,
                entrant.mode,
                rate(entrant.images_per_second),
                f"{rate(min(speeds))} to {rate(max(speeds))}",
                ratio(entrant.images_per_second, rates.get((TIMM, entrant.mode))),
                "-" if bare is None else f"{entrant.images_per_second / bare:.1%}",
                *(f"{entrant.flops_per_second / peak:.1%}" for peak in shares),
                f"{entrant.first:.1f} s",
            )
        )
    return f"{markdown_table(header, rows)}\n\nCeiling: {ceiling / 1e12:,.1f} TFLOP/s."


def describe_device(device: torch.device) -> str:
    """The GPU, its software, and torch's precision for fp32 products and convolutions."""
    tf32 = f"fp32 products: {torch.get_float32_matmul_precision()}, convolutions: " + (
        "TF32" if torch.backends.cudnn.allow_tf32 else "fp32"
    )
    if device.type != "cuda":
        return f"{device.type}, no GPU; {tf32}"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
        f"{properties.multi_processor_count} multiprocessors; CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}; {tf32}"
    )


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="default auto")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="default bf16")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="default: both")
    parser.add_argument(
        "--batch-sizes", nargs=len(CASES), type=positive, help="batch size per model (default 256 and 1024)"
    )
    parser.add_argument(
        "--depth", type=positive, help="blocks, for a test of the script (default: the models')"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--warmup", type=positive, default=3, help="untimed steps per round (default 3)")
    parser.add_argument("--steps", type=positive, default=30, help="timed steps per round (default 30)")
    parser.add_argument(
        "--matmul", type=positive, default=8192, help="side of the ceiling's matrices (default 8192)"
    )
    parser.add_argument("--peak-tflops", type=float, help="the data sheet's number for dense bf16")
    parser.add_argument("--out", action="store_true", help="also write the report to benchmarks/results")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    device = resolve_device(arguments.device)
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    setting = Setting(device=device, dtype=dtype)
    names = [OURS, LOOP] if importlib.util.find_spec("timm") is None else [TIMM, OURS, LOOP]
    method = (
        f"{arguments.precision}, one process; interleaved rounds: {arguments.rounds}; warm-up steps per "
        f"round: {arguments.warmup}; timed steps per round: {arguments.steps}; medians"
    )
    report = (
        Conditions.now().heading("Training on a GPU", method=method, device=describe_device(device)) + "\n"
    )
    for case, batch_size in zip(CASES, arguments.batch_sizes or [c.batch_size for c in CASES], strict=True):
        case = dataclasses.replace(case, batch_size=batch_size, depth=arguments.depth)
        with tempfile.TemporaryDirectory() as run:
            found = entrants(case, setting, arguments.modes, names, Path(run))
            found.append(matmul(arguments.matmul, device))
            counts = {"rounds": arguments.rounds, "warmup": arguments.warmup, "steps": arguments.steps}
            take_turns(found, setting, **counts)
        report += f"\n## {case.title}, batch {batch_size}\n\n{table(found, arguments.peak_tflops)}\n"
        found.clear()  # frees the GPU's memory for the next case
        gc.collect()
        torch.compiler.reset()
    missing = "" if TIMM in names else "\nNot installed, so left out: timm.\n"
    publish("gpu_training", f"{report}{missing}\n{NOTES}", arguments)


if __name__ == "__main__":
    main()
