"""Compare time and memory of explanations of ViT-B/16 with pytorch-grad-cam and vit-explain's rollout.

    .venv/bin/python benchmarks/explanations.py [--out]

At 224 pixels, in batches of 1 and 8, the script compares rollout with vit-explain's algorithm and Grad-CAM
with pytorch-grad-cam. It measures gradient rollout alone, because neither tool has it in this form. At 1,024
pixels, with one image, the complete process of rollout should stay below 4 GB. Everything is in fp32, from
the same timm file with random weights. The script first compares the maps of both sides, and fails if they
differ. It needs timm and grad-cam, and 14 GB for vit-explain's algorithm at 1,024 pixels, which it leaves out
if less is free. It takes about 12 minutes on 2 idle cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import multiprocessing
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contest import Contest, Entrant, Preparation, Step, Timing, heading, options, positive, ratio, timing_of
from contestants import make_torchvision_importable, vit_at
from reports import markdown_table, note, publish
from vitascope import explain
from vitascope.weights.loading import from_pretrained

METHODS = ("rollout", "grad_cam", "gradient_rollout")
BATCH_SIZES = (1, 8)
LIMIT = 4e9
"""Limit in bytes for the process that computes the rollout of a large image."""
TOLERANCE = 0.01
"""The largest difference by rounding between maps scaled to 0 and 1."""
OURS = "vitascope"


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of random images and a model folder of timm's."""

    folder: Path
    image_size: int
    batch_size: int

    def images(self) -> Tensor:
        """(B, 3, H, W), the same in every process."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.batch_size, 3, self.image_size, self.image_size, generator=generator)

    def timm_model(self) -> Any:
        """timm's model from the folder, in evaluation mode."""
        make_torchvision_importable()
        import timm

        return touched(timm.create_model(f"local-dir:{self.folder}", pretrained=True).eval())


def write_model(name: str, image_size: int, folder: Path) -> None:
    """Write a timm model with random weights."""
    make_torchvision_importable()
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, img_size=image_size)
    timm.models.save_for_hf(model, folder, model_args={"img_size": image_size}, safe_serialization=True)


def touched(model: nn.Module) -> nn.Module:
    """Read all weights of a model, to bring those of a mapped file into memory."""
    for parameter in model.parameters():
        parameter.sum()
    return model


@contextmanager
def ours(case: Case, method: str) -> Iterator[Step]:
    """A method of `vitascope.explain`."""
    model = touched(from_pretrained(case.folder))
    yield partial(getattr(explain, method), model, case.images())


@contextmanager
def pytorch_grad_cam(case: Case) -> Iterator[Step]:
    """GradCAM of the predicted class, on the layer that its documentation recommends for ViTs."""
    model = case.timm_model()
    from pytorch_grad_cam import GradCAM  # imports torchvision, which timm_model makes possible

    def on_the_grid(tokens: Tensor) -> Tensor:  # (B, 1 + N, D) -> (B, D, gh, gw)
        return tokens[:, 1:].unflatten(1, model.patch_embed.grid_size).permute(0, 3, 1, 2)

    with GradCAM(model, [model.blocks[-1].norm1], reshape_transform=on_the_grid) as cam:
        yield partial(cam, case.images(), targets=None)


@contextmanager
def vit_explain(case: Case) -> Iterator[Step]:
    """Attention rollout as in Gildenblat's "vit-explain", for any batch.

    Hooks keep the output of each `attn_drop` on the CPU until the forward pass has ended. The product starts
    as the identity. Each layer multiplies it by the mean of the heads plus the identity, halved, with rows
    normalized to a sum of one. The map is the class token's row of the product.
    """
    model, images = case.timm_model(), case.images()
    kept: list[Tensor] = []  # (B, heads, T, T)
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, inputs, output: kept.append(output.cpu()))

    @torch.no_grad()
    def step() -> np.ndarray:
        kept.clear()
        model(images)
        result = identity = torch.eye(kept[0].shape[-1])
        for weights in kept:
            mixed = (weights.mean(dim=1) + identity) / 2  # (B, T, T)
            result = mixed / mixed.sum(dim=-1, keepdim=True) @ result
        heat = result[:, 0, 1:].unflatten(1, model.patch_embed.grid_size)
        return (heat / heat.amax(dim=(1, 2), keepdim=True)).numpy()

    yield step


PEERS: dict[str, tuple[str, Callable[[Case], AbstractContextManager[Step]]]] = {
    "rollout": ("vit-explain's algorithm", vit_explain),
    "grad_cam": ("pytorch-grad-cam", pytorch_grad_cam),
}
"""The peer of each method."""


