"""How much faster a ViT-B/16 is in int8 on this CPU, and how often it still gives the same answer.

    .venv/bin/python benchmarks/int8.py [MODEL --data FOLDER] [--out]

MODEL is a trained ViT-B/16 (`benchmarks/grow.py` makes one without a download) and FOLDER its pictures, in a
folder for each class; without them the weights are random, and agreement says little. The model is exported
to OpenVINO and ONNX, quantized on training pictures, and timed beside timm's, transformers' and torchvision's
at batches of 1 and 8, every entrant in a process of its own, in interleaved rounds. About 15 minutes on 2
quiet cores, most of them for the quantization.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from contest import (
    PEERS,
    Ceiling,
    Contest,
    Entrant,
    Result,
    heading,
    installed_peers,
    matmul_entrants,
    missing_peers,
    options,
    positive,
    rate,
    ratio,
    timing_of,
)
from contestants import inference_entrants, peer_inference_entrant
from exported import exported_engine, exported_entrant, int8_matmul_entrants
from reports import markdown_table, note, publish
from vitascope.cli.quantizing import pictures_for_int8
from vitascope.data.splits import ImageSet
from vitascope.deploy.agreement import sample_pictures
from vitascope.deploy.engine import Engine, TorchEngine
from vitascope.deploy.export import export
from vitascope.deploy.quantize import Quantization, quantize
from vitascope.model.classifier import build
from vitascope.model.config import ViTConfig
from vitascope.model.sizes import named_config
from vitascope.weights.store import Loaded, default_preprocess, load_pretrained

BATCH_SIZES = (1, 8)
FORMATS = {".xml": "openvino", ".onnx": "onnx"}
FILES = ((".xml", "fp32"), (".xml", "bf16"), (".xml", "int8"), (".onnx", "fp32"), (".onnx", "int8"))
"""Ending and precision of what is timed; bf16 is the runtime's, of the fp32 file."""

NOTES = """\
"of timm's bf16": times timm's images per second in bf16. "of the ceiling": operations of the model's matrix
products, counted for every token through every block, over those of the fastest matrix product in the same
dtype, which for int8 is torch's. Ours take bytes and give probabilities; the peers get normalized images in
their dtype and give logits, under torch.inference_mode. "agreement": how often the most probable class is
that of the model in fp32."""


@dataclasses.dataclass(frozen=True)
class Files:
    """A model, and the exported files of it in a folder."""

    loaded: Loaded
    folder: Path

    def path(self, suffix: str, precision: str) -> Path:
        """The file that an entrant opens."""
        return self.folder / f"{'int8' if precision == 'int8' else 'fp32'}{suffix}"

    def write(self, calibration: Sequence[object], test: ImageSet, images: int) -> dict[str, Quantization]:
        """Export and quantize; by ending. However much accuracy goes, it is measured here and not refused."""
        done = {}
        for suffix, format in FORMATS.items():
            note(f"exporting and quantizing for {format}")
            model, fit = self.loaded.model, self.loaded.preprocess
            export(model, fit, self.path(suffix, "fp32"), format=format, takes="pixels")
            done[suffix] = quantize(
                self.path(suffix, "fp32"),
                self.path(suffix, "int8"),
                calibration=calibration,
                test=test,
                calibration_images=images,
                max_drop=1.0,
            )
        return done

    def engines(self) -> dict[tuple[str, str], Engine]:
        """Ours by the name and the precision of their entrants."""
        found: dict[tuple[str, str], Engine] = {
            ("vitascope", precision): TorchEngine(
                self.loaded.model, self.loaded.preprocess, precision=precision, device="cpu"
            )
            for precision in ("fp32", "bf16", "auto")
        }
        for suffix, precision in FILES:
            path = self.path(suffix, precision)
            name = exported_entrant(path, precision, self.loaded.model.config, 1).name
            found[name, precision] = exported_engine(path, precision)
        return found


def agreements(files: Files, test: ImageSet, batch_size: int) -> dict[tuple[str, str], float]:
    """How often each of ours gives the class that the model gives in fp32."""
    engines = files.engines()
    pixels = torch.stack([torch.from_numpy(files.loaded.preprocess.pixels(image)) for image in test.sources])
    answers: dict[tuple[str, str], torch.Tensor] = {}
    for key, engine in engines.items():
        note(f"agreement of {' '.join(key)}")
        answers[key] = torch.cat(
            [engine.probabilities(part).argmax(dim=1) for part in pixels.split(batch_size)]
        )
    exact = answers["vitascope", "fp32"]
    return {key: float((answer == exact).float().mean()) for key, answer in answers.items()}


