"""Measure the faithfulness of heatmaps: deletion, insertion and ROAD of every method on a trained model.

    python benchmarks/faithfulness.py runs/cifar10 cifar10 --images 200 --out

The script writes the output of `vitascope explain MODEL DATA --compare` as a dated table. `--window` adds
occlusion by larger windows. `--layers` adds Grad-CAM and its variants at every layer, to find the layers in
which a model with a class token keeps its evidence.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from conditions import Conditions
from contest import positive
from reports import command_line, markdown_table, note, publish
from vitascope import explain
from vitascope.analysis.explain.faithfulness.results import RANDOM, Comparison, Row
from vitascope.analysis.explain.inputs import as_images, chosen_pictures
from vitascope.analysis.explain.methods import methods_for
from vitascope.data.datasets import open_pictures
from vitascope.intervals import Interval
from vitascope.models.config import ViTConfig
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.loading import from_pretrained
from vitascope.training.run.run import Run

HEADER = ("method", "deletion AUC", "insertion AUC", "ROAD", "gain over random", "s/image", "verdict")
NOTES = """\
Means over the images. In parentheses: the gain over random orders of the same image, with its 95% interval
(Student's t, paired by image). For deletion, lower is better; for insertion and ROAD, higher. "gain": the
mean gain of the four curves (ROAD has two), which ranks the methods. "s/image": the time of one heatmap, one
image at a time."""


def report(model: VisionModel, comparison: Comparison, command: str) -> str:
    """The comparison as Markdown."""
    gh, gw = comparison.grid
    rivals = ", ".join(comparison.rivals) or "none"
    method = (
        f"{comparison.images} images, {gh}x{gw} cells, {comparison.steps} steps, ROAD at "
        f"{', '.join(f'{share:.0%}' for share in comparison.shares)}; the class that the model predicts"
    )
    lines = (
        Conditions.now().heading(f"Faithfulness of heatmaps: {model.config.summary}", method=method),
        "",
        markdown_table(HEADER, [cells(row) for row in comparison.table()]),
        "",
        f"Best: {comparison.best}. Not significantly different: {rivals}.",
        "",
        NOTES,
    )
    return "\n".join(lines)


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row."""
    is_baseline = row.method == RANDOM
    measures = (
        f"{measure.mean:.3f}" + ("" if is_baseline else f" ({gain(measure.gain)})")
        for measure in (row.deletion, row.insertion, row.road)
    )
    return (
        row.method,
        *measures,
        "" if is_baseline else gain(row.gain),
        "" if is_baseline else f"{row.seconds:.3f}",
        row.verdict,
    )


def gain(interval: Interval) -> str:
    """Format a mean with its interval."""
    half = "" if interval.half_width is None else f" ± {interval.half_width:.3f}"
    return f"{interval.mean:+.3f}{half}"


def further_methods(model: VisionModel, windows: list[int], layers: bool) -> dict[str, Callable[..., Tensor]]:
    """Methods with other settings than their defaults."""
    found: dict[str, Callable[..., Tensor]] = {
        f"occlusion, window {window}": partial(explain.occlusion, window=window) for window in windows
    }
    if layers and isinstance(model.config, ViTConfig):
        for variant in ("grad-cam", "layer-cam"):
            for layer in range(model.config.depth):
                settings: Mapping[str, Any] = {"variant": variant, "layer": layer}
                found[f"{variant}, layer {layer}"] = partial(explain.grad_cam, **settings)
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", help="a MODEL argument")
    parser.add_argument("data", nargs="?", help="a DATA argument (default: a run's test images)")
    parser.add_argument(
        "--images", type=positive, default=200, help="number of images, drawn by seed (default 200)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--window", type=positive, nargs="*", default=[], help="also occlusion by these windows"
    )
    parser.add_argument("--layers", action="store_true", help="also Grad-CAM at every layer")
    arguments = parser.parse_args()
    model = from_pretrained(arguments.model, device="auto")
    if arguments.data is None:
        pictures = Run.open(arguments.model).test_images().sources
    else:
        pictures = open_pictures(arguments.data)
    images = as_images(model, chosen_pictures(pictures, arguments.images, arguments.seed))
    methods = methods_for(model) | further_methods(model, arguments.window, arguments.layers)
    note(f"{len(methods)} methods on {len(images)} images")
    comparison = explain.compare(model, images, methods, seed=arguments.seed)
    command = f"python benchmarks/faithfulness.py {shlex.join(sys.argv[1:])}"
    publish("faithfulness", report(model, comparison, command), arguments)


if __name__ == "__main__":
    main()
