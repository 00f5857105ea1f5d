"""Compare the training throughput of ViTs on a GPU: bare steps of ours and timm's, and our complete loop.

    python benchmarks/gpu_training.py --out
    python benchmarks/gpu_training.py --peak-tflops 989 --out
    python benchmarks/gpu_training.py --device cpu --tiny --steps 1 --matmul 256 --backend eager

ViT-Ti/4 at 32 pixels in batches of 512 and of 1,024, and ViT-B/16 at 224, in bf16 autocast: eager, under
torch.compile, and under torch.compile with CUDA graphs. Bare steps use one batch in GPU memory: forward,
cross-entropy, backward, fused AdamW or Muon, zero_grad. Ours and timm's differ only in the model. The loop's
steps are those of `vitascope train` with our model, AdamW and the recipe `small-data` without progressive
resizing: the next batch of random images in GPU memory, crop or shift, flip, RandAugment, random erasing,
clipping, the running average, and reading the loss every tenth step. All of a mode take turns in one process.
The third command only tests the script on a CPU. With --out the numbers so far are written after each mode.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import reports
import vitascope as vs
from conditions import Conditions
from contest import positive, rate, ratio
from reports import command_line, markdown_table, note, publish
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.targets import ClassIndices
from vitascope.models.config import ViTConfig
from vitascope.models.hardware import resolve_device
from vitascope.models.vit import VisionTransformer
from vitascope.training.building import build_trainer, prepare
from vitascope.training.loop import RECORD_EVERY
from vitascope.training.optimizers import optimizer_of
from vitascope.training.run.run import Run

Step = Callable[[], object]

OURS, TIMM, LOOP, MATMUL = "vitascope, bare step", "timm, bare step", "vitascope, complete loop", "matmul"
MUON = "vitascope, bare step with Muon"
MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "compiled": {"dynamic": False},
    "graphs": {"dynamic": False, "mode": "reduce-overhead"},
}
"""The options of torch.compile; None does not compile."""
LOOP_MODES = {"eager": "off", "compiled": "on", "graphs": "graphs"}
"""The option `compile` of the loop."""
BATCHES_AN_EPOCH = 4
"""Batches per epoch of the loop's data, all of the same size."""

NOTES = """\
Medians over the rounds. The time of a round is that of all its steps, from an idle GPU to an idle GPU. "of
timm": images per second over timm's in the same mode. "of the bare step": the loop's images per second over
our bare step's. "of the ceiling": operations per second of the model's matrix products, counted for every
token through every block, three forward passes per step, over those of the large bf16 product that took turns
with the models. "of the data sheet": the same over --peak-tflops. "GB": the most GPU memory while the entrant
is built and takes its first steps, beyond that of the entrants before it. "first step": with compilation; the
loop's model is already compiled for the bare step. Random weights, random images."""


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


TINY = Case(
    title="ViT-Ti/4 at 32 pixels",
    model="vit_ti16",
    image_size=32,
    patch_size=4,
    num_classes=10,
    batch_size=512,
)
BASE = Case(
    title="ViT-B/16 at 224 pixels",
    model="vit_b16",
    image_size=224,
    patch_size=16,
    num_classes=1000,
    batch_size=256,
)
CASES = (TINY, dataclasses.replace(TINY, batch_size=1024), BASE)


def tiny(case: Case) -> Case:
    """The same with one narrow block, four patches, and a hundredth of the batch."""
    return dataclasses.replace(
        case, model="vit_ti16", depth=1, image_size=2 * case.patch_size, batch_size=case.batch_size // 100
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


@contextlib.contextmanager
def compiling_with(backend: str) -> Iterator[None]:
    """Within the context, `Module.compile` has another backend; "eager" generates no code."""
    compile_module = nn.Module.compile
    with mock.patch.object(nn.Module, "compile", functools.partialmethod(compile_module, backend=backend)):
        yield


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
    memory: int | None = None
    """Bytes of GPU memory at most, beyond that of the entrants before it."""
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


def our_model(config: ViTConfig, setting: Setting, mode: str) -> nn.Module:
    """Our model, compiled if the mode says so."""
    return compiled(VisionTransformer(config).to(setting.device).train(), mode)


def compiled(model: nn.Module, mode: str) -> nn.Module:
    """The same model, compiled in place by its first step."""
    options = MODES[mode]
    if options is not None:
        model.compile(**options)
    return model


def our_step(case: Case, model: nn.Module, setting: Setting, optimizer: str) -> Step:
    """Our model with an optimizer of `vitascope train`."""
    options = case.config().replace(optimizer=optimizer).optimization
    return bare_step(model, optimizer_of(model, options), case, setting)


def timm_step(case: Case, config: ViTConfig, setting: Setting, mode: str) -> Step:
    """timm's model of the same sizes, with the same optimizer over all its parameters.

    Raises:
        ValueError: it has another number of parameters, so the two cannot be compared.
    """
    import timm

    import peers  # noqa: F401  # before the libraries

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
    model = compiled(model.to(setting.device).train(), mode)
    options = case.config().optimization
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, weight_decay=options.weight_decay, fused=True
    )
    return bare_step(model, optimizer, case, setting)


