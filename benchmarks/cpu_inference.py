"""How fast ViT-B/16 classifies on this CPU: ours beside timm's, transformers' and torchvision's.

    .venv/bin/python benchmarks/cpu_inference.py [--model MODEL --data FOLDER] [--exported FILE ...] [--out]

ViT-B/16 at 224 pixels, batches of 1 and of 8, in fp32 and bf16. Ours is `TorchEngine.probabilities`, with a
row for the precision that `auto` chooses: it takes bytes, and the time holds their normalization and the
softmax. The peers are the bare models on images that are normalized and in their dtype already. Without
--model every entrant has random weights of its own, and 1,000 classes; with it, a model folder, all have its
weights. --data, labelled pictures that `vitascope evaluate` takes, adds how often each of ours gives the
class that fp32 gives, and how often the right one; --exported adds files that `vitascope export --input
pixels` made of the model, int8 among them. `benchmarks/grow.py` makes a trained ViT-B/16. About 4 minutes on
2 quiet cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from contest import (
    PEERS,
    Contest,
    Entrant,
    Result,
    comparison_table,
    heading,
    installed_peers,
    matmul_entrants,
    missing_peers,
    options,
    positive,
    ratio,
    timing_of,
)
from contestants import inference_entrants, peer_inference_entrant, write_peer_weights
from exported import RUNTIMES, exported_engine, exported_entrant, int8_matmul_entrants
from reports import markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.data.decoding import ImageSource
from vitascope.deploy.predict.engine import Engine
from vitascope.deploy.predict.runtimes import open_engine
from vitascope.model.config import ViTConfig
from vitascope.model.hardware import bf16_units
from vitascope.model.sizes import named_config
from vitascope.model.vit import VisionTransformer
from vitascope.weights.loading import from_pretrained

BATCH_SIZES = (1, 8)
AGREEMENT_BATCH = 8

NOTES = """\
"of timm": times timm's images per second in the same dtype. "of the ceiling": operations of the model's
matrix products, counted for every token through every block, over those of the fastest matrix product in
the same dtype. Ours is `TorchEngine.probabilities`: bytes in, probabilities out, with an allocator that
keeps freed memory, as `vitascope predict` has; so are the exported files, each in its own runtime. The peers
get normalized images in their dtype and give logits, under torch.inference_mode, with PyTorch's defaults, but
for the row that says otherwise. Without that setting a process may, by the luck of its heap, fault in the
same memory in every pass: on another machine ours then made 28 to 31 images/s at batch 8 in some processes
and 37 in others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Which weights compete."""

    config: ViTConfig
    model: str | None
    """A MODEL argument; None for random weights."""
    weights: dict[str, Path]
    """The same weights for each peer."""
    exported: dict[Path, str]
    """Files made of the model, and the precision of each."""

    def entrants(self, batch_size: int) -> list[Entrant]:
        """Everybody: peers, ours, exported files, matrix products."""
        peers = installed_peers()
        by_peer = functools.partial(peer_inference_entrant, config=self.config, batch_size=batch_size)
        found = [
            by_peer(peer, precision=precision, weights=self.weights.get(peer))
            for peer in peers
            for precision in ("fp32", "bf16")
        ]
        if "timm" in peers:
            found.append(
                by_peer("timm", precision="bf16", our_allocator=True, weights=self.weights.get("timm"))
            )
        found += inference_entrants(self.config, batch_size, ("fp32", "bf16", "auto"), self.model)
        found += [
            exported_entrant(file, precision, self.config, batch_size)
            for file, precision in self.exported.items()
        ]
        if "int8" in self.exported.values():
            found += int8_matmul_entrants()
        return found + matmul_entrants()


def precision_of(file: Path) -> str:
    """What an exported file is measured in: as it is, or in bf16 where OpenVINO computes in that."""
    if exported_engine(file, "auto").stored_precision == "int8":
        return "int8"
    return "bf16" if file.suffix == ".xml" and bf16_units() is not None else "fp32"


def exported_name(file: Path) -> str:
    """The runtime of an exported file."""
    return f"vitascope, {RUNTIMES[file.suffix][0]}"


def claims(results: Sequence[Result]) -> list[str]:
    """What the table comes to, a line each."""
    rates = {(result.entrant.name, result.entrant.precision): result.images_per_second for result in results}
    peers = {peer: rates[peer, "bf16"] for peer in PEERS if (peer, "bf16") in rates}
    auto = rates["vitascope", "auto"]
    lines = (
        [f"auto is {ratio(auto, rates['timm', 'fp32'])} times timm's default, fp32"]
        if "timm" in peers
        else []
    )
    if peers:
        best = max(peers, key=lambda peer: peers[peer])
        lines.append(f"auto is {ratio(auto, peers[best])} times the best peer in bf16, {best}")
    products = {dtype: max_flops(results, dtype) for dtype in (torch.float32, torch.bfloat16)}
    lines.append(
        "this machine's matrix products are "
        f"{products[torch.bfloat16] / products[torch.float32]:.2f} times as fast in bf16 as in fp32"
    )
    for (name, precision), found in rates.items():
        if precision == "int8" and "timm" in peers and not name.startswith("matmul"):
            lines.append(f"{name} in int8 is {ratio(found, peers['timm'])} times timm's bf16")
    return [f"- {line}" for line in lines]


def max_flops(results: Sequence[Result], dtype: torch.dtype) -> float:
    """The fastest matrix product's operations a second."""
    return max(r.flops_per_second for r in results if not r.entrant.images and r.entrant.dtype == dtype)


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Labelled pictures of the model's classes."""

    sources: list[ImageSource]
    labels: np.ndarray

    @classmethod
    def of(cls, data: str, count: int) -> Pictures:
        """As many test images of a data set, evenly drawn."""
        images = open_data(data).test
        if images is None:
            raise SystemExit(f"{data} has no test images")
        chosen = np.linspace(0, len(images) - 1, min(count, len(images))).astype(int)
        return cls([images.sources[index] for index in chosen], np.asarray(images.labels)[chosen])


