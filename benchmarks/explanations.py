"""How fast, and in how much memory, ViT-B/16 is explained: beside pytorch-grad-cam and vit-explain's rollout.

    .venv/bin/python benchmarks/explanations.py [--out]

At 224 pixels, in batches of 1 and of 8, rollout stands beside vit-explain's algorithm and Grad-CAM beside
pytorch-grad-cam; gradient rollout, which neither tool has in this form, stands alone. At 1,024 pixels, one
image, rollout should stay below 4 GB, with everything that its process holds. All in fp32, from the same file
of timm's, with random weights. Before anything is timed the maps of both sides are compared: if they differ,
nothing is measured. Needs timm and grad-cam, and 14 GB for vit-explain's algorithm at 1,024 pixels, which is
left out where they are not free. About 12 minutes on 2 quiet cores.
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
from contestants import make_torchvision_importable
from reports import markdown_table, note, publish
from vitascope import explain
from vitascope.weights.loading import from_pretrained

METHODS = ("rollout", "grad_cam", "gradient_rollout")
BATCH_SIZES = (1, 8)
LIMIT = 4e9
"""Bytes that a process may hold that computes the rollout of a large image."""
TOLERANCE = 0.01
"""The largest difference between maps, scaled to 0 and 1, that can be rounding."""
OURS = "vitascope"


@dataclasses.dataclass(frozen=True)
class Case:
    """What is explained: a batch of random images, by a model in a folder that timm wrote."""

    folder: Path
    image_size: int
    batch_size: int

    def images(self) -> Tensor:
        """(B, 3, H, W), the same in every process."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.batch_size, 3, self.image_size, self.image_size, generator=generator)

    def timm_model(self) -> Any:
        """What timm makes of the folder, ready to predict."""
        make_torchvision_importable()
        import timm

        return touched(timm.create_model(f"local-dir:{self.folder}", pretrained=True).eval())


def write_model(name: str, image_size: int, folder: Path) -> None:
    """A model of timm's with random weights."""
    make_torchvision_importable()
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, img_size=image_size)
    timm.models.save_for_hf(model, folder, model_args={"img_size": image_size}, safe_serialization=True)


def touched(model: nn.Module) -> nn.Module:
    """A model all of whose weights are in memory: those of a mapped file are not, before they are read."""
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
    """GradCAM of the predicted class, on the layer that its documentation names for Vision Transformers."""
    model = case.timm_model()
    from pytorch_grad_cam import GradCAM  # imports torchvision, which timm_model makes possible

    def on_the_grid(tokens: Tensor) -> Tensor:  # (B, 1 + N, D) -> (B, D, gh, gw)
        return tokens[:, 1:].unflatten(1, model.patch_embed.grid_size).permute(0, 3, 1, 2)

    with GradCAM(model, [model.blocks[-1].norm1], reshape_transform=on_the_grid) as cam:
        yield partial(cam, case.images(), targets=None)


@contextmanager
def vit_explain(case: Case) -> Iterator[Step]:
    """Attention rollout as Gildenblat's "vit-explain" computes it, for any batch.

    Hooks catch what each `attn_drop` gives and keep it on the CPU until the forward pass has ended. Then from
    the identity, layer by layer: the mean of the heads plus the identity, halved, rows brought to a sum of
    one, times what came before; of the result the class token's row.
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
"""Whom we are compared with, by method."""


@dataclasses.dataclass(frozen=True)
class First:
    """What the first explanation in a fresh process gave, and took."""

    maps: np.ndarray
    """(B, gh, gw), or in the image's size."""
    beyond: int
    """Bytes by which the peak of resident memory exceeds what was resident with the model loaded."""
    total: int
    """Bytes resident at the peak of the process's life."""


