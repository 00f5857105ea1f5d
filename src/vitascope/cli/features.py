"""`vitascope probe`, `similar`, `next`, `embed` and `audit`: what the features of frozen bodies tell."""

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitascope.cli.exits import exit_if_left_out, exiting_if_stopped, exiting_with_parts
from vitascope.cli.parsing import Json, Model, arguments_of, check_picture
from vitascope.data.table_options import DataOptions, TableOptions
from vitascope.errors import UserError, printable
from vitascope.formatting import aligned, counted, duration, speed
from vitascope.models.engines.compute import Compute
from vitascope.storage import explaining_failure, replacing

if TYPE_CHECKING:
    from vitascope.analysis.probing.probe import ProbeResult
    from vitascope.analysis.similar import SimilarPictures

ROWS = 12
"""Classifiers in the printed table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Representation:
    """What is read of the model."""

    layer: int | None = None
    """The layer, from 0, whose output is read; -1 is the last.
    Default: the result of the model's own pooling."""
    pool: Literal["cls", "mean", "cls_mean"] | None = None
    """The class token, the mean of the patches, or both.
    Default with --layer: that of the model, else `mean`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a command on many images computes."""

    engine: Literal["local", "ray"] = "local"
    """`local` computes in this process.
    `ray` computes on the workers of Ray, in parts, into --out; it needs pip install 'vitascope[ray]'.
    Then --workers are the readers of each: by default none, beside a GPU its cores."""
    ray_address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """With --engine ray: `auto` for the cluster that this machine belongs to, or HOST:PORT of its head.
    Default: Ray on this machine alone, for as long as the command runs."""

    @property
    def ray(self) -> str | None:
        """The address of Ray; None without.

        Raises:
            UserError: an address without Ray.
        """
        if self.ray_address is not None and self.engine != "ray":
            raise UserError("--ray-address needs --engine ray")
        return None if self.engine == "local" else self.ray_address or "local"


def exiting_with_cache(compute: Compute) -> AbstractContextManager[None]:
    """SIGINT and SIGTERM stop the command at once; it says what is left."""
    kept = "repeat the command to continue with the cached features"
    return exiting_if_stopped(kept if compute.cache else "nothing is kept")


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

    def call(self) -> dict[str, object]:
        """Compare, write the run, and print the comparison."""
        from vitascope.analysis.probing.probe import probe

        with exiting_with_cache(self.compute):
            found = probe(**arguments_of(self, "json"))
        if self.json:
            print(json.dumps(as_json(found)))
        else:
            print("\n".join(probe_lines(found)).replace(str(found.run), found.url or str(found.run)))
        images = len(found.selection.train.targets) + len(found.selection.test)
        exit_if_left_out(images, found.evaluation.unreadable)
        return {"run": found.url or found.run}


def probe_lines(found: "ProbeResult") -> list[str]:
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


def as_json(found: "ProbeResult") -> dict[str, object]:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similar:
    """Find the images that are most similar to a picture, or to words.

    The similarity is the cosine of their features, from -1 to 1.

    Computed features are cached: the next search in DATA takes them from there.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    picture: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PICTURE")]]
    """An image file; with a CLIP or SigLIP, also words, such as "a red car"."""
    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, a table, another DATA, or a file of `vitascope embed`."""
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 12
    """The most images to find."""
    out: Path | None = None
    """Draw the picture and the images that are found, in this PNG; an existing file is replaced."""
    json: Json = False
    representation: Representation = dataclasses.field(default_factory=Representation)
    """What is read of the model."""
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""
    compute: Compute = dataclasses.field(default_factory=Compute)
    """How images are read and features computed."""

    def call(self) -> dict[str, object]:
        """Search, print the table, and draw."""
        from vitascope.analysis.similar import similar

        if self.out is not None:
            self._check(self.out)
        with exiting_with_cache(self.compute):
            options = arguments_of(self, "out", "json", "representation")
            found = similar(**options, **dataclasses.asdict(self.representation))
        if self.out is not None:
            from vitascope.analysis.explain.plots import save_figure

            with explaining_failure(self.out, "the picture", "choose another place"):
                save_figure(found.draw(), self.out)
        if self.json:
            counts = {
                "images": found.compared,
                "unreadable": len(found.unreadable),
                "computed": found.computed,
            }
            out = {} if self.out is None else {"out": os.fspath(self.out)}
            print(json.dumps({"picture": self.picture, **counts, "nearest": found.rows(), **out}))
        else:
            print("\n".join(self._lines(found)))
        exit_if_left_out(found.compared, found.unreadable)
        return {"folder": self.data} if os.path.isdir(self.data) else {}

    def _check(self, out: Path) -> None:
        """Reject a file that is no PNG, is the picture, or would belong to DATA the next time."""
        check_picture(out, "the picture is a PNG file", [self.picture], "the PICTURE")
        if os.path.isdir(self.data) and out.resolve().is_relative_to(Path(self.data).resolve()):
            raise UserError(f"--out {out} would be an image of {self.data}; choose another folder")

    def _lines(self, found: "SimilarPictures") -> list[str]:
        """The table without columns that say nothing, the counts, and the file."""
        columns = ["rank", "similarity", "label", "split", "image"]
        if found.labels is None:
            columns.remove("label")
        if set(found.splits.tolist()) == {"all"}:
            columns.remove("split")
        rows = [[_cell(row[column]) for column in columns] for row in found.rows()]
        left = {place for place, column in enumerate(columns) if column in ("label", "split", "image")}
        lines = list(aligned([columns, *rows], left))
        lines.append(f"{counted(found.compared, 'image')} compared, {found.computed:,} of them computed now")
        return lines if self.out is None else [*lines, os.fspath(self.out)]