def entrants(files: Files, batch_size: int) -> list[Entrant]:
    """timm in fp32 and bf16, the other peers in bf16, ours in torch, and ours exported."""
    config = files.loaded.model.config
    peers = installed_peers()
    found = [peer_inference_entrant(peer, config, batch_size, "bf16") for peer in peers]
    if "timm" in peers:
        found.insert(0, peer_inference_entrant("timm", config, batch_size, "fp32"))
    found += inference_entrants(config, batch_size, ("auto",))
    for suffix, precision in FILES:
        found.append(exported_entrant(files.path(suffix, precision), precision, config, batch_size))
    return found


HEADER = (
    *("entrant", "precision", "img/s", "slowest to fastest round"),
    *("of timm's bf16", "of the ceiling", "agreement"),
)


def table(results: Sequence[Result], agreement: dict[tuple[str, str], float]) -> str:
    """A row for each; `results` hold those of the matrix products too."""
    ceiling = Ceiling.among(results)
    models = [result for result in results if result.entrant.images]
    timm = {r.entrant.precision: r.images_per_second for r in models if r.entrant.name == "timm"}.get("bf16")
    rows = []
    for result in models:
        entrant = result.entrant
        share = agreement.get((entrant.name, entrant.precision))
        rows.append(
            (
                entrant.name,
                entrant.precision_label,
                rate(result.images_per_second),
                result.spread,
                ratio(result.images_per_second, timm),
                ceiling.share(result),
                "-" if share is None else f"{share:.1%}",
            )
        )
    return f"{markdown_table(HEADER, rows)}\n\nMatmul ceiling: {ceiling.describe()}."


def accuracies(done: dict[str, Quantization]) -> str:
    """What each int8 file's own measurement on labelled pictures says."""
    rows = []
    for suffix, quantization in done.items():
        found = quantization.comparison
        rows.append(
            (
                FORMATS[suffix],
                f"{found.before.correct / found.images:.2%}",
                f"{found.after.correct / found.images:.2%}",
                f"{found.agreement:.2%}",
                f"{found.images:,}",
                f"{found.before.size / 1e6:,.0f}",
                f"{found.after.size / 1e6:,.0f}",
            )
        )
    header = ("format", "fp32 right", "int8 right", "agreement", "images", "fp32 MB", "int8 MB")
    return markdown_table(header, rows)


def random_model() -> Loaded:
    """A ViT-B/16 that knows nothing."""
    config = named_config("vit_b16")
    return Loaded(build(config).eval(), default_preprocess(config), "random")


def random_pictures(loaded: Loaded) -> tuple[list[object], ImageSet]:
    """Parts of two photographs, labelled with the first class."""
    pictures = list(sample_pictures())
    return pictures, ImageSet("sample", pictures, np.zeros(len(pictures), dtype=np.int64), ())


def some(images: ImageSet, count: int) -> ImageSet:
    """As many images of a set, drawn by seed."""
    places = np.sort(np.random.default_rng(0).permutation(len(images))[:count])
    return images.subset(images.name, places)


def parse() -> argparse.Namespace:
    parser = options(__doc__, rounds=3, warmup=1, steps=4)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a trained ViT (default: random weights)")
    parser.add_argument("--data", help="its pictures (default: those that a run was trained on)")
    parser.add_argument("--images", type=positive, default=1000, help="to measure on (default %(default)s)")
    parser.add_argument(
        "--calibration-images", type=positive, default=300, help="to take ranges from (default %(default)s)"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    report = heading("int8 on a CPU", arguments)
    if arguments.model is None:
        loaded = random_model()
        calibration, test = random_pictures(loaded)
        whose = "random weights, and parts of two photographs: agreement and accuracy mean little"
    else:
        loaded = load_pretrained(arguments.model)
        names = loaded.model.config.class_names
        calibration, test = pictures_for_int8(arguments.model, names, arguments.data, None)
        test = some(test, arguments.images)
        whose = f"{Path(arguments.model).name}, trained; {len(test):,} {test.name} images"
    assert isinstance(loaded.model.config, ViTConfig)
    report += f"\n- model: {whose}; {loaded.model.config.summary}"
    with tempfile.TemporaryDirectory() as folder:
        files = Files(loaded, Path(folder))
        done = files.write(calibration, test, arguments.calibration_images)
        report += f"\n\n## Accuracy\n\n{accuracies(done)}"
        agreement = agreements(files, test, batch_size=8)
        with Contest(arguments.rounds, timing_of(arguments)) as contest:
            for batch_size in BATCH_SIZES:
                products = [*matmul_entrants(), *int8_matmul_entrants()]
                results = contest.run(f"batch {batch_size}", [*entrants(files, batch_size), *products])
                report += f"\n\n## Batch {batch_size}\n\n{table(results, agreement)}"
    publish("int8", f"{report}\n\n{missing_peers(PEERS)}{NOTES}", arguments)


if __name__ == "__main__":
    main()