def agreement_table(case: Case, pictures: Pictures) -> str:
    """How often each of ours and each file gives the class of our fp32, and the right one."""
    assert case.model is not None
    engines: dict[str, Engine] = {
        f"vitascope {precision}": open_engine(case.model, precision=precision, device="cpu")
        for precision in ("fp32", "bf16", "auto")
    }
    engines |= {
        f"{exported_name(file)} {precision}": exported_engine(file, precision)
        for file, precision in case.exported.items()
    }
    answers = {}
    for name, engine in engines.items():
        note(f"{name}: {len(pictures.sources)} pictures")
        answers[name] = top_classes(engine, pictures.sources)
    reference = answers["vitascope fp32"]
    rows = [
        (name, f"{np.mean(found == reference):.1%}", f"{np.mean(found == pictures.labels):.1%}")
        for name, found in answers.items()
    ]
    table = markdown_table(("entrant", "top-1 as our fp32", "right"), rows)
    return f"## On {len(pictures.sources)} real pictures\n\n{table}"


def top_classes(engine: Engine, sources: Sequence[ImageSource]) -> np.ndarray:
    """The most probable class of each picture (N,)."""
    found = []
    for start in range(0, len(sources), AGREEMENT_BATCH):
        pixels = [engine.pixels(source) for source in sources[start : start + AGREEMENT_BATCH]]
        found.append(engine.predict(pixels).argmax(dim=1).numpy())
    return np.concatenate(found)


def case_of(arguments: argparse.Namespace, folder: Path) -> Case:
    """What the options say; the peers' weights are written to the folder."""
    if arguments.model is None:
        config = named_config("vit_b16")
        assert isinstance(config, ViTConfig)
        return Case(config=config, model=None, weights={}, exported={})
    model = from_pretrained(arguments.model)
    assert isinstance(model, VisionTransformer)
    weights = {peer: write_peer_weights(model, peer, folder) for peer in installed_peers()}
    exported = {file: precision_of(file) for file in arguments.exported}
    return Case(config=model.config, model=arguments.model, weights=weights, exported=exported)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; --data and --exported are of a --model."""
    parser = options(__doc__, rounds=3, warmup=1, steps=4)
    parser.add_argument("--model", help="a MODEL argument, the weights of all entrants (default: random)")
    parser.add_argument("--data", help="labelled pictures of the model's classes")
    parser.add_argument("--images", type=positive, default=200, help="pictures at most (default 200)")
    parser.add_argument(
        "--exported", nargs="+", type=Path, default=[], metavar="FILE", help="files made of the model"
    )
    arguments = parser.parse_args(words)
    if arguments.model is None and (arguments.data or arguments.exported):
        parser.error("--data and --exported need --model")
    return arguments


def main() -> None:
    arguments = parse()
    report = heading("Inference on a CPU: ViT-B/16 at 224 pixels", arguments)
    pictures = Pictures.of(arguments.data, arguments.images) if arguments.data else None
    with tempfile.TemporaryDirectory() as folder:
        case = case_of(arguments, Path(folder))
        with Contest(arguments.rounds, timing_of(arguments)) as contest:
            for batch_size in BATCH_SIZES:
                results = contest.run(f"batch {batch_size}", case.entrants(batch_size))
                lines = "\n".join(claims(results))
                report += f"\n\n## Batch {batch_size}\n\n{comparison_table(results)}\n\n{lines}"
        if pictures is not None:
            report += f"\n\n{agreement_table(case, pictures)}"
    weights = "Random weights, each its own." if case.model is None else "All have the same weights."
    publish("cpu_inference", f"{report}\n\n{missing_peers(PEERS)}{NOTES} {weights}", arguments)


if __name__ == "__main__":
    main()
