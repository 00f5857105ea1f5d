"""`audit`: from a data set to its faults, and to how many of these are noticed."""

from __future__ import annotations

import csv
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.arguments import checked
from vitascope.auditing import planted
from vitascope.auditing.duplicates import Pair, copies, duplicates, groups_of, near_duplicates
from vitascope.auditing.finding import ISSUES, Finding, Issue
from vitascope.auditing.labels import confusable_names, held_out_probabilities, wrong_labels
from vitascope.auditing.looks import Looks, look_at
from vitascope.auditing.page import Section, write_audit_page
from vitascope.auditing.planted import Planted
from vitascope.auditing.quality import quality_findings
from vitascope.auditing.shortcuts import groups, shortcuts
from vitascope.auditing.topics import off_topic
from vitascope.data.contents import first_of_content, image_name
from vitascope.data.datasets import read_data
from vitascope.data.decoding import ImageSource
from vitascope.data.frames import DataFrame, data_place
from vitascope.data.splits import ImageSet, Inventory
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions
from vitascope.errors import UserError, printable
from vitascope.evaluation.measure import data_frame
from vitascope.evaluation.novelty import other_kinds
from vitascope.formatting import counted
from vitascope.language import say
from vitascope.predict.compute import DEFAULT, Compute
from vitascope.predict.embed import with_progress
from vitascope.predict.engine import TorchEngine
from vitascope.predict.feature_stream import FeatureStream
from vitascope.predict.features import OWN
from vitascope.probing.classifiers import Features
from vitascope.probing.folds import Division
from vitascope.run.run import Run
from vitascope.storage import check_new_folder, explaining_failure, make_folder, replacing
from vitascope.weights.loading import from_pretrained

