"""Check that `--precision auto` chooses the faster precision on this CPU, and find the border between both.

    .venv/bin/python benchmarks/precision.py [--out]
    .venv/bin/python benchmarks/precision.py --sweep [--out]

The first command measures training and inference of three models in fp32, bf16 and the choice of `auto`: the
digits recipe, ViT-Ti/4 at 32 pixels and ViT-B/16 at 224. It takes about 4 minutes on 2 idle cores, and 8 GB.
The second measures a grid of widths and tokens per batch (64 tokens per image, 2 blocks), from which the
border in `resolve_precision` is set. It takes about 10 minutes.
"""

import argparse
import dataclasses
from collections.abc import Sequence

from contest import (
    Ceiling,
    Contest,
    Entrant,
    Result,
    heading,
    matmul_entrants,
    options,
    rate,
    ratio,
    timing_of,
)
from contestants import CPU, inference_entrants, named_vit, training_entrants
from reports import markdown_table, publish
from vitascope.data.datasets import open_data
from vitascope.model.config import ViTConfig
from vitascope.model.hardware import resolve_precision
from vitascope.model.options import ReadoutOptions
from vitascope.options.recipes import TrainConfig
from vitascope.training.train import prepare

PRECISIONS = ("fp32", "bf16", "auto")
CASES_HEADER = ("case", "fp32", "bf16", "auto", "choice", "auto / better", "loss", "of the ceiling")

CASES_NOTES = """\
Images per second. "choice": the precision that auto chose. "auto / better": auto over the faster of the fp32
and bf16 columns. auto runs the same code as one of them, so after a right choice only noise makes this differ
from 1. "loss": how much slower the chosen precision is than the faster one, by these columns. "of the
ceiling": auto's operations per second over those of the fastest matrix product in the same dtype. Inference
is `TorchEngine.probabilities`. Training is a step of `vitascope train` without augmentation, clipping and
running average, which are the same in each precision."""

SWEEP_WIDTHS = (64, 128, 192, 256, 384, 512, 768)
SWEEP_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SWEEP_TOKENS = 64
"""Tokens per image: 8 x 8 patches, mean pooling, no class token."""

SWEEP_NOTES = """\
Speed of bf16 over that of fp32 by width (rows) and tokens per batch (columns), in bold where `auto` chooses
bf16. A bold number below 1 is a wrong choice; one above 1 that is not bold is a missed gain."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in training or inference."""

    model: str
    config: ViTConfig
    batch_size: int
    training: bool

    @property
    def title(self) -> str:
        """The model, training or inference, and the batch size."""
        return f"{self.model}, {'training' if self.training else 'inference'}, batch {self.batch_size}"

    def entrants(self, precisions: tuple[str, ...]) -> list[Entrant]:
        """Our entrants in each of the precisions."""
        make = training_entrants if self.training else inference_entrants
        return make(self.config, self.batch_size, precisions)

    def row(self, results: Sequence[Result], ceiling: Ceiling) -> list[str]:
        """The table's row for the results in fp32, bf16 and auto."""
        fp32, bf16, auto = results
        better = max(fp32.images_per_second, bf16.images_per_second)
        chosen = next(result for result in (fp32, bf16) if result.entrant.dtype == auto.entrant.dtype)
        return [
            self.title,
            *(rate(result.images_per_second) for result in results),
            chosen.entrant.precision,
            ratio(auto.images_per_second, better),
            f"{1 - chosen.images_per_second / better:.0%}",
            ceiling.share(auto),
        ]


def cases() -> list[Case]:
    """The three models, with ViT-B last because its processes keep much memory."""
    plan = prepare(TrainConfig.from_recipe("digits"), open_data("digits")).plan
    digits, batch_size = plan.model, plan.options.optimization.batch_size
    assert isinstance(digits, ViTConfig)
    tiny = named_vit("vit_ti16", image_size=32, patch_size=4, num_classes=10)
    base = named_vit("vit_b16")
    return [
        Case("digits", digits, batch_size, training=True),
        *(Case("digits", digits, batch, training=False) for batch in (1, 8, 128)),
        Case("ViT-Ti/4", tiny, 128, training=True),
        *(Case("ViT-Ti/4", tiny, batch, training=False) for batch in (1, 8, 128)),
        *(Case("ViT-B/16", base, batch, training=False) for batch in (1, 8)),
        Case("ViT-B/16", base, 8, training=True),
    ]


def cases_report(arguments: argparse.Namespace) -> str:
    """Measure the three models, with one row per case."""
    report = heading("Precision: the choice of auto", arguments)
    with Contest(arguments.rounds, timing_of(arguments)) as contest:
        ceiling = Ceiling.among(contest.run("matmul", matmul_entrants()))
        rows = [case.row(contest.run(case.title, case.entrants(PRECISIONS)), ceiling) for case in cases()]
    table = markdown_table(CASES_HEADER, rows)
    return f"{report}\n\n{table}\n\nMatmul ceiling: {ceiling.describe()}.\n\n{CASES_NOTES}"


def sweep_config(width: int) -> ViTConfig:
    """Two blocks of a width, heads of 64, and `SWEEP_TOKENS` tokens per image."""
    return ViTConfig(
        image_size=32,
        patch_size=4,
        num_classes=10,
        embed_dim=width,
        depth=2,
        num_heads=width // 64,
        readout=ReadoutOptions(pool="mean"),
    )


def sweep_report(arguments: argparse.Namespace) -> str:
    """Measure a grid for training and one for inference."""
    report = heading("Precision: bf16 over fp32 by width and tokens", arguments)
    with Contest(arguments.rounds, timing_of(arguments)) as contest:
        for training in (True, False):
            grid = markdown_table(
                ("width", *(f"{batch * SWEEP_TOKENS}" for batch in SWEEP_BATCHES)),
                [sweep_row(contest, width, training) for width in SWEEP_WIDTHS],
            )
            report += f"\n\n## {'Training' if training else 'Inference'}\n\n{grid}"
    return f"{report}\n\n{SWEEP_NOTES}"


def sweep_row(contest: Contest, width: int, training: bool) -> list[str]:
    """The speed of bf16 over fp32 at a width, for each number of tokens."""
    return [
        str(width),
        *(
            sweep_cell(contest, Case(f"width {width}", sweep_config(width), batch, training))
            for batch in SWEEP_BATCHES
        ),
    ]


def sweep_cell(contest: Contest, case: Case) -> str:
    """The speed of bf16 over fp32, in bold if `auto` chooses bf16."""
    fp32, bf16 = contest.run(case.title, case.entrants(("fp32", "bf16")))
    gain = ratio(bf16.images_per_second, fp32.images_per_second)
    chosen = resolve_precision("auto", case.config, CPU, case.batch_size, training=case.training)
    return f"**{gain}**" if chosen == bf16.entrant.dtype else gain


def main() -> None:
    parser = options(__doc__, rounds=3, warmup=1, steps=3)
    parser.add_argument("--sweep", action="store_true", help="measure the grid instead of the three models")
    arguments = parser.parse_args()
    if arguments.sweep:
        publish("precision_sweep", sweep_report(arguments), arguments)
    else:
        publish("precision", cases_report(arguments), arguments)


if __name__ == "__main__":
    main()