def loop_step(case: Case, splits: Splits, setting: Setting, mode: str, run: Path) -> Step:
    """The loop's next step, epoch after epoch, without validation and checkpoints."""
    precision = "bf16" if setting.dtype == torch.bfloat16 else "fp32"
    config = case.config(precision=precision, compile=LOOP_MODES[mode])
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


def entrants(case: Case, setting: Setting, mode: str, names: Sequence[str], run: Path) -> list[Entrant]:
    """Build the entrants of a case in a mode, and run their first steps."""
    splits = random_splits(case)
    config = prepare(case.config(), splits).plan.model
    assert isinstance(config, ViTConfig)
    shared = functools.cache(lambda: our_model(config, setting, mode))  # compiled once for both optimizers
    steps: dict[str, Callable[[], Step]] = {
        TIMM: lambda: timm_step(case, config, setting, mode),
        OURS: lambda: our_step(case, shared(), setting, "adamw"),
        MUON: lambda: our_step(case, shared(), setting, "muon"),
        LOOP: lambda: loop_step(case, splits, setting, mode, run),
    }
    found = []
    for name in names:
        if name == LOOP and mode == "graphs" and setting.device.type != "cuda":
            continue  # the loop rejects CUDA graphs there
        note(f"{case.title}, batch {case.batch_size}: building {name}, {mode}")
        before = memory_in_use(setting.device)
        step = steps[name]()
        flops = 3 * config.flops * case.batch_size
        entrant = Entrant(name=name, mode=mode, step=step, images=case.batch_size, flops=flops)
        entrant.first = setting.seconds(step, 1)
        setting.seconds(step, 2)  # CUDA graphs are captured in the second step
        if before is not None:
            entrant.memory = torch.cuda.max_memory_allocated(setting.device) - before
        found.append(entrant)
    return found


def memory_in_use(device: torch.device) -> int | None:
    """Bytes of a GPU that tensors take now; its maximum begins anew. None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def take_turns(found: Sequence[Entrant], setting: Setting, *, rounds: int, warmup: int, steps: int) -> None:
    """Run interleaved rounds, A B C, A B C, ..., so a change of the GPU's clocks affects all entrants."""
    for number, entrant in itertools.product(range(1, rounds + 1), found):
        setting.seconds(entrant.step, warmup)
        entrant.times.append(setting.seconds(entrant.step, steps))
        note(f"round {number}/{rounds}: {entrant.name}, {entrant.mode} {1e3 * entrant.times[-1]:.2f} ms")