@dataclasses.dataclass(frozen=True)
class First:
    """The maps and the memory of the first explanation in a fresh process."""

    maps: np.ndarray
    """(B, gh, gw), or (B, H, W)."""
    beyond: int
    """Peak resident memory in bytes, minus the resident memory with the model loaded."""
    total: int
    """Peak resident memory of the process in bytes."""


def first_explanation(prepare: Preparation) -> First:
    """Explain once in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(explain_once, prepare).result()


def explain_once(prepare: Preparation) -> First:
    """Run by `first_explanation` in the new process."""
    with prepare() as step:
        loading = peak_bytes()
        forget_peak()
        loaded = peak_bytes()
        maps = np.asarray(step(), dtype=np.float32)
        peak = peak_bytes()
    return First(maps, peak - loaded, max(loading, peak))


def peak_bytes() -> int:
    """The peak resident memory of this process since its start or `forget_peak`."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage on Linux starts with the parent's peak
        return 1024 * kib(status, "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Reset the peak, on Linux only; on macOS, the peak of loading hides smaller ones."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def kib(file: Path, name: str) -> int:
    """A value from a file in /proc with one name and value per line."""
    values = dict(line.split(":") for line in file.read_text(encoding="ascii").splitlines())
    return int(values[name].removesuffix("kB"))


def free_bytes() -> int:
    """Memory available without swapping, 0 if unknown."""
    meminfo = Path("/proc/meminfo")
    return 1024 * kib(meminfo, "MemAvailable") if meminfo.exists() else 0


def kept_bytes(case: Case) -> int:
    """The bytes of the weights that `vit_explain` keeps, and of the last layer's computation."""
    config = vit_at(case.folder).config
    return (config.depth + 2) * case.batch_size * config.num_heads * config.num_tokens**2 * 4


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference between maps scaled to 0 and 1, with ours enlarged to the size of theirs."""
    size = theirs.shape[1:]
    enlarged = F.interpolate(torch.from_numpy(scaled(ours))[:, None], size, mode="bilinear")[:, 0].numpy()
    return float(np.abs(scaled(enlarged) - scaled(theirs)).max())


def scaled(maps: np.ndarray) -> np.ndarray:
    """Scale each map of (B, gh, gw) to 0 and 1."""
    maps = maps - maps.min(axis=(1, 2), keepdims=True)
    return maps / maps.max(axis=(1, 2), keepdims=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One entrant's measurements of a method."""

    method: str
    who: str
    seconds: tuple[float, ...]
    """Seconds per image in each round."""
    first: First

    @property
    def time(self) -> float:
        """Seconds per image in the median round."""
        return statistics.median(self.seconds)


def entrants(case: Case, methods: Sequence[str], peers: Sequence[str]) -> list[tuple[str, str, Preparation]]:
    """Method, owner and preparation; for the methods in `peers`, the peer's comes before ours."""
    found: list[tuple[str, str, Preparation]] = []
    for method in methods:
        if method in peers:
            who, prepare = PEERS[method]
            found.append((method, who, partial(prepare, case)))
        found.append((method, OURS, partial(ours, case, method)))
    return found


def measure(
    case: Case, methods: Sequence[str], peers: Sequence[str], contest: Contest
) -> tuple[list[Measured], str]:
    """Compute first explanations, compare their maps, and run the rounds.

    Returns:
        The measurements, and a sentence about the differences of the maps.

    Raises:
        ValueError: the maps of a method differ, so the two cannot be compared.
    """
    title = f"{case.image_size} pixels, batch {case.batch_size}"
    competing = entrants(case, methods, peers)
    first = {}
    for method, who, prepare in competing:
        first[method, who] = first_explanation(prepare)
        note(f"{title}: {method} of {who} takes {megabytes(first[method, who].beyond)} MB beyond the model")
    agreement = "; ".join(agreement_of(method, first) for method in peers)
    note(agreement)
    results = contest.run(
        title,
        [
            Entrant(
                name=f"{method} of {who}",
                precision="fp32",
                dtype=torch.float32,
                prepare=prepare,
                images=case.batch_size,
                flops=0,  # the table has no share of the ceiling
            )
            for method, who, prepare in competing
        ],
    )
    measured = [
        Measured(
            method=method,
            who=who,
            seconds=tuple(seconds / case.batch_size for seconds in result.seconds),
            first=first[method, who],
        )
        for (method, who, _), result in zip(competing, results, strict=True)
    ]
    return measured, agreement


def agreement_of(method: str, first: dict[tuple[str, str], First]) -> str:
    """Describe the largest difference of our maps and the peer's.

    Raises:
        ValueError: they differ by more than rounding.
    """
    peer, _ = PEERS[method]
    found = difference(first[method, OURS].maps, first[method, peer].maps)
    if not found <= TOLERANCE:
        raise ValueError(f"{method}: the maps of {OURS} and {peer} differ by {found:.2g} of their range")
    return f"{method}: the maps of {OURS} and {peer} differ by at most {found:.1e} of their range"


HEADER = (
    "method",
    "implementation",
    "s/image",
    "fastest to slowest round",
    "speed",
    "beyond the model, MB",
    "memory",
    "in total, MB",
)

NOTES = f"""\
"speed": {OURS}'s over the peer's. "beyond the model": peak memory of the first explanation in a fresh
process, minus the resident memory with the model loaded. "memory": {OURS}'s over the peer's. "in total": peak
memory of this process, with Python, its libraries and the model. All have PyTorch's defaults for threads and
the allocator. pytorch-grad-cam also enlarges its maps to the image's size. vit-explain's algorithm runs
without timm's fused attention, which does not expose its weights."""


def table(measured: Sequence[Measured]) -> str:
    """One row per measurement; ours are compared with the peer's of the same method."""
    peers = {one.method: one for one in measured if one.who != OURS}
    rows = []
    for one in measured:
        speed = memory = "-"
        if one.who == OURS and one.method in peers:
            peer = peers[one.method]
            speed = ratio(peer.time, one.time)
            memory = ratio(one.first.beyond, peer.first.beyond)
        rows.append(
            (
                one.method,
                one.who,
                f"{one.time:.3f}",
                f"{min(one.seconds):.3f} to {max(one.seconds):.3f}",
                speed,
                megabytes(one.first.beyond),
                memory,
                megabytes(one.first.total),
            )
        )
    return markdown_table(HEADER, rows)


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f}"


