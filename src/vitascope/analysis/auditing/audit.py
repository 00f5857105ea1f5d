"""`audit`: from a data set to its faults, and to how many of these are noticed."""

import csv
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt

from vitascope.analysis.auditing import planted
from vitascope.analysis.auditing.labels import confusable_names, held_out_probabilities, wrong_labels
from vitascope.analysis.auditing.page import write_audit_page
from vitascope.analysis.auditing.planted import Planted
from vitascope.analysis.auditing.quality import quality_findings, quality_scores
from vitascope.analysis.auditing.shortcuts import groups, shortcuts
from vitascope.analysis.auditing.topics import off_topic, off_topic_scores
from vitascope.analysis.probing.label_errors import Probabilities
from vitascope.arguments import Range, checked
from vitascope.data.contents import first_of_content, image_name
from vitascope.data.datasets import read_data
from vitascope.data.decisions import COLUMNS as DECISION_COLUMNS
from vitascope.data.decisions import Decisions, decided_names
from vitascope.data.duplicates import duplicates, groups_of, near_duplicates
from vitascope.data.features.embed import embed
from vitascope.data.finding import ISSUES, Finding, Issue
from vitascope.data.folds import Division
from vitascope.data.frames import DataFrame, data_place
from vitascope.data.looks import look_at
from vitascope.data.reading import Faults
from vitascope.data.rows.cells import csv_text
from vitascope.data.splits import ImageSet, Inventory
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions
from vitascope.errors import UserError, check_choice
from vitascope.formatting import SEPARATOR, counted
from vitascope.language import say
from vitascope.models.engines.compute import DEFAULT, Compute
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.weights.loading import from_pretrained
from vitascope.storage import check_new_folder, explaining_failure, new_folder, replacing
from vitascope.training.evaluation.novelty import other_kinds
from vitascope.training.linear.classifiers import Features
from vitascope.training.run.run import Run

BODY = "cifar10"
"""The body that is always at hand."""
COLUMNS = ("image", "content", "issue", "score", "detail", "suggestion", "decision", "label")
"""Of audit.csv, which is a file of decisions once the column `decision` is filled in."""

Integers = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]
Texts = npt.NDArray[np.str_]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class AuditResult:
    """The findings about N images, the worst of each issue first.

    Attributes:
        names: of the images in files of decisions, (N,).
        contents: of the images, from `contents_of`, as text, (N,).
        findings: in the order of `ISSUES`.
        planted: how many planted errors the checks notice.
        notes: why a check is missing, and what is known about the bodies.
        csv, page: the files.
        scores: a table with the scores of each image by every check, and one of each class.
    """

    names: Sequence[str]
    contents: Sequence[str]
    findings: Sequence[Finding]
    planted: Sequence[Planted]
    notes: Sequence[str]
    csv: Path
    page: Path
    scores: tuple[Path, ...]
    seconds: float

    def rows(self) -> list[tuple[str, ...]]:
        """The findings as text, below `COLUMNS`; the image is empty for a class, a group or all images. The
        label is the suggested one, and the decision is empty."""
        rows: list[tuple[str, ...]] = []
        for finding in self.findings:
            image, *other = [self.names[place] for place in finding.images] or [""]
            content = "" if finding.image is None else self.contents[finding.image]
            detail = csv_text(": ".join([finding.detail, *other]))
            score, label = f"{finding.score:.4f}", csv_text(finding.label)
            rows.append(
                (csv_text(image), content, finding.issue, score, detail, finding.suggestion, "", label)
            )
        return rows

    def accept(
        self, path: str | os.PathLike[str], issues: Sequence[str] = ISSUES, *, score: float = 0.0
    ) -> int:
        """Write a file of decisions that accepts the suggestions to drop or relabel of some issues, from a
        score on; returns their number. Of several suggestions for an image, the first issue's holds.

        Raises:
            UserError: an unknown issue; a failure to write.
        """
        for issue in issues:
            check_choice("issue", issue, ISSUES)
        accepted: dict[int, tuple[str, ...]] = {}
        for finding in self.findings:
            if finding.issue in issues and finding.score >= score and finding.image is not None:
                if not finding.drop and not finding.label:
                    continue
                place, choice = finding.image, "relabel" if finding.label else "drop"
                accepted.setdefault(place, (self.names[place], self.contents[place], choice, finding.label))
        with explaining_failure(Path(path), "the decisions", "choose another place"):
            _write_csv(Path(path), [DECISION_COLUMNS, *accepted.values()])
        return len(accepted)

    @property
    def counts(self) -> Counter[Issue]:
        """The findings of each issue."""
        return Counter(finding.issue for finding in self.findings)

    def lines(self) -> list[str]:
        """A line for each issue that was found or planted, and below it what was noticed of the planted."""
        noticed = {errors.issue: errors for errors in self.planted}
        lines = []
        for issue in ISSUES:
            if self.counts[issue] or issue in noticed:
                lines.append(f"{issue:<15} {self.counts[issue]:>6,}")
            if issue in noticed:
                little = " That is little: the page leaves its list to audit.csv."
                lines.append(f"  {noticed[issue]}{little if noticed[issue].little else ''}")
        return [*lines, *self.notes]

    def __repr__(self) -> str:
        return (
            f"AuditResult({counted(len(self.findings), 'finding')} about {counted(len(self.names), 'image')})"
        )