def _cell(value: float | int | str) -> str:
    return f"{value:z.4f}" if isinstance(value, float) else printable(str(value), 200)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Next:
    """Choose the pictures to label next.

    The first 50 are typical and different; then come those that a run is unsure of.

    Of near-copies one is chosen, and none that has a label in the run.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id, whose features are compared."""
    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, a table, or another DATA, whose labels are not read."""
    count: int = 50
    """The most pictures to choose."""
    out: Path | None = None
    """Also write the paths into FILE.txt, one per line, or tasks of Label Studio into FILE.json.
    An existing file is replaced."""
    json: Json = False
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""
    compute: Compute = dataclasses.field(default_factory=Compute)
    """How images are read and features computed."""

    def call(self) -> None:
        """Choose, print the table, and write the file."""
        from vitascope.analysis.labelling.unlabelled import pictures_to_label

        if self.out is not None and self.out.suffix not in (".txt", ".json"):
            raise UserError(f"--out {self.out}: paths are written to FILE.txt, tasks to FILE.json")
        with exiting_with_cache(self.compute):
            found = pictures_to_label(**arguments_of(self, "out", "json"))
        if self.out is not None:
            self._write(self.out, found.rows)
        if self.json:
            counts = {"images": found.images, "labelled": found.labelled, "unreadable": len(found.unreadable)}
            print(json.dumps({**counts, "next": found.rows}))
        else:
            columns = ["image", "reason", "copies"][: 3 if any(row["copies"] for row in found.rows) else 2]
            cells = ((_cell(row["image"]), row["reason"], str(len(row["copies"]))) for row in found.rows)
            rows = [columns, *(row[: len(columns)] for row in cells)]
            print("\n".join(aligned(rows, left={0, 1})))
            known = f", {found.labelled:,} of them labelled in {self.model}" if found.labelled else ""
            print(f"{len(found.rows):,} of {counted(found.images, 'image')}{known}")
        exit_if_left_out(found.images, found.unreadable)

    def _write(self, out: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        paths = [row["image"] for row in rows]
        tasks = [{"data": {"image": row["image"], "reason": row["reason"]}} for row in rows]
        text = json.dumps(tasks, indent=1) if out.suffix == ".json" else "\n".join(paths)
        if out.suffix == ".txt" and len(text.splitlines()) != len(paths):
            raise UserError("a path has a line break: write tasks to FILE.json instead")
        with explaining_failure(out, "the list", "choose another place"), replacing(out) as aside:
            aside.write_text(f"{text}\n", encoding="utf-8", errors="surrogateescape")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embed:
    """Write the features of images to a file.

    Computed features are cached: a repeated command continues an interrupted one.
    """

    model: Model
    """A run folder, a model folder or file, a hub id, or a file of `export --features`."""
    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, with or without labels, a table, or another DATA."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """New file: FILE.npz, FILE.npy (with FILE.npy.json beside it) or FILE.parquet, also in a store (s3://...)."""
    json: Json = False
    representation: Representation = dataclasses.field(default_factory=Representation)
    """What is read of the model."""
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""
    compute: Compute = dataclasses.field(default_factory=Compute)
    """How images are read and features computed."""
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    """Where features are computed."""

    def call(self) -> None:
        """Compute, write and print a summary."""
        from vitascope.data.features.embed import embed

        ray = self.cluster.ray
        started = time.monotonic()
        stopping = exiting_with_cache(self.compute)
        if ray is not None:
            stopping = exiting_with_parts(Path(self.out), self.out, "repeat the command to continue")
        with stopping:
            options = arguments_of(self, "json", "representation", "cluster")
            found = embed(**options, **dataclasses.asdict(self.representation), ray=ray)
        if self.json:
            counts = {"images": len(found), "unreadable": len(found.unreadable), "computed": found.computed}
            print(json.dumps({"out": self.out, **counts}))
        else:
            print(
                f"{counted(len(found), 'image')} in {self.out}, {found.computed:,} of them computed now; "
                f"{speed(len(found) / (time.monotonic() - started))}"
            )
        exit_if_left_out(len(found), found.unreadable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """Find wrong labels, copies and other faults of images.

    It plants such faults too, and says how many of them it finds.

    You decide on the page audit.html what to drop or relabel.

    train, probe and evaluate take the decisions as --audit.
    """

    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, a table, or another DATA, with or without labels."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(required)")]
    """A new folder for audit.csv, audit.html, and the scores of images and classes."""
    body: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL ...")] = ("cifar10",)
    """Models whose features are compared. A large one sees more in photographs."""
    seed: int = 0
    """Of the folds, and of what is planted."""
    json: Json = False
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""
    compute: Compute = dataclasses.field(default_factory=Compute)
    """How images are read and features computed."""

    def call(self) -> dict[str, object]:
        """Audit, and print the number of findings and how much is noticed."""
        from vitascope.analysis.auditing.audit import audit

        with exiting_with_cache(self.compute):
            found = audit(**arguments_of(self, "body", "json"), bodies=self.body)
        if self.json:
            planted = [dataclasses.asdict(each) for each in found.planted]
            values = {"images": len(found.names), "findings": dict(found.counts), "planted": planted}
            files = {"csv": str(found.csv), "page": str(found.page), "scores": list(map(str, found.scores))}
            print(json.dumps({**values, "notes": list(found.notes), **files}))
            return {}
        heading = f"{counted(len(found.names), 'image')}, {duration(found.seconds)}"
        print("\n".join([heading, *found.lines(), *map(str, (found.csv, *found.scores, found.page))]))
        return {"page": found.page}
