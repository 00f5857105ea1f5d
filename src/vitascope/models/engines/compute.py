"""`Compute`: how features are computed. No torch: it is a group of options of commands."""

import dataclasses
from typing import Annotated, Literal

import tyro

from vitascope.arguments import CheckedFields, Range

BatchSize = Annotated[int | None, Range(ge=1, le=100_000)]
"""Larger batches would fill the memory of reading processes."""
Workers = Annotated[
    int | None,
    tyro.conf.arg(
        help="Processes that read images; 0 reads in the main process. Default: one per core.",
    ),
    Range(ge=0),
]
Precision = Annotated[
    Literal["auto", "fp32", "bf16"],
    tyro.conf.arg(help="`auto` uses bf16 where this machine is faster with it."),
]
Views = Annotated[
    Literal[1, 2, 6],
    tyro.conf.arg(
        help="Views of each image whose probabilities are averaged, for as many times the time.\n"
        "2: the image and its mirror image; 6: also both with two small shifts."
    ),
]
Device = Annotated[str, tyro.conf.arg(help="`auto`, `cpu`, `cuda` or `mps`.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources(CheckedFields):
    """How images are read and a model computes.

    Raises:
        UserError: values of other types or out of range.
    """

    batch_size: BatchSize = None
    """Images per batch. Default: 64; on a GPU as many as keep it busy."""
    workers: Workers = None
    precision: Precision = "auto"
    device: Device = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute(Resources):
    """How images are read and features computed."""

    cache: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="Compute all features, and keep none in the cache."),
    ] = True
    """Take features from the cache, and keep them there; `--no-cache` computes them again."""


DEFAULT = Compute()
