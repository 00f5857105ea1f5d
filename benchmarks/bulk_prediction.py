"""Compare the throughput of predicting a folder of small JPEG files with that of the bare model.

End to end is `vitascope predict MODEL FOLDER --out FILE.jsonl` once the model is loaded: find the files,
read, decode and resize them in workers, compute, rank, write. Bare is `Engine.probabilities` on the same
pixels in memory, in batches of the same size, with the same threads. The rounds are interleaved (bare, end to
end, bare, end to end, ...), and the share is computed within each round, so a change in the machine's speed
affects both. Reading alone is the throughput of the workers without a model: the ceiling for a model that
takes no time.

    python benchmarks/bulk_prediction.py                            # on generated JPEG files
    python benchmarks/bulk_prediction.py --data cifar10/test --models vit_s/4 runs/cifar10
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vitascope as vs
from conditions import Conditions
from contest import positive, rate
from reports import command_line, markdown_table, note, publish
from vitascope.data.reading import file_pool
from vitascope.data.stored import ImageFile
from vitascope.model.hardware import reuse_freed_memory
from vitascope.predict.engine import Engine, TorchEngine
from vitascope.predict.predictor import Predictor, find_images
from vitascope.predict.result_file import ResultFile
from vitascope.predict.runtimes import open_engine

SIZE = 32
BUILT = {"vit_ti/4": "vit_ti16", "vit_s/4": "vit_s16"}
"""Models built here, with patches of 4 and random weights, which do not affect the time."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A model's seconds for all images in each round."""

    model: str
    images: int
    bare: list[float]
    whole: list[float]
    reading: list[float]

    @property
    def share(self) -> float:
        """End-to-end throughput over the bare model's, the median of the rounds."""
        return statistics.median(bare / whole for bare, whole in zip(self.bare, self.whole, strict=True))


def engine_of(model: str) -> Engine:
    """The engine of a name in BUILT or of a MODEL argument."""
    if model not in BUILT:
        return open_engine(model)
    built = vs.create_model(BUILT[model], image_size=SIZE, patch_size=4, num_classes=10)
    return TorchEngine(built)


def make_pictures(root: Path, count: int) -> Path:
    """Write JPEG files of 32 x 32 pixels, quality 90: smooth random fields, a thousand per folder."""
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        path = root / f"{number // 1000:03}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(path, quality=90)
    return root


def bare_seconds(engine: Engine, pixels: torch.Tensor, batch_size: int) -> float:
    start = time.perf_counter()
    for batch in pixels.split(batch_size):
        engine.probabilities(batch)
    return time.perf_counter() - start


def whole_seconds(engine: Engine, folder: Path, images: int, arguments: argparse.Namespace) -> float:
    """Seconds from listing the folder to the last line on the disk."""
    predictor = Predictor(engine, batch_size=arguments.batch_size)
    with tempfile.TemporaryDirectory() as scratch, ResultFile(Path(scratch) / "o.jsonl", engine) as file:
        start = time.perf_counter()
        paths = itertools.islice(find_images([folder]), images)
        for answer in predictor.stream(paths, workers=arguments.workers):
            file.write(answer)
        file.finish()
        seconds = time.perf_counter() - start
        assert (file.tally.images, file.tally.unreadable) == (images, 0)
    return seconds


def reading_seconds(engine: Engine, paths: Sequence[ImageFile], arguments: argparse.Namespace) -> float:
    start = time.perf_counter()
    pool = file_pool(engine.preprocess, arguments.batch_size, arguments.workers or os.cpu_count() or 1)
    size = arguments.batch_size
    for _ in pool.read(paths[at : at + size] for at in range(0, len(paths), size)):
        pass
    pool.close()
    return time.perf_counter() - start


def measure(model: str, folder: Path, arguments: argparse.Namespace) -> Measured:
    engine = engine_of(model)
    paths = list(itertools.islice(find_images([folder]), arguments.images))
    pixels = torch.from_numpy(np.stack([engine.pixels(path) for path in paths]))
    measured = Measured(model, len(paths), [], [], [])
    for _ in range(2):  # warm up
        bare_seconds(engine, pixels[: 4 * arguments.batch_size], arguments.batch_size)
    for number in range(1, arguments.rounds + 1):
        measured.bare.append(bare_seconds(engine, pixels, arguments.batch_size))
        measured.whole.append(whole_seconds(engine, folder, len(paths), arguments))
        measured.reading.append(reading_seconds(engine, paths, arguments))
        note(
            f"{model}, round {number}/{arguments.rounds}: bare {measured.bare[-1]:.1f} s, "
            f"end to end {measured.whole[-1]:.1f} s, reading alone {measured.reading[-1]:.1f} s"
        )
    return measured


def table(results: Sequence[Measured]) -> str:
    """Images per second, medians over the rounds."""
    rows = []
    for found in results:
        shares = [bare / whole for bare, whole in zip(found.bare, found.whole, strict=True)]
        speeds = [
            rate(found.images / statistics.median(times))
            for times in (found.bare, found.whole, found.reading)
        ]
        rows.append((found.model, *speeds, f"{found.share:.0%}", f"{min(shares):.0%} to {max(shares):.0%}"))
    header = (
        "model",
        "bare img/s",
        "end to end img/s",
        "reading alone img/s",
        "share",
        "lowest to highest share",
    )
    return markdown_table(header, rows)


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="folder of images (default: generated JPEG files)")
    parser.add_argument("--images", type=positive, default=10_000, help="images, at most (default 10000)")
    parser.add_argument(
        "--models", nargs="+", default=list(BUILT), help=f"{', '.join(BUILT)}, or MODEL arguments"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=64, help="default 64, as in `vitascope predict`"
    )
    parser.add_argument("--workers", type=positive, help="default: one per core, as in `vitascope predict`")
    parser.add_argument("--rounds", type=positive, default=3, help="interleaved rounds (default 3)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    conditions = Conditions.now()  # before this script puts load on it
    reuse_freed_memory()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.data or make_pictures(Path(scratch), arguments.images)
        results = [measure(model, folder, arguments) for model in arguments.models]
    pictures = f"{results[0].images:,} JPEG files" if arguments.data else f"{results[0].images:,}, generated"
    method = (
        f"interleaved rounds over all images: {arguments.rounds}; batch {arguments.batch_size}; "
        f"workers {arguments.workers or os.cpu_count()}; medians"
    )
    head = conditions.heading("Bulk prediction: a folder, end to end", images=pictures, method=method)
    publish("bulk_prediction", f"{head}\n\n{table(results)}", arguments)


if __name__ == "__main__":
    main()
