"""Measure the throughput and the accuracy of merged and pruned models.

    .venv/bin/python benchmarks/compression.py [--model runs/cifar10 --data cifar10 --merge 2 4 6] [--out]

Without --model, the script times token merging on ViT-B/16 at 224 pixels with random weights in fp32 and
bf16, for each number of merged patches per block in `--merge`. With --model, it measures test accuracy and
images per second of a trained model: as it is, merged, and pruned to shares of its heads and of its MLPs'
width (`--keep`), before and after `--epochs` of fine-tuning with the usual loop (recipe `finetune`). Every
timed model maps bytes to probabilities, as in `vitascope predict`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

import vitascope as vs
from contest import DTYPES, Contest, Entrant, Result, heading, options, positive, rate, ratio, timing_of
from contestants import named_vit, our_inference, vit_at
from reports import markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.data.loading import Loader
from vitascope.deploy.export.pruning import merge_tokens, prune
from vitascope.evaluation.evaluate import evaluate
from vitascope.model.config import ViTConfig
from vitascope.model.vision_model import VisionModel
from vitascope.model.vit import VisionTransformer
from vitascope.weights.preprocess import preprocess_of
from vitascope.weights.saving import save_pretrained

RANDOM = "vit_b16"
EXAMPLES = 512
"""Training images by which pruning chooses heads and hidden units."""

SPEED_HEADER = ("model", "precision", "GFLOPs", "img/s", "slowest to fastest round", "speedup")
TABLE_HEADER = ("model", "parameters", "GFLOPs", "img/s", "speedup", "accuracy, %", "change")

NOTES = """\
"merge r": every block merges r patches (token merging, Bolya et al. 2023), with the same weights. "heads h,
MLP x": pruned to h heads per layer and MLPs of x times the width, chosen on {examples} training images.
"GFLOPs": the matrix products of one image; a multiply-add counts as 2. "speedup": images per second over
those of the original model, in the same precision and the same rounds."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model of the table, with a folder or run of its own."""

    name: str
    folder: Path
    accuracy: float
    """Test accuracy."""


def entrant(
    name: str, config: ViTConfig, batch_size: int, precision: str, model: Path | None = None
) -> Entrant:
    """A predicting model, with weights from a folder or random ones."""
    place = None if model is None else str(model)
    return Entrant(
        name=name,
        precision=precision,
        dtype=DTYPES[precision],
        prepare=partial(our_inference, config, batch_size, precision, place),
        images=batch_size,
        flops=config.flops * batch_size,
    )


def merging_entrants(counts: Sequence[int], batch_size: int, precision: str) -> list[Entrant]:
    """ViT-B/16 with random weights: the original, and one entrant per number of merged patches."""
    original = entrant("original", named_vit(RANDOM), batch_size, precision)
    return [
        original,
        *(
            entrant(f"merge {count}", named_vit(RANDOM, token_merging=count), batch_size, precision)
            for count in counts
        ),
    ]


def speed_table(results: Sequence[Sequence[Result]]) -> str:
    """The speed of merging; the first result of each precision is the original model."""
    return markdown_table(
        SPEED_HEADER,
        [
            (
                result.entrant.name,
                result.entrant.precision,
                gflops(result),
                rate(result.images_per_second),
                result.spread,
                ratio(result.images_per_second, group[0].images_per_second),
            )
            for group in results
            for result in group
        ],
    )


def gflops(result: Result) -> str:
    """GFLOPs per image."""
    return f"{result.entrant.flops / result.entrant.images / 1e9:.3g}"