def large(case: Case) -> str:
    """The section about one large image."""
    need, free = kept_bytes(case), free_bytes()
    fits = need + 2e9 < free  # the model, its activations, and a reserve
    peers = [method for method in PEERS if fits or method != "rollout"]
    with Contest(1, Timing(warmup=0, steps=1, seconds=0)) as contest:
        measured, agreement = measure(case, (*METHODS, "attention"), peers, contest)
    total = next(one.first.total for one in measured if (one.method, one.who) == ("rollout", OURS))
    left_out = (
        ""
        if fits
        else f"\n\nvit-explain's algorithm: not run. It would need {need / 1e9:.1f} GB besides the model; "
        f"{free / 1e9:.1f} GB were free."
    )
    return (
        f"## {case.image_size:,} pixels, one image\n\n{table(measured)}\n\n"
        f"Agreement before the timing: {agreement}. The peak of rollout's process was {total / 1e9:.2f} GB, "
        f"{'less' if total < LIMIT else 'not less'} than {LIMIT / 1e9:g} GB. "
        f"One round of one step, without warm-up.{left_out}"
    )


def parse() -> argparse.Namespace:
    parser = options(__doc__, rounds=3, warmup=1, steps=3)
    parser.add_argument(
        "--model", default="vit_base_patch16_224", help="timm's model name (default %(default)s)"
    )
    parser.add_argument("--size", type=positive, default=224, help="image size (default %(default)s)")
    parser.add_argument("--large", type=positive, default=1024, help="large image size (default %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    report = heading(f"Explanations on a CPU: {arguments.model}", arguments)
    report += f"\n- compared with: grad-cam {importlib.metadata.version('grad-cam')}"
    with tempfile.TemporaryDirectory() as folder:
        small, big = Path(folder) / "small", Path(folder) / "large"
        write_model(arguments.model, arguments.size, small)
        write_model(arguments.model, arguments.large, big)
        with Contest(arguments.rounds, timing_of(arguments)) as contest:
            for batch_size in BATCH_SIZES:
                case = Case(small, arguments.size, batch_size)
                measured, agreement = measure(case, METHODS, tuple(PEERS), contest)
                report += f"\n\n## {arguments.size} pixels, batch {batch_size}\n\n{table(measured)}\n\n"
                report += f"Agreement before the timing: {agreement}."
        report += f"\n\n{large(Case(big, arguments.large, 1))}"
    publish("explanations", f"{report}\n\n{NOTES}", arguments)


if __name__ == "__main__":
    main()
