"""Measure the effect of distillation: a ViT with a convolutional teacher, and the same ViT without one.

    .venv/bin/python benchmarks/distillation.py --data cifar10 --out

The script first trains the teacher: our ResNet (recipe `cnn`), or the ViT behind a ResNet stem (`--teacher
hybrid`, recipe `small-data`). Then it trains the student, a plain ViT, three times on the same images, with
the same number of epochs, seed and recipe (`distill`): alone, from the teacher's decisions (`--distill
hard`), and from its probabilities (`--distill soft`). It measures each model on the test images. For a
student with a teacher, it measures each head and the mean of both, which prediction uses. In Touvron et al.
2021, table 3, on ImageNet, the distillation head is the better one, and hard distillation the better kind.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

import vitascope as vs
from conditions import Conditions
from contestants import vit_at
from learning import engine, named_values, options, runs_of, schedule, tested, train, vit, write_limited
from reports import markdown_table, publish
from vitascope.data.datasets import open_data
from vitascope.data.loading import Loader
from vitascope.model.hardware import resolve_device, resolve_precision
from vitascope.model.vision_model import evaluation_mode
from vitascope.training.tasks.classify import BothHeads
from vitascope.weights.preprocess import preprocess_of

HYBRID = "hybrid"
"""The name of the teacher with the student's ViT behind a ResNet stem."""
HEADER = ("model", "parameters", "class head, %", "distillation head, %", "both, %", "training, s")

NOTES = """\
Test accuracy of one run each. "class head": trained by labels, the only head of the teacher and of the
student alone. "distillation head": trained by the teacher. "both": the mean of their logits, which the model
predicts with. "training": seconds in the loop, with validation; a student's include its teacher's forward
passes."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The accuracies of a model."""

    name: str
    parameters: int
    accuracies: dict[str, float]
    """Test accuracy by head, with the names of `both_heads`."""
    seconds: float

    def row(self) -> tuple[str, ...]:
        """The table's row, with a dash for each missing head."""
        heads = (self.accuracies.get(head) for head in ("class_head", "distillation_head", "both_heads"))
        shares = ("-" if share is None else f"{100 * share:.2f}" for share in heads)
        return (self.name, f"{self.parameters:,}", *shares, f"{self.seconds:,.0f}")


def configs(arguments: argparse.Namespace, data: str, runs: Path) -> dict[str, vs.TrainConfig]:
    """The training options of all runs, in order; the first run trains the teacher of the last two."""
    changes = named_values(
        arguments.options, fixed=("data", "run", "seed", "epochs", "teacher", "model_options")
    )

    def config(recipe: str, run: str, epochs: int, **options: Any) -> vs.TrainConfig:
        return vs.TrainConfig.from_recipe(
            recipe,
            data=data,
            run=str(runs / run),
            seed=arguments.seed,
            **(schedule(epochs) | changes | options | engine(arguments)),
        )

    hybrid = arguments.teacher == HYBRID
    teacher = ("small-data", vit(arguments)) if hybrid else ("cnn", {"model": arguments.teacher})
    student = {**vit(arguments), "model_options": {"stem": "conv"}}
    taught = {**student, "teacher": str(runs / "teacher")}
    epochs = arguments.epochs
    return {
        f"teacher: {arguments.teacher}": config(
            teacher[0], "teacher", arguments.teacher_epochs or epochs, **teacher[1]
        ),
        "student alone": config("distill", "alone", epochs, **student),
        "student, hard": config("distill", "hard", epochs, **taught, distill="hard"),
        "student, soft": config("distill", "soft", epochs, **taught, distill="soft"),
    }


def measure(name: str, config: vs.TrainConfig) -> Result:
    """Train a model and measure its test accuracy."""
    trained = train(name, config)
    record = tested(trained)
    accuracies = {"class_head": record["accuracy"]}
    if config.distillation.teacher is not None:
        accuracies = measure_heads(trained.path, config)
    return Result(name, trained.model().config.num_parameters, accuracies, record["seconds"])


def measure_heads(run: Path, config: vs.TrainConfig) -> dict[str, float]:
    """Measure the test accuracy of each head of a finished run, and of both."""
    model, device = vit_at(run), resolve_device(config.execution.device)
    images = open_data(config.data, seed=config.seed).measured
    precision = resolve_precision("auto", model.config, device, 128, training=False)
    loader = Loader(images, preprocess_of(model), 128, device=device)
    return both_heads(model.to(device), loader, precision)


@torch.inference_mode()
def both_heads(model: vs.VisionTransformer, loader: Loader, precision: torch.dtype) -> dict[str, float]:
    """Accuracy on a split: `class_head`, `distillation_head`, and `both_heads` for their mean."""
    module = BothHeads(model)
    correct, count = torch.zeros(3, dtype=torch.int64, device=loader.device), 0
    with evaluation_mode(module):
        for batch in loader.epoch():
            with torch.autocast(batch.pixels.device.type, precision, enabled=precision != torch.float32):
                by_label, by_teacher = module(loader.preprocess.normalize(batch.pixels))  # (B, K) each
            logits = torch.stack([by_label, by_teacher, (by_label + by_teacher) / 2])  # (3, B, K)
            correct += (logits.argmax(dim=2) == batch.targets).sum(dim=1)
            count += len(batch.targets)
    names = ("class_head", "distillation_head", "both_heads")
    return dict(zip(names, (correct / count).tolist(), strict=True))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, epochs=30)
    parser.add_argument("--seed", type=int, default=0, help="seed of every run (default 0)")
    parser.add_argument(
        "--teacher",
        default="resnet29_w32_cifar",
        metavar="NAME",
        help=f"a named ResNet, or {HYBRID} (default resnet29_w32_cifar)",
    )
    parser.add_argument("--teacher-epochs", type=int, help="the teacher's epochs (default: --epochs)")
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="options of `vitascope train`")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    with runs_of(arguments) as folder:
        data, images = arguments.data, "all training images"
        if arguments.limit is not None:
            data = write_limited(data, arguments.limit, folder / "data")
            images = f"{arguments.limit:,} training images"
        method = (
            f"{arguments.epochs} epochs of {images} (a tenth of them selects "
            f"the weights; {arguments.teacher_epochs or arguments.epochs} epochs for the teacher), seed "
            f"{arguments.seed}{''.join(f', {word}' for word in arguments.options)}"
        )
        report = Conditions.now().heading(f"Distillation: {arguments.data}", method=method)
        runs = configs(arguments, data, folder)
        results = [measure(name, config) for name, config in runs.items()]
    table = markdown_table(HEADER, [result.row() for result in results])
    publish("distillation", f"{report}\n\n{table}\n\n{NOTES}", arguments)


if __name__ == "__main__":
    main()