def table(found: Sequence[Entrant], peak_tflops: float | None) -> str:
    """One row per entrant; the matrix product is the ceiling."""
    ceiling = max(entrant.flops_per_second for entrant in found if entrant.name == MATMUL)
    models = [entrant for entrant in found if entrant.name != MATMUL]
    rates = {(entrant.name, entrant.mode): entrant.images_per_second for entrant in models}
    header = ["entrant", "mode", "images/s", "slowest to fastest round", "of timm", "of the bare step"]
    header += ["of the ceiling", *(["of the data sheet"] if peak_tflops else []), "first step"]
    header += ["GB"]
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
                "-" if entrant.memory is None else f"{entrant.memory / 1e9:.2f}",
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
    parser = command_line(__doc__)
    parser.add_argument("--device", default="auto", help="default auto")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="default bf16")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--batch-sizes", nargs=len(CASES), type=positive, help="of each case (default 512 1024 256)"
    )
    sizes.add_argument("--tiny", action="store_true", help="tiny models, for a test of the script")
    parser.add_argument(
        "--backend", default="inductor", help="of torch.compile (default inductor); eager generates no code"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--warmup", type=positive, default=3, help="untimed steps per round (default 3)")
    parser.add_argument("--steps", type=positive, default=30, help="timed steps per round (default 30)")
    parser.add_argument(
        "--matmul", type=positive, default=8192, help="side of the ceiling's matrices (default 8192)"
    )
    parser.add_argument("--peak-tflops", type=float, help="the data sheet's number for dense bf16")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    device = resolve_device(arguments.device)
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    setting = Setting(device=device, dtype=dtype)
    names = [OURS, MUON, LOOP]
    if importlib.util.find_spec("timm") is not None:
        names.insert(0, TIMM)
    method = (
        f"{arguments.precision}, one process; interleaved rounds: {arguments.rounds}; warm-up steps per "
        f"round: {arguments.warmup}; timed steps per round: {arguments.steps}; medians"
    )
    conditions = Conditions.now()
    heading = conditions.heading("Training on a GPU", method=method, device=describe_device(device))
    sections: dict[str, list[Entrant]] = {}
    failures: list[str] = []
    cases: tuple[Case, ...] = (tiny(TINY), tiny(BASE)) if arguments.tiny else CASES
    if arguments.batch_sizes:
        pairs = zip(CASES, arguments.batch_sizes, strict=True)
        cases = tuple(dataclasses.replace(case, batch_size=size) for case, size in pairs)
    for mode, case in itertools.product(arguments.modes, cases):  # the modes that compile for long are last
        title = f"{case.title}, batch {case.batch_size}"
        try:
            with compiling_with(arguments.backend):
                found = measured(case, setting, mode, names, arguments)
        except Exception as error:  # noqa: BLE001 - the next one may run
            traceback.print_exc()
            failures.append(f"{title}, {mode}: {type(error).__name__}: {str(error)[:200]}")
            continue
        finally:
            gc.collect()
            torch.compiler.reset()
            torch.cuda.empty_cache()
        sections.setdefault(title, []).extend(found)
        if arguments.out:  # in case a time limit ends a later one
            write(report_of(heading, sections, failures, arguments, names), conditions, sections)
    publish("gpu_training", report_of(heading, sections, failures, arguments, names), arguments)
    sys.exit(bool(failures))


def measured(
    case: Case, setting: Setting, mode: str, names: Sequence[str], arguments: argparse.Namespace
) -> list[Entrant]:
    """The entrants of a case in a mode after all rounds, without their models."""
    with tempfile.TemporaryDirectory() as run:
        found = entrants(case, setting, mode, names, Path(run))
        found.append(matmul(arguments.matmul, setting.device))
        counts = {"rounds": arguments.rounds, "warmup": arguments.warmup, "steps": arguments.steps}
        take_turns(found, setting, **counts)
    return [dataclasses.replace(entrant, step=int) for entrant in found]  # frees the GPU's memory


def report_of(
    heading: str,
    sections: dict[str, list[Entrant]],
    failures: Sequence[str],
    arguments: argparse.Namespace,
    names: Sequence[str],
) -> str:
    """The report so far."""
    tables = [f"## {title}\n\n{table(found, arguments.peak_tflops)}" for title, found in sections.items()]
    failed = [f"Failed: {failure}" for failure in failures]
    missing = [] if TIMM in names else ["Not installed, so left out: timm."]
    return "\n\n".join([heading, *tables, *failed, *missing, NOTES])


def write(report: str, conditions: Conditions, sections: dict[str, list[Entrant]]) -> None:
    """Write the report and the raw numbers."""
    path = reports.RESULTS / f"{datetime.date.today().isoformat()}-gpu_training"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(f"{report}\n", encoding="utf-8")
    names = ("name", "mode", "images", "flops", "first", "memory", "times")
    cases = {
        title: [{name: getattr(entrant, name) for name in names} for entrant in entrants]
        for title, entrants in sections.items()
    }
    values = {**dataclasses.asdict(conditions), "cases": cases}
    path.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