BODY = "cifar10"
"""The body that is always at hand."""
COLUMNS = ("image", "issue", "score", "detail", "suggestion")

Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class AuditResult:
    """The findings about N images, the worst of each issue first.

    Attributes:
        names: of the images, (N,).
        findings: in the order of `ISSUES`.
        planted: how many planted errors the checks notice.
        notes: why a check is missing, and what is known about the bodies.
        csv, page: the files.
    """

    names: Sequence[str]
    findings: Sequence[Finding]
    planted: Sequence[Planted]
    notes: Sequence[str]
    csv: Path
    page: Path
    seconds: float

    def rows(self) -> list[tuple[str, ...]]:
        """The findings as text, below `COLUMNS`; the image is empty for a class, a group or all images."""
        rows: list[tuple[str, ...]] = []
        for finding in self.findings:
            pair = "" if finding.other is None else f": {self.names[finding.other]}"
            action = f"relabel {finding.label}" if finding.label else finding.suggestion
            image = "" if finding.image is None else self.names[finding.image]
            rows.append((image, finding.issue, f"{finding.score:.4f}", f"{finding.detail}{pair}", action))
        return rows

    @property
    def counts(self) -> Counter[Issue]:
        """The findings of each issue."""
        return Counter(finding.issue for finding in self.findings)

    def lines(self) -> list[str]:
        """A line for each issue that was found or planted."""
        noticed = {each.issue: str(each) for each in self.planted}
        lines = [
            f"{issue:<15} {self.counts[issue]:>6,}  {noticed.get(issue, '')}".rstrip()
            for issue in ISSUES
            if self.counts[issue] or issue in noticed
        ]
        return [*lines, *self.notes]

    def to_dataframe(self) -> Any:
        """The findings as a pandas data frame; UserError without pandas."""
        return data_frame(dict(zip(COLUMNS, zip(*self.rows(), strict=True), strict=True)))

    def __repr__(self) -> str:
        return (
            f"AuditResult({counted(len(self.findings), 'finding')} about {counted(len(self.names), 'image')})"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Images:
    """All images of a data set, one part after the other."""

    all: ImageSet
    parts: npt.NDArray[np.str_]
    root: Path | str | None
    channels: int

    @classmethod
    def of(cls, inventory: Inventory, place: str) -> _Images:
        labelled = [images for images in inventory.sets if images.targets is not None and len(images)]
        sets = labelled or [images for images in inventory.sets if len(images)]
        if not sets:
            raise UserError(f"{place}: no images")
        parts = np.repeat([images.name for images in sets], [len(images) for images in sets])
        if labelled:
            names = tuple(dict.fromkeys(name for images in sets for name in images.class_names))
            sets = [images.in_classes(names, place) for images in sets]
            joined = reduce(ImageSet.followed_by, sets)
        else:
            joined = ImageSet("all", [source for images in sets for source in images.sources])
        return cls(joined.identified(), parts, inventory.root, inventory.channels)

    @property
    def names(self) -> list[str]:
        """The path of each image below the folder of the data, or its part and number."""
        paths = (image_name(source, self.root) for source in self.all.sources)
        return [
            printable(path) if path else f"{part} image {number}"
            for number, (path, part) in enumerate(zip(paths, self.parts, strict=True))
        ]

    def folders(self) -> npt.NDArray[np.str_]:
        """The folder of each image without the parts of its path that are a class or a split, (N,)."""
        known = {*self.all.class_names, "train", "val", "test", "all"}
        paths = [image_name(source, self.root).split("/")[:-1] for source in self.all.sources]
        return np.array(
            ["/".join(part for part in path if part not in known) for path in paths], dtype=np.str_
        )


@checked
def audit(
    data: DataFrame | str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    bodies: Sequence[str | os.PathLike[str]] = (BODY,),
    seed: int = 0,
    table: TableOptions = AS_RECOGNIZED,
    compute: Compute = DEFAULT,
) -> AuditResult:
    """Find what is wrong with the images of a data set, as `vitascope audit` does.

    Args:
        data: a DATA argument, with or without labels, or a DataFrame.
        out: a new folder for `audit.csv` and `audit.html`.
        bodies: MODEL arguments whose features are compared; the first one's tell what is alike and off-topic.
        seed: of the folds, and of what is planted.
        table: how a table is read.
        compute: how features are computed, as for `embed`.

    Raises:
        UserError: no such data or model, no image that can be read, a folder with files.
    """
    began, folder = time.monotonic(), Path(out)
    check_new_folder(folder)
    if not bodies:
        raise UserError("no body: name at least one MODEL, or leave bodies out")
    engines = [
        TorchEngine(from_pretrained(body), precision=compute.precision, device=compute.device)
        for body in bodies
    ]
    with data_place(data, table) as place:
        images = _Images.of(read_data(place, table), place)
        looks = look_at(images.all.sources)
        usable, features = _features(engines, images.all, looks, compute)
        notes = _seen(bodies, images.all)
        findings = quality_findings(looks, images.all.sources)
        looked = looks.take(usable)
        near = near_duplicates(looked, features[0])
        seen = _Seen(images, usable, looked, features, near, engines[0], seed)
        more, experiments = _of_pictures(seen, Counter(finding.issue for finding in findings))
        findings += more
        if images.all.targets is None:
            notes.append("without labels there is no check of labels, shortcuts and groups")
        else:
            more, of_labels = _of_labels(seen, notes)
            findings += more
            experiments += of_labels
        ordered = sorted(findings, key=lambda finding: (ISSUES.index(finding.issue), -finding.score))
        found = AuditResult(
            names=images.names,
            findings=ordered,
            planted=experiments,
            notes=notes,
            csv=folder / "audit.csv",
            page=folder / "audit.html",
            seconds=time.monotonic() - began,
        )
        make_folder(folder)
        with explaining_failure(folder, "the audit", "make room, then run the same command again"):
            _write(found, images, place)
    return found


def _features(
    engines: Sequence[TorchEngine], images: ImageSet, looks: Looks, compute: Compute
) -> tuple[Integers, list[Features]]:
    """The images that can be read, (n,), and their features of each body, (n, D)."""
    usable = np.flatnonzero(looks.readable)
    sources = [images.sources[index] for index in usable.tolist()]
    if not sources:
        raise UserError(
            f"none of {counted(len(images), 'image')} can be read: {next(iter(looks.reasons.values()))}"
        )
    kept, features = np.ones(len(sources), dtype=np.bool_), []
    for engine in engines:
        stream = FeatureStream(engine, [OWN], sources, compute)
        with closing(with_progress(stream)) as rows:
            blocks = list(rows)
        found = np.zeros((len(sources), blocks[0].features[0].shape[1]), dtype=np.float32)
        for block in blocks:
            found[block.indices] = block.features[0]
        kept[list(stream.unreadable)] = False  # such as a picture that has vanished since it was looked at
        features.append(found)
    return usable[kept], [vectors[kept] for vectors in features]


def _seen(bodies: Sequence[str | os.PathLike[str]], images: ImageSet) -> list[str]:
    """A line about each body that was trained on some of these images."""
    lines = []
    for body in bodies:
        run = Run.of_model(body)
        count = int(run.split_record().trained_on(images).sum()) if run is not None else 0
        if count:
            lines.append(
                f"{os.fspath(body)} was trained on {counted(count, 'image')} of these: it believes their "
                "labels, so wrong ones are noticed less"
            )
    return lines


@dataclasses.dataclass(frozen=True, eq=False)
class _Seen:
    """The images that can be read, n of all N."""

    images: _Images
    places: Integers  # among all, (n,)
    looks: Looks
    features: Sequence[Features]  # of each body, (n, D)
    near: Sequence[Pair]
    engine: TorchEngine
    seed: int

    @property
    def sources(self) -> list[ImageSource]:
        """The images."""
        return [self.images.all.sources[place] for place in self.places.tolist()]

    def embed(self, pictures: Sequence[ImageSource]) -> Features:
        """Features (m, D) of other pictures, by the first body."""
        vectors = self.engine.features_of_pictures(self.engine.read(pictures)[0])[0]
        return vectors.cpu().numpy()


def _of_pictures(seen: _Seen, listed: Mapping[Issue, int]) -> tuple[list[Finding], list[Planted]]:
    """What needs no labels, and how much of it is noticed; `listed` pictures have faults of quality."""
    everything, near = seen.images.all, [pair.at(seen.places) for pair in seen.near]
    labels = None
    if everything.targets is not None:
        labels = ["; ".join(names) for names in everything.targets.names()]
    findings = duplicates(copies(everything.contents), near, seen.images.parts.tolist(), labels)
    findings += [finding.at(seen.places) for finding in off_topic(seen.features[0])]
    if len(seen.places) < 2:
        return findings, []
    some = planted.sample_of(len(seen.places), seen.seed)
    sources, looks = [seen.sources[place] for place in some], seen.looks.take(some)
    vectors = seen.features[0][some]
    kinds = other_kinds(everything.class_names, seen.images.channels)
    return findings, [
        planted.near_copies_noticed(sources, looks, vectors, seen.embed, seen.seed),
        planted.foreign_noticed(vectors, kinds, seen.embed),
        *planted.faults_noticed(sources, looks, listed, seen.seed),
    ]


def _of_labels(seen: _Seen, notes: list[str]) -> tuple[list[Finding], list[Planted]]:
    """What is wrong with the labels, and what tells them; adds notes on checks that cannot be done."""
    targets = seen.images.all.truth.take(seen.places)
    contents, bound = seen.images.all.contents[seen.places], seen.images.all.groups
    bound = bound[seen.places] if len(bound) else bound
    near = groups_of(seen.near, len(targets))
    division = Division.of(targets, bound, first_of_content(contents), near)
    findings, experiments, probabilities = list[Finding](), list[Planted](), None
    rows = _of_common_classes(division)
    try:
        known = division.take(rows)
        held_out = held_out_probabilities([vectors[rows] for vectors in seen.features], known, seen.seed)
    except UserError as error:
        notes.append(f"no check of labels: {error}")
    else:
        wrong = wrong_labels(known.targets, held_out)
        findings += [finding.at(rows).at(seen.places) for finding in wrong]
        some = planted.sample_of(len(rows), seen.seed)
        vectors = [vectors[rows[some]] for vectors in seen.features]
        if (experiment := planted.wrong_labels_noticed(vectors, known.take(some), seen.seed)) is not None:
            experiments.append(experiment)
        if len(rows) == len(targets):
            probabilities = held_out
        else:
            rare = counted(len(targets) - len(rows), "label")
            notes.append(f"no check of {rare} of classes with one image or group")
    findings += confusable_names(targets, probabilities)
    findings += shortcuts(seen.looks, targets, seen.images.folders()[seen.places], bound)
    findings += groups(targets, seen.images.parts[seen.places], bound, probabilities)
    return findings, experiments


def _of_common_classes(division: Division) -> Integers:
    """The images that are not the only one, or of the only group, of their class, (n,)."""
    targets = division.targets
    if not targets.exclusive:
        return np.arange(len(targets))
    common = [images for images in targets.by_class() if len(np.unique(division.sets[images])) > 1]
    return np.sort(np.concatenate(common)) if common else np.arange(0)


def _write(found: AuditResult, images: _Images, place: str) -> None:
    """Write both files."""
    with replacing(found.csv) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(found.rows())
    noticed = {each.issue: each for each in found.planted}
    sections = []
    for issue in ISSUES:
        experiment, listed = noticed.get(issue), [each for each in found.findings if each.issue == issue]
        if not listed and experiment is None:
            continue
        headline = "" if experiment is None else str(experiment)
        if experiment is not None and experiment.little:
            few = say("This check notices little in these data, so its findings are in audit.csv alone.")
            headline, listed = f"{few} {headline}", []
        sections.append(Section(issue, headline, listed))
    affected = {each.image for each in found.findings if each.image is not None}
    tiles = [
        (f"{len(found.names):,}", say("images")),
        (f"{len(affected):,}", say("images with a finding")),
        (f"{len(found.findings):,}", say("findings")),
    ]
    write_audit_page(
        found.page,
        title=say("Audit of {data}", data=Path(place).name or place),
        tiles=tiles,
        sections=sections,
        images=images.all,
        parts=images.parts.tolist(),
        root=images.root,
    )
