"""Compare pages of `vitascope page` with torch on labelled pictures, in a headless browser from the disk.

    .venv/bin/python benchmarks/page.py [--models cifar10 vit_s16] [--weights fp16 int8] [--out]

Every page computes `--pictures` test pictures of `--data`, without a network. A named size of `vitascope
models` has random weights. 200 pictures of ViT-S/16 take 3 minutes on 2 cores.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import vitascope as vs
from conditions import Conditions
from contest import positive
from reports import command_line, markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.deploy.page.packing import rounded
from vitascope.deploy.page.proof import (
    Computed,
    compared_picture,
    computed_in_browser,
    model_outputs,
    probabilities_apart,
)
from vitascope.models.vit import VisionTransformer

HEADER = (
    *("model", "weights", "MB", "ready, s", "first, s", "median, s", "same class"),
    *("p, rounded", "p, original", "pixels"),
)
NOTES = """\
"MB": of the HTML file. "ready": from opening the file to an unpacked model. "first", "median": from a picture
to its prediction and the attention of all layers. "same class": pictures with the most probable class of
torch with the page's weights. "p": the largest difference of two probabilities, against torch with the
page's weights, and with the original ones. "pixels": the largest difference of two of the model's pixels, of
255."""


def main(argv: Sequence[str] | None = None) -> None:
    """Write the pages, compute, print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["cifar10", "vit_s16"], help="MODELs or named sizes")
    parser.add_argument("--weights", nargs="+", default=["fp16", "int8"], help="of every model")
    parser.add_argument("--data", default="cifar10", help="DATA whose test pictures are computed")
    parser.add_argument("--pictures", type=positive, default=200, help="at most")
    parser.add_argument("--browser", help="a Chromium, Chrome or Edge")
    arguments = parser.parse_args(argv)
    conditions = Conditions.now()
    sources = open_data(arguments.data).measured.sources
    step = max(1, len(sources) // arguments.pictures)
    pictures = [sources[place] for place in range(0, len(sources), step)][: arguments.pictures]
    rows = []
    for name in arguments.models:
        model = load(name)
        given = [compared_picture(model, picture) for picture in pictures]
        own = model_outputs(model, given)
        for weights in arguments.weights:
            held = rounded(model, weights)
            with tempfile.TemporaryDirectory() as folder:
                done = vs.page(model, Path(folder) / "page.html", weights=weights, unproved=True)
                [found], size = computed_in_browser(arguments.browser, done.path, [(held, given)]), done.size
            also = model_outputs(held, given)
            rows.append(row(name, weights, size, found, held, own, also))
            note(" ".join(rows[-1]))
    measured = f"{arguments.pictures} test pictures of {arguments.data}, one by one; {found.kernel}"
    head = conditions.heading("Pages: a browser against torch", measured=measured)
    publish("page", f"{head}\n\n{markdown_table(HEADER, rows)}\n\n{NOTES}", arguments)


def load(name: str) -> VisionTransformer:
    """A model; of a named size with random weights, the head's larger, so that pictures differ in class."""
    if name not in vs.list_models():
        model = vs.from_pretrained(name)
    else:
        torch.manual_seed(0)
        model = vs.create_model(name, num_classes=10)
        torch.nn.init.normal_(model.get_parameter("head.weight"), std=0.3)
    assert isinstance(model, VisionTransformer)
    return model.eval()


def row(
    name: str,
    weights: str,
    size: int,
    found: Computed,
    model: VisionTransformer,
    own: torch.Tensor,
    also: torch.Tensor,
) -> list[str]:
    """A line of the table; outputs (n, K) of the model, `own`, and with the page's weights, `also`."""
    same = int((found.outputs.argmax(1) == also.argmax(1)).sum())
    return [
        name,
        weights,
        f"{size / 1e6:.1f}",
        f"{found.unpacking:.1f}",
        f"{found.answers[0]:.2f}",
        f"{statistics.median(found.answers):.2f}",
        f"{same} of {len(own)}",
        f"{probabilities_apart(model, found.outputs, also):.1g}",
        f"{probabilities_apart(model, found.outputs, own):.1g}",
        str(found.pixels),
    ]


if __name__ == "__main__":
    main()
