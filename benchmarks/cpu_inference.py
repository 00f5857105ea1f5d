"""Compare the throughput of ViT-B/16 on this CPU: ours, timm's, transformers' and torchvision's.

    .venv/bin/python benchmarks/cpu_inference.py [--model MODEL --data FOLDER] [--exported FILE ...] [--out]

ViT-B/16 at 224 pixels, batches of 1 and 8, in fp32 and bf16. Ours is `TorchEngine.probabilities`, with an
extra row for the precision that `auto` chooses. It takes bytes, so its time includes normalization and
softmax. The peers are the bare models on images that are already normalized and in their dtype. Without
--model, every entrant has random weights of its own and 1,000 classes; with a model folder, all have its
weights. --data, any labelled images for `vitascope evaluate`, adds each of our entrants' agreement with fp32
and its top-1 accuracy. --exported adds files of `vitascope export --input tensors`, for example in int8.
`benchmarks/grow.py` makes a trained ViT-B/16. The script takes about 4 minutes on 2 idle cores.
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

from conditions import PEERS, installed_peers
from contest import (
    Contest,
    Entrant,
    Result,
    comparison_table,
    heading,
    matmul_entrants,
    missing_peers,
    options,
    positive,
    ratio,
    timing_of,
)
from contestants import inference_entrants, peer_inference_entrant, write_peer_weights
from exported import RUNTIMES, exported_engine, exported_entrant
from reports import markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.models.config import ViTConfig
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.engine import Engine
from vitascope.models.engines.runtimes import open_engine
from vitascope.models.hardware import bf16_units
from vitascope.models.sizes import named_config
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.loading import from_pretrained

BATCH_SIZES = (1, 8)
AGREEMENT_BATCH = 8

NOTES = """\
"of timm": images per second over timm's in the same dtype. "of the ceiling": operations per second of the
model's matrix products, counted for every token through every block, over those of the fastest matrix product
in the same dtype. Ours is `TorchEngine.probabilities`: bytes in, probabilities out, with an allocator that
keeps freed memory, as in `vitascope predict`. The exported files do the same, each in its own runtime. The
peers compute logits of normalized images in their dtype, under torch.inference_mode, with PyTorch's defaults,
except in the row with our allocator setting. Without that setting, the layout of the heap decides whether a
process has page faults for the same memory in every pass: on another machine, ours computed 28 to 31 images/s
at batch 8 in some processes and 37 in others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The model and the weights of the entrants."""

    config: ViTConfig
    model: str | None
    """A MODEL argument; None for random weights."""
    weights: dict[str, Path]
    """The same weights for each peer."""
    exported: dict[Path, str]
    """Exported files of the model, with their precision."""

    def entrants(self, batch_size: int) -> list[Entrant]:
        """All entrants: peers, ours, exported files, matrix products."""
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
            found += matmul_entrants({"int8": torch.int8})
        return found + matmul_entrants()


def precision_of(file: Path) -> str:
    """The precision of an exported file: its own, or bf16 if OpenVINO computes in that."""
    if exported_engine(file, "auto").stored_precision == "int8":
        return "int8"
    return "bf16" if file.suffix == ".xml" and bf16_units() is not None else "fp32"


def exported_name(file: Path) -> str:
    """The runtime of an exported file."""
    return f"vitascope, {RUNTIMES[file.suffix][0]}"


def claims(results: Sequence[Result]) -> list[str]:
    """The results of the table in a list, one line each."""
    rates = {(result.entrant.name, result.entrant.precision): result.images_per_second for result in results}
    peers = {peer: rates[peer, "bf16"] for peer in PEERS if (peer, "bf16") in rates}
    auto = rates["vitascope", "auto"]
    lines = (
        [f"auto is {ratio(auto, rates['timm', 'fp32'])} times as fast as timm's default, fp32"]
        if "timm" in peers
        else []
    )
    if peers:
        best = max(peers, key=lambda peer: peers[peer])
        lines.append(f"auto is {ratio(auto, peers[best])} times as fast as the best peer in bf16, {best}")
    products = {dtype: max_flops(results, dtype) for dtype in (torch.float32, torch.bfloat16)}
    lines.append(
        "this machine's matrix products are "
        f"{products[torch.bfloat16] / products[torch.float32]:.2f} times as fast in bf16 as in fp32"
    )
    for (name, precision), found in rates.items():
        if precision == "int8" and "timm" in peers and not name.startswith("matmul"):
            lines.append(f"{name} in int8 is {ratio(found, peers['timm'])} times as fast as timm in bf16")
    return [f"- {line}" for line in lines]


def max_flops(results: Sequence[Result], dtype: torch.dtype) -> float:
    """The fastest matrix product's operations per second."""
    return max(r.flops_per_second for r in results if not r.entrant.images and r.entrant.dtype == dtype)


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Labelled images of the model's classes."""

    sources: list[ImageSource]
    labels: np.ndarray

    @classmethod
    def of(cls, data: str, count: int) -> Pictures:
        """Draw `count` test images of a data set, evenly spaced."""
        images = open_data(data).test
        if images is None:
            raise SystemExit(f"{data} has no test images")
        chosen = np.linspace(0, len(images) - 1, min(count, len(images))).astype(int)
        return cls([images.sources[index] for index in chosen], np.asarray(images.labels)[chosen])


def agreement_table(case: Case, pictures: Pictures) -> str:
    """The agreement of our entrants and the exported files with our fp32, and their top-1 accuracy."""
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
        note(f"{name}: {len(pictures.sources)} images")
        answers[name] = top_classes(engine, pictures.sources)
    reference = answers["vitascope fp32"]
    rows = [
        (name, f"{np.mean(found == reference):.1%}", f"{np.mean(found == pictures.labels):.1%}")
        for name, found in answers.items()
    ]
    table = markdown_table(("entrant", "agreement with our fp32", "top-1 accuracy"), rows)
    return f"## On {len(pictures.sources)} labelled images\n\n{table}"


def top_classes(engine: Engine, sources: Sequence[ImageSource]) -> np.ndarray:
    """The most probable class of each image (N,)."""
    found = []
    for start in range(0, len(sources), AGREEMENT_BATCH):
        pixels = [engine.pixels(source) for source in sources[start : start + AGREEMENT_BATCH]]
        found.append(engine.predict(pixels).probabilities.argmax(dim=1).numpy())
    return np.concatenate(found)


def case_of(arguments: argparse.Namespace, folder: Path) -> Case:
    """Build the case from the options; writes the peers' weights into the folder."""
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
    """Parse the command line; --data and --exported need --model."""
    parser = options(__doc__, rounds=3, warmup=1, steps=4)
    parser.add_argument("--model", help="a MODEL with the weights for all entrants (default: random)")
    parser.add_argument("--data", help="labelled images of the model's classes")
    parser.add_argument("--images", type=positive, default=200, help="images, at most (default 200)")
    parser.add_argument(
        "--exported", nargs="+", type=Path, default=[], metavar="FILE", help="exported files of the model"
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
    weights = "Each has random weights of its own." if case.model is None else "All have the same weights."
    publish("cpu_inference", f"{report}\n\n{missing_peers(PEERS)}{NOTES} {weights}", arguments)


if __name__ == "__main__":
    main()