@checked
def audit(
    data: DataFrame | str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    bodies: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (BODY,),
    seed: Annotated[int, Range(ge=0, lt=2**63)] = 0,
    table: TableOptions = AS_RECOGNIZED,
    compute: Compute = DEFAULT,
) -> AuditResult:
    """Find what is wrong with the images of a data set, as `vitascope audit` does.

    Args:
        data: a DATA argument, with or without labels, or a DataFrame.
        out: a new folder for `audit.csv`, `audit.html`, `images.csv` and `classes.csv`.
        bodies: one or several MODEL arguments whose features are compared; the first one's tell what is alike
            and off-topic.
        seed: of the folds, and of what is planted.
        table: how a table is read.
        compute: how features are computed, as for `embed`.

    Raises:
        UserError: no such data or model, no image that can be read, a folder with files.
    """
    began, folder = time.monotonic(), Path(out)
    check_new_folder(folder)
    bodies = [bodies] if isinstance(bodies, str | os.PathLike) else bodies
    if not bodies:
        raise UserError("no body: name at least one MODEL, or leave bodies out")
    precision, device = compute.precision, compute.device  # of the engines, which `embed` takes as they are
    engines = [TorchEngine(from_pretrained(body), precision=precision, device=device) for body in bodies]
    compute = dataclasses.replace(compute, precision="auto", device="auto")
    with data_place(data, table) as place:
        inventory = read_data(place, table)
        images, parts = _joined(inventory, place)
        looks, notes = look_at(images.sources), _seen(bodies, images)
        paths = [image_name(source, inventory.root) for source in images.sources]
        names = decided_names(images.sources, inventory.root, images.contents)
        readable = np.flatnonzero(looks["width"])
        if several := int((looks["pages"] > 1).sum()):
            notes.append(f"{counted(several, 'image')} of several pages or frames: the first counts")
        if not len(readable):
            reasons = [f"{path}: {reason}" for path, reason in zip(paths, looks["reason"], strict=True)]
            Faults.of(len(looks), reasons).check_some()
        some, parts_of_some = images.subset("all", readable), parts[readable]
        embeddings = [embed(engine, some.sources, compute=compute) for engine in engines]
        if reasons := [reason for embedded in embeddings for reason in embedded.unreadable]:
            raise UserError(f"{reasons[0]}; it was readable before: repair or remove the image")
        features = [embedded.features for embedded in embeddings]
        quality, foreign = quality_scores(looks[readable]), off_topic_scores(features[0])
        findings, near = quality_findings(looks, quality), near_duplicates(looks[readable], features[0])
        experiments = planted.pictures_noticed(
            some.sources,
            looks[readable],
            features[0],
            kinds=other_kinds(images.class_names, inventory.channels),
            listed=Counter(finding.issue for finding in findings),
            embed=lambda pictures: embed(engines[0], pictures).features,
            seed=seed,
        )
        labels = None if some.targets is None else list(map("; ".join, some.targets.names()))
        more = duplicates(some.contents, near, parts_of_some.tolist(), labels) + off_topic(foreign)
        wrong = np.full(len(readable), np.nan)
        if some.targets is None:
            notes.append("without labels there is no check of labels, shortcuts and groups")
        else:
            groups_of_some = groups_of(near, len(some))
            of_labels, planted_labels, probabilities, wrong = _of_labels(
                some, features, groups_of_some, notes, seed
            )
            folders = _folders(paths, images.class_names)[readable]
            more += of_labels + confusable_names(some.targets, probabilities)
            more += shortcuts(looks[readable], some.targets, folders, some.groups)
            more += groups(some.targets, parts_of_some, some.groups, probabilities)
            experiments += planted_labels
        findings += [finding.at(readable) for finding in more]
        if table.audit is not None:
            settled = Decisions.read(table.audit).settle(names, images.contents)
            still = [finding for finding in findings if finding.image is None or not settled[finding.image]]
            if again := len(findings) - len(still):
                notes.append(f"not listed: {counted(again, 'finding')} on images that are kept or relabelled")
            findings = still
        result = AuditResult(
            names=names,
            contents=list(map(bytes.decode, images.contents.tolist())),
            findings=sorted(findings, key=lambda finding: (ISSUES.index(finding.issue), -finding.score)),
            planted=experiments,
            notes=notes,
            csv=folder / "audit.csv",
            page=folder / "audit.html",
            scores=(folder / "images.csv", *[folder / "classes.csv"] * (images.targets is not None)),
            seconds=time.monotonic() - began,
        )
        judged: dict[Issue, Scores] = {"label": wrong, "off-topic": foreign, **quality}
        scores = {issue: np.full(len(looks), float(issue == "unreadable") or np.nan) for issue in judged}
        for issue, values in judged.items():
            scores[issue][readable] = values
        advice = "make room, then run the same command again"
        with new_folder(folder), explaining_failure(folder, "the audit", advice):
            _write_csv(result.csv, [COLUMNS, *result.rows()])
            for file, rows in zip(result.scores, _tables(result, images, parts, scores), strict=False):
                _write_csv(file, rows)
            title = say("Audit of {data}", data=Path(place).name or place)
            write_audit_page(
                result.page,
                title,
                result.findings,
                result.planted,
                images=images,
                parts=parts.tolist(),
                root=inventory.root,
            )
    return result