def examples(model: VisionModel, data: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Normalized training images with their classes, for pruning."""
    train = open_data(data).train.in_classes(model.config.class_names, data)
    some = train.subset("train", train.order(0, 0)[:EXAMPLES])
    for batch in Loader(some, preprocess_of(model), 32).epoch():
        yield preprocess_of(model).normalize(batch.pixels), batch.targets


def variants(arguments: argparse.Namespace, folder: Path) -> Iterator[Variant]:
    """Write the original, merged, pruned and fine-tuned models into the folder and measure their accuracy."""
    source = vit_at(arguments.model)

    def measured(name: str, place: Path) -> Variant:
        evaluation = evaluate(place, arguments.data, precision=arguments.precision)
        note(f"{name}: {evaluation.accuracy:.2%}")
        return Variant(name, place, evaluation.accuracy)

    def saved(name: str, model: VisionTransformer) -> Variant:
        place = save_pretrained(model, folder / name.replace(" ", "-"))
        return measured(name, place)

    yield measured("original", Path(arguments.model))
    for count in arguments.merge:
        yield saved(f"merge {count}", merge_tokens(source, count))
    for share in arguments.keep:
        config = source.config
        heads, mlp_ratio = max(1, round(share * config.num_heads)), share * config.block.mlp_ratio
        pruned = prune(source, examples(source, arguments.data), num_heads=heads, mlp_ratio=mlp_ratio)
        name = f"heads {heads}, MLP {mlp_ratio:g}"
        before = saved(name, pruned)
        yield before
        if arguments.epochs:
            run = fine_tuned(arguments, before.folder, folder / f"trained-{before.folder.name}")
            yield measured(f"{name}, fine-tuned", run)


def fine_tuned(arguments: argparse.Namespace, weights: Path, run: Path) -> Path:
    """Fine-tune weights with the usual loop; returns the run folder."""
    config = vs.TrainConfig.from_recipe(
        "finetune", data=arguments.data, weights=str(weights), epochs=arguments.epochs, run=str(run)
    )
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the report only
        vs.train(config if arguments.lr is None else config.replace(lr=arguments.lr))
    return run


def accuracy_table(found: Sequence[Variant], results: Sequence[Result]) -> str:
    """Accuracy and speed of each variant; the first is the original model."""
    original, speed = found[0], results[0].images_per_second
    rows = []
    for variant, result in zip(found, results, strict=True):
        config = vit_at(variant.folder).config
        change = 100 * (variant.accuracy - original.accuracy)
        rows.append(
            (
                variant.name,
                f"{config.num_parameters:,}",
                gflops(result),
                rate(result.images_per_second),
                ratio(result.images_per_second, speed),
                f"{100 * variant.accuracy:.2f}",
                f"{change:+.2f}",
            )
        )
    return markdown_table(TABLE_HEADER, rows)


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = options(__doc__, rounds=5, warmup=1, steps=3)
    parser.add_argument("--model", help="a trained model; without one, ViT-B/16 with random weights is timed")
    parser.add_argument("--data", help="DATA with the model's classes")
    parser.add_argument(
        "--merge",
        type=positive,
        nargs="+",
        default=[8, 12, 13, 16],
        help="merged patches per block (default 8 12 13 16)",
    )
    parser.add_argument(
        "--keep",
        type=float,
        nargs="*",
        default=[0.75, 0.5],
        help="shares that pruning keeps (default 0.75 0.5)",
    )
    parser.add_argument("--epochs", type=int, default=1, help="epochs of fine-tuning; 0 skips it (default 1)")
    parser.add_argument("--lr", type=float, help="learning rate of fine-tuning (default: the recipe's)")
    parser.add_argument("--batch-size", type=positive, default=8, help="default 8")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="precision of --model")
    arguments = parser.parse_args(args)
    if (arguments.model is None) != (arguments.data is None):
        parser.error("--model and --data need each other")
    return arguments


def random_report(arguments: argparse.Namespace) -> str:
    """Measure the speed of merging."""
    report = heading(f"Token merging: ViT-B/16 at 224 pixels, batch {arguments.batch_size}", arguments)
    results = []
    for precision in DTYPES:  # one precision at a time, because each process holds a model
        with Contest(arguments.rounds, timing_of(arguments)) as contest:
            entrants = merging_entrants(arguments.merge, arguments.batch_size, precision)
            results.append(contest.run(precision, entrants))
    return f"{report}\n\n{speed_table(results)}"


def trained_report(arguments: argparse.Namespace) -> str:
    """Measure accuracy and images per second of a trained model."""
    report = heading(
        f"Accuracy against images/s, batch {arguments.batch_size}, {arguments.precision}", arguments
    )
    with tempfile.TemporaryDirectory() as temporary:
        found = list(variants(arguments, Path(temporary)))
        with Contest(arguments.rounds, timing_of(arguments)) as contest:
            entrants = [
                entrant(
                    variant.name,
                    vit_at(variant.folder).config,
                    arguments.batch_size,
                    arguments.precision,
                    variant.folder,
                )
                for variant in found
            ]
            results = contest.run(arguments.precision, entrants)
        return f"{report}\n\n{accuracy_table(found, results)}"


def main() -> None:
    arguments = parse()
    trained = arguments.model is not None
    report = trained_report(arguments) if trained else random_report(arguments)
    name = "compression" if trained else "token_merging"
    publish(name, f"{report}\n\n{NOTES.format(examples=EXAMPLES)}", arguments)


if __name__ == "__main__":
    main()
