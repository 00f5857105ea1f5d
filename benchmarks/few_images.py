"""Measure up to how many images a start from trained weights is better than training from scratch.

    .venv/bin/python benchmarks/few_images.py --data cifar10 --out

A body is trained on half of the classes. Then a classifier of the other classes, of which the body has seen
no image, is trained on growing numbers of their images: from scratch with the recipe `small-data`, and from
the body with the recipes `finetune` and `small-finetune`. All are shown each image so often that there are
`--most-shown` images in all, but at most 200 times. The table is the reason for `FEW_TO_START` and
`FEW_TO_TUNE` in options/recipes.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import vitascope as vs
from conditions import Conditions
from contest import positive
from learning import add_engine, engine, runs_of, tested, train, write_classes
from reports import command_line, markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.run.measures import wilson_interval

NOTES = """\
Test accuracy in %; in parentheses its 95% interval and the training time in seconds, on a machine whose speed
drifts. "images": of all classes together, a tenth of which is for validation."""


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--data", default="cifar10", help="a DATA argument (default cifar10)")
    parser.add_argument("--epochs", type=positive, default=10, help="of the body (default 10)")
    parser.add_argument(
        "--sizes", nargs="+", type=positive, default=[50, 200, 1000, 5000], help="numbers of images"
    )
    parser.add_argument(
        "--most-shown", type=positive, default=200_000, help="images, with repetitions (default 200,000)"
    )
    add_engine(parser)
    return parser.parse_args(given)


def measured(arguments: argparse.Namespace, runs: Path) -> list[tuple[str, ...]]:
    """The rows of the table."""
    classes = open_data(arguments.data).train.class_names
    seen, unseen = classes[::2], classes[1::2]
    data = write_classes(arguments.data, dict.fromkeys(seen), runs / "seen")
    shared = engine(arguments)
    body = vs.TrainConfig.from_recipe(
        "small-data", data=data, run=str(runs / "body"), epochs=arguments.epochs, **shared
    )
    weights = str(train("the body", body).path)
    rows = []
    for size in arguments.sizes:
        data = write_classes(
            arguments.data, dict.fromkeys(unseen, size // len(unseen)), runs / f"unseen-{size}"
        )
        epochs = max(1, min(200, arguments.most_shown // size))
        starts: dict[str, dict[str, str]] = {
            "small-data": {},
            "finetune": {"weights": weights},
            "small-finetune": {"weights": weights},
        }
        cells = []
        for recipe, start in starts.items():
            options = {"data": data, "run": str(runs / f"{recipe}-{size}"), "epochs": epochs, **shared}
            run = train(f"{recipe}, {size}", vs.TrainConfig.from_recipe(recipe, **start, **options))
            found = tested(run)
            low, high = wilson_interval(found["correct"], found["images"])
            cells.append(
                f"{100 * found['accuracy']:.1f} ({100 * low:.1f} to {100 * high:.1f}; {found['seconds']:.0f})"
            )
        rows.append((f"{size:,}", f"{epochs}", *cells))
        note(str(rows[-1]))
    return rows


def main() -> None:
    arguments = parse()
    with runs_of(arguments) as runs:
        rows = measured(arguments, runs)
    method = f"a body of {arguments.epochs} epochs on half of the classes, fine-tuned on the others"
    report = Conditions.now().heading(f"Few images, {arguments.data}", method=method)
    header = ("images", "epochs", "small-data, from scratch", "finetune", "small-finetune")
    publish("few_images", f"{report}\n\n{markdown_table(header, rows)}\n\n{NOTES}", arguments)


if __name__ == "__main__":
    main()
