"""`vitascope probe`: the best classifier on frozen features."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vitascope.cli.exits import exit_if_left_out
from vitascope.cli.features import exiting_with_cache
from vitascope.cli.parsing import Json, arguments_of
from vitascope.data.table_options import DataOptions, TableOptions
from vitascope.formatting import aligned, counted
from vitascope.models.engines.compute import Compute

if TYPE_CHECKING:
    from vitascope.analysis.probing.probe import ProbeResult

ROWS = 12
"""Classifiers in the printed table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """Find the best classifier on the features of frozen bodies.

    Cross-validation chooses; the test images are measured once, afterwards.

    The run has the best linear classifier as its model, a report and probe.html.

    Computed features are cached: a repeated command continues an interrupted one.
    """

    models: tyro.conf.Positional[
        Annotated[
            tuple[str, ...], tyro.conf.arg(metavar="MODEL [MODEL ...]", help_behavior_hint="(required)")
        ]
    ]
    """Bodies to compare: run folders, model folders or files, hub ids."""
    data: str
    """A folder with <class>/ or train/<class>/ and test/<class>/, a table, or another DATA with labels."""
    run: str | None = None
    """New folder of the run, or its URL. Default: runs/ and the name of the data."""
    layers: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT ...")] = None
    """Layers to compare, from 0; -1 is the last.
    Default: the last, and the one at two thirds of the depth."""
    pools: tuple[Literal["cls", "mean", "cls_mean"], ...] | None = None
    """The class token, the mean of the patches, or both. Default: all that a body has."""
    seed: int = 0
    """Of the folds, and of the splits that the data do not have."""
    json: Json = False
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""
    compute: Compute = dataclasses.field(default_factory=Compute)
    """How images are read and features computed."""

    def call(self) -> None:
        """Compare, write the run, and print the comparison."""
        from vitascope.analysis.probing.probe import probe

        with exiting_with_cache(self.compute):
            found = probe(**arguments_of(self, "json"))
        if self.json:
            print(json.dumps(as_json(found)))
        else:
            print("\n".join(lines(found)).replace(str(found.run), found.url or str(found.run)))
        images = len(found.selection.train.targets) + len(found.selection.test)
        exit_if_left_out(images, found.evaluation.unreadable)


def lines(found: ProbeResult) -> list[str]:
    """The comparison as text."""
    from vitascope.training.linear.selection import SCORES_HEAD, in_words

    selection, best, linear = found.selection, found.best, found.selection.linear
    train, test = selection.train.targets, selection.test
    rows = [SCORES_HEAD, *selection.rows()]
    table = list(aligned(rows, left=range(5)))
    more = len(table) - 1 - ROWS
    return [
        f"data    {counted(len(train), 'image')} to fit and select on, {len(test):,} to test on, "
        f"{len(train.class_names):,} classes",
        *(f"body    {line}" for line in found.lines),
        "",
        *table[: 1 + ROWS],
        *([f"and {more} more, in probe.html"] if more > 0 else []),
        "",
        f"best    {best.candidate.place}: {best.name}",
        f"test    {in_words(best.tested)}, measured once, after the choice",
        *([f"        {selection.doubt}"] if selection.doubt else []),
        *(f"labels  {line}" for line in found.curve.lines()),
        *(f"answers {line}" for line in (found.calibration.lines()[1:] if found.calibration else ())),
        f"model   {found.run / 'model'}",
        *([] if linear is best else [f"head    {linear.name}: test {in_words(linear.tested)}"]),
        f"probe   {found.page}",
        f"report  {found.report}",
    ]


def as_json(found: ProbeResult) -> dict[str, object]:
    """The comparison as plain values."""
    scores = [
        {
            "body": score.candidate.body,
            "layer": score.candidate.layer,
            "pooling": score.candidate.pooling,
            "classifier": score.name,
            "validated": score.validated.value_and_limits,
            "test": score.tested.value_and_limits,
        }
        for score in found.selection.scores
    ]
    forecasts = [dataclasses.asdict(forecast) for forecast in found.curve.forecasts]
    return {
        "run": found.url or str(found.run),
        "scores": scores,
        "forecasts": forecasts,
        "page": str(found.page).replace(str(found.run), found.url or str(found.run)),
    }