def first_explanation(prepare: Preparation) -> First:
    """Explain once in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(explain_once, prepare).result()


def explain_once(prepare: Preparation) -> First:
    """What `first_explanation` runs in the new process."""
    with prepare() as step:
        loading = peak_bytes()
        forget_peak()
        loaded = peak_bytes()
        maps = np.asarray(step(), dtype=np.float32)
        peak = peak_bytes()
    return First(maps, peak - loaded, max(loading, peak))


def peak_bytes() -> int:
    """The peak of this process's resident memory, since it began or since `forget_peak`."""
    status = Path("/proc/self/status")
    if status.exists():  # the other way a new process on Linux begins with the peak of its parent
        return 1024 * kib(status, "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Let the peak begin anew; not on macOS, where what loading needed for a moment hides as much of it."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def kib(file: Path, name: str) -> int:
    """A value in one of the files of /proc that have a name and a value a line."""
    values = dict(line.split(":") for line in file.read_text(encoding="ascii").splitlines())
    return int(values[name].removesuffix("kB"))


def free_bytes() -> int:
    """Memory that can be taken without swapping; 0 where that cannot be known."""
    meminfo = Path("/proc/meminfo")
    return 1024 * kib(meminfo, "MemAvailable") if meminfo.exists() else 0


def kept_bytes(case: Case) -> int:
    """What `vit_explain` keeps, and two layers' scores and weights while the last is computed."""
    config = from_pretrained(case.folder).config
    return (config.depth + 2) * case.batch_size * config.num_heads * config.num_tokens**2 * 4


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference between maps scaled to 0 and 1; ours are enlarged to the size of theirs."""
    size = theirs.shape[1:]
    enlarged = F.interpolate(torch.from_numpy(scaled(ours))[:, None], size, mode="bilinear")[:, 0].numpy()
    return float(np.abs(scaled(enlarged) - scaled(theirs)).max())


def scaled(maps: np.ndarray) -> np.ndarray:
    """Each of (B, gh, gw) from 0 to 1."""
    maps = maps - maps.min(axis=(1, 2), keepdims=True)
    return maps / maps.max(axis=(1, 2), keepdims=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One entrant's method."""

    method: str
    who: str
    seconds: tuple[float, ...]
    """An image's, in each round."""
    first: First

    @property
    def time(self) -> float:
        """Seconds an image in the median round."""
        return statistics.median(self.seconds)


def entrants(case: Case, methods: Sequence[str], peers: Sequence[str]) -> list[tuple[str, str, Preparation]]:
    """Method, whose, and how; of the methods in `peers` the peer's comes before ours."""
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
    """First explanations, their agreement in a sentence, and then the rounds.

    Raises:
        ValueError: the maps of a method differ, so that the comparison would be none.
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
                flops=0,  # no share of the machine's is told
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
    """How much our maps and the peer's differ, in words.

    Raises:
        ValueError: by more than rounding.
    """
    peer, _ = PEERS[method]
    found = difference(first[method, OURS].maps, first[method, peer].maps)
    if not found <= TOLERANCE:
        raise ValueError(f"{method}: the maps of {OURS} and {peer} differ by {found:.2g} of their range")
    return f"{method}: {OURS}'s and {peer}'s maps differ by at most {found:.1e} of their range"


HEADER = (
    "method",
    "whose",
    "s an image",
    "fastest to slowest round",
    "speed",
    "beyond the model, MB",
    "memory",
    "in total, MB",
)

NOTES = f"""\
"speed": {OURS}'s over the peer's. "beyond the model": what the first explanation in a fresh process adds, at
its peak, to the memory that is resident with the model loaded. "memory": {OURS}'s over the peer's. "in
total": the most that this process ever held, with Python, its libraries and the model. Everybody has
PyTorch's defaults for threads and the allocator. pytorch-grad-cam also enlarges its maps to the image's size.
For vit-explain's algorithm timm's fused attention is off, without which there are no weights to catch."""


def table(measured: Sequence[Measured]) -> str:
    """A row for each; ours are compared with the peer's of the same method."""
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
    fits = need + 2e9 < free  # the model, its activations, and something to spare
    peers = [method for method in PEERS if fits or method != "rollout"]
    with Contest(1, Timing(warmup=0, steps=1, seconds=0)) as contest:
        measured, agreement = measure(case, (*METHODS, "attention"), peers, contest)
    total = next(one.first.total for one in measured if (one.method, one.who) == ("rollout", OURS))
    left_out = (
        ""
        if fits
        else f"\n\nvit-explain's algorithm: not run. It would need {need / 1e9:.1f} GB and the model; "
        f"{free / 1e9:.1f} GB were free."
    )
    return (
        f"## {case.image_size:,} pixels, one image\n\n{table(measured)}\n\nBefore the timing, {agreement}. "
        f"Rollout's process held {total / 1e9:.2f} GB at its peak, "
        f"{'less' if total < LIMIT else 'not less'} than {LIMIT / 1e9:g} GB. "
        f"One round of one step, with none before it to warm up.{left_out}"
    )


def parse() -> argparse.Namespace:
    parser = options(__doc__, rounds=3, warmup=1, steps=3)
    parser.add_argument("--model", default="vit_base_patch16_224", help="timm's name (default %(default)s)")
    parser.add_argument("--size", type=positive, default=224, help="image size (default %(default)s)")
    parser.add_argument("--large", type=positive, default=1024, help="the large one (default %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    report = heading(f"Explanations on a CPU: {arguments.model}", arguments)
    report += f"\n- beside: grad-cam {importlib.metadata.version('grad-cam')}"
    with tempfile.TemporaryDirectory() as folder:
        small, big = Path(folder) / "small", Path(folder) / "large"
        write_model(arguments.model, arguments.size, small)
        write_model(arguments.model, arguments.large, big)
        with Contest(arguments.rounds, timing_of(arguments)) as contest:
            for batch_size in BATCH_SIZES:
                case = Case(small, arguments.size, batch_size)
                measured, agreement = measure(case, METHODS, tuple(PEERS), contest)
                report += f"\n\n## {arguments.size} pixels, batch {batch_size}\n\n{table(measured)}\n\n"
                report += f"Before the timing, {agreement}."
        report += f"\n\n{large(Case(big, arguments.large, 1))}"
    publish("explanations", f"{report}\n\n{NOTES}", arguments)


if __name__ == "__main__":
    main()