def _joined(inventory: Inventory, place: str) -> tuple[ImageSet, Texts]:
    """All labelled images, or all without labels, one part after the other, and the part of each, (N,)."""
    labelled = [images for images in inventory.sets if images.targets is not None and len(images)]
    sets = labelled or [images for images in inventory.sets if len(images)]
    if not sets:
        raise UserError(f"{place}: no images")
    parts = np.repeat([images.name for images in sets], [len(images) for images in sets])
    if not labelled:
        return ImageSet("all", [source for images in sets for source in images.sources]).identified(), parts
    names = tuple(dict.fromkeys(name for images in sets for name in images.class_names))
    alike = [images.in_classes(names, place) for images in sets]
    return reduce(ImageSet.followed_by, alike).identified(), parts


def _write_csv(path: Path, rows: Iterable[Sequence[str]]) -> None:
    with replacing(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _tables(
    result: AuditResult, images: ImageSet, parts: Texts, scores: Mapping[Issue, Scores]
) -> Iterator[list[Sequence[str]]]:
    """The scores of each image by every check, from 0 to 1, the highest the worst; empty where it did not
    judge. And of each class its images, the labels that are listed, and the means of these scores."""
    labels = [()] * len(images) if images.targets is None else images.targets.names()
    cells = [["" if np.isnan(value) else f"{value:.4f}" for value in values] for values in scores.values()]
    texts = map(csv_text, map(SEPARATOR.join, labels))
    columns = (map(csv_text, result.names), result.contents, parts.tolist(), texts, *cells)
    yield [("image", "content", "part", "classes", *scores), *zip(*columns, strict=True)]
    if images.targets is None:
        return
    listed = {finding.image for finding in result.findings if finding.issue == "label"}
    rows: list[Sequence[str]] = [("class", "images", "labels listed", *scores)]
    for name, members in zip(images.class_names, images.targets.by_class(), strict=True):
        judged = [values[members][~np.isnan(values[members])] for values in scores.values()]
        means = [f"{values.mean():.4f}" if len(values) else "" for values in judged]
        rows.append((csv_text(name), str(len(members)), str(len(listed & {*members.tolist()})), *means))
    yield rows


def _folders(paths: Sequence[str], class_names: Sequence[str]) -> Texts:
    """The folder of each image without the parts of its path that are a class or a split, (N,)."""
    names = {*class_names, "train", "val", "test", "all"}
    return np.array(["/".join(part for part in path.split("/")[:-1] if part not in names) for path in paths])


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


def _of_labels(
    images: ImageSet, features: Sequence[Features], near: Integers, notes: list[str], seed: int
) -> tuple[list[Finding], list[Planted], Probabilities | None, Scores]:
    """Labels that may be wrong, how many are noticed, the out-of-fold probabilities if all images have some,
    and for each image the probability that a label of it is wrong, (N,), NaN where it is not known; adds
    notes on labels that cannot be checked. `near` are groups of near-duplicates."""
    targets = images.truth
    division = Division.of(targets, images.groups, first_of_content(images.contents), near)
    rows, wrong = _of_common_classes(division), np.full(len(targets), np.nan)
    try:
        common = division.take(rows)
        probabilities = held_out_probabilities([vectors[rows] for vectors in features], common, seed)
    except UserError as error:
        notes.append(f"no check of labels: {error}")
        return [], [], None, wrong
    wrong[rows] = 1 - common.targets.self_confidence(probabilities).min(axis=1)
    findings = [finding.at(rows) for finding in wrong_labels(common.targets, probabilities)]
    sample = planted.sample_of(len(rows), seed)
    sample = sample[_of_common_classes(common.take(sample))]
    vectors = [vectors[rows[sample]] for vectors in features]
    try:
        experiments = planted.wrong_labels_noticed(vectors, common.take(sample), seed)
    except UserError as error:  # a changed label was one of the last two groups of its class
        notes.append(f"no wrong labels are planted: {error}")
        experiments = []
    if len(rows) == len(targets):
        return findings, experiments, probabilities, wrong
    rare = counted(len(targets) - len(rows), "label")
    notes.append(f"no check of {rare} of classes with one image or group")
    return findings, experiments, None, wrong


def _of_common_classes(division: Division) -> Integers:
    """The images that are not the only one, or of the only group, of their class, (n,)."""
    classes = division.targets.by_class() if division.targets.strata is not None else []
    rare = [images for images in classes if len(np.unique(division.sets[images])) == 1]
    return np.setdiff1d(np.arange(len(division.targets)), np.concatenate([np.arange(0), *rare]))
