"""Several runs side by side: their options, results, and paired tests on the same images."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from vitascope.analysis.report.overview import option_text
from vitascope.data.average_precision import paired_difference
from vitascope.data.contents import UNREADABLE
from vitascope.data.measures import Score, mcnemar
from vitascope.data.splits import OUT_OF_FOLD
from vitascope.errors import UserError, printable
from vitascope.formatting import aligned, counted, duration, pandas_library
from vitascope.layout import has_model
from vitascope.models.configuration import traits
from vitascope.models.weights.identification import pretrained_config
from vitascope.training.options.groups import Recorded
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.environment import without_home
from vitascope.training.run.run import Run

MAX_RUNS = 24
"""Runs in a comparison: more curves cannot be told apart."""
SIGNIFICANT = 0.05
"""Largest p-value of a significant difference."""
_RECORDS = {"run", *traits(TrainConfig, Recorded)}
"""What a run sets itself: the runs did not ask for it."""
_MOMENT = {"started", "command"}
"""Records of the environment that differ between all runs."""
_SPEED = {"cpu", "gpu", "device", "cores", "threads", "processes"}
"""Records of the environment that training time depends on."""
_WIDEST = 40  # characters of an option's value


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of the runs; what it has not recorded is None."""

    name: str
    """The folder's name, or the whole path if two folders have the same name."""
    run: Run = dataclasses.field(repr=False)
    epochs: tuple[Mapping[str, Any], ...] = dataclasses.field(repr=False)
    """The metrics of each epoch; see `MetricsWriter`."""
    test: Mapping[str, Any]
    """The metrics of the final test; empty before it."""
    score: Score | None
    """The score on the test images, if it is a finished classifier."""
    parameters: int | None
    flops: int | None
    """FLOPs of one image's forward pass; a multiply-add counts as 2."""

    @classmethod
    def read(cls, run: Run, name: str) -> Self:
        """Read a run folder; a broken file is a `UserError`."""
        tests, predictions = run.records("test"), run.predictions if run.finished else None
        model = run.model_folder if run.finished else run.best
        config = pretrained_config(model) if has_model(model) else None
        return cls(
            name=name,
            run=run,
            epochs=tuple(run.records("epoch")),
            test=tests[-1] if tests and run.finished else {},
            score=None if predictions is None else predictions.score,
            parameters=None if config is None else config.num_parameters,
            flops=None if config is None else config.flops,
        )

    @property
    def measure(self) -> str | None:
        """The name of `result`: `accuracy`, `mAP` if images may have several classes, or, of a pre-training,
        `correct colours`; None while it is unknown."""
        if not self.run.classifies:
            return "correct colours"
        if self.score is not None:
            return self.score.measure
        return None if not self.epochs else "mAP" if "val_map" in self.epochs[0] else "accuracy"

    @property
    def result(self) -> float | None:
        """The `measure` on the test images."""
        if self.score is not None:
            return self.score.value_and_limits[0]
        return self.test.get("accuracy")

    @property
    def seconds(self) -> float | None:
        """Training time, with validation."""
        return (self.test or (self.epochs[-1] if self.epochs else {})).get("seconds")

    @property
    def progress(self) -> str:
        """The number of epochs; of an unfinished run, also the planned one."""
        done, planned = self.run.epochs_done, self.run.planned_epochs
        return f"{done:.6g}" if self.run.finished or planned is None else f"{done:.6g} of {planned:g}"

    def cells(self) -> tuple[str, ...]:
        """The row in the table of results; see `RunComparison.results`."""
        low, high = (None, None) if self.score is None else self.score.value_and_limits[1:]
        return (
            self.name,
            self.progress,
            _text("{:.2%}", self.result),
            _text("{:.1%} to {:.1%}", low, high),
            _text("{:.2%}", None if self.score is None else self.score.mean_of_classes),
            _text("{:.3f}", self.test.get("loss")),
            "" if self.seconds is None else duration(self.seconds),
            _text("{:,}", self.parameters),
            _text("{:,.1f}", None if self.flops is None else self.flops / 1e6),
        )

    def to_dict(self) -> dict[str, Any]:
        """The run as plain values: all measures of its test, and the records of its epochs."""
        return {
            "run": self.name,
            "path": self.run.ref,
            "finished": self.run.finished,
            "epochs": self.run.epochs_done,
            "planned_epochs": self.run.planned_epochs,
            **{name: value for name, value in self.test.items() if name not in ("kind", "step")},
            **({} if self.score is None else self.score.summary()),
            "seconds": self.seconds,
            "parameters": self.parameters,
            "flops": self.flops,
            "curve": [dict(epoch) for epoch in self.epochs],
        }


def _text(style: str, *values: float | None) -> str:
    return "" if None in values else style.format(*values)


SeedGroup = Mapping[str, Any]
"""Tested runs with the same options except for the seed: `runs`, `seeds`, and their `results` (accuracies, or
mAPs; see `ComparedRun.measure`) with `mean` and sample standard deviation, `std`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedTest:
    """A run beside the best one on the images that both were tested on.

    One class per image: McNemar's exact test of correct predictions. Several: the difference of the mAPs over
    the same bootstrap samples of the images; see `paired_difference`.
    """

    run: str
    images: int = 0
    """The number of common images."""
    difference: float = 0.0
    """The accuracy, or mAP, of this run minus the best run's, on the common images."""
    p: float | None = None
    """Two-sided p-value of equally good runs; None if there is no test."""
    only_best: int | None = None
    """Images that the best run alone predicts correctly."""
    only_run: int | None = None
    """Images that this run alone predicts correctly."""
    interval: tuple[float, float] | None = None
    """The 95% interval of the difference of the mAPs."""
    reason: str = ""
    """The reason if there is no test."""

    @property
    def verdict(self) -> str:
        """`worse` or `better` than the best run, `not significant`, or the reason if there is no test."""
        if self.p is None:
            return f"no test: {self.reason}"
        if self.p > SIGNIFICANT:
            return "not significant"
        return "better" if self.difference > 0 else "worse"

    def cells(self) -> tuple[str, ...]:
        """The row in the table of tests, below `RunComparison.paired_head`."""
        if self.p is None:
            return (self.run, "", "", "", "", self.verdict)
        numbers = f"{self.only_best}", f"{self.only_run}"
        if self.interval is not None:
            numbers = f"{self.difference:+.2%}", "{:+.1%} to {:+.1%}".format(*self.interval)
        p = f"{self.p:.4f}" if self.p >= 1e-4 else "< 0.0001"
        return (self.run, f"{self.images:,}", *numbers, p, self.verdict)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RunComparison:
    """Several runs of one task, in the order in which they were given."""

    runs: tuple[ComparedRun, ...]
    options: Mapping[str, tuple[Any, ...]]
    """The values of each option that differs, per run."""
    environment: Mapping[str, tuple[Any, ...]]
    """The same for versions and machines."""
    groups: tuple[SeedGroup, ...]
    best: str | None
    """If two classifiers are tested, the one with the highest test result and then the lowest test loss."""
    paired: tuple[PairedTest, ...]
    """The other tested classifiers beside the best one."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Self:
        """Compare opened runs; errors as `compare`."""
        if not 2 <= len(runs) <= MAX_RUNS or len({run.path.resolve() for run in runs}) < len(runs):
            named = ", ".join(run.ref for run in runs) or "none"
            raise UserError(f"a comparison takes 2 to {MAX_RUNS} different runs, not {named}")
        short = [run.name for run in runs]
        names = short if len(set(short)) == len(short) else [without_home(run.ref) for run in runs]
        pairs = zip(runs, names, strict=True)
        compared = tuple(ComparedRun.read(run, printable(name)) for run, name in pairs)
        kinds = {run.run.classifies: run for run in compared}
        if len(kinds) == 1:
            kinds = {run.measure == "mAP": run for run in compared if run.measure is not None}
        if len(kinds) > 1:
            texts = (f"{run.run.ref} by {run.measure or 'the classes of images'}" for run in kinds.values())
            raise UserError(f"runs of one kind can be compared, and these are measured {', '.join(texts)}")
        probed = {name for run in runs if run.probes for name in run.config}
        of_trainings = {name for run in runs for name in run.config} - probed if probed else set()
        tested = [run for run in compared if run.score is not None]
        best = max(tested, key=_rank) if len(tested) > 1 else None
        return cls(
            runs=compared,
            options=_differences([_set(run.config) for run in runs], _RECORDS | of_trainings),
            environment=_differences([run.environment for run in runs], _MOMENT),
            groups=tuple(_seed_groups(compared)),
            best=None if best is None else best.name,
            paired=() if best is None else tuple(_paired_tests(tested, best)),
        )

    @property
    def classifies(self) -> bool:
        """Whether the runs learn classes; otherwise, they are pre-trained."""
        return self.runs[0].run.classifies

    @property
    def measure(self) -> str:
        """The measure of the runs; see `ComparedRun.measure`."""
        return next((run.measure for run in self.runs if run.measure is not None), "accuracy")

    def results(self) -> list[tuple[str, ...]]:
        """The table of results as text, with its head and without columns that are empty for all runs."""
        splits = {run.test["split"] for run in self.runs if run.test}
        split = f"{splits.pop()} " if len(splits) == 1 else ""
        by_class = "macro F1" if self.measure == "mAP" else "balanced"
        middle = (f"{split * self.classifies}{self.measure}", "95% interval", by_class, f"{split}loss")
        head = ("run", "epochs", *middle, "training time", "parameters", "MFLOPs")
        columns = zip(head, *(run.cells() for run in self.runs), strict=True)
        return list(zip(*(column for column in columns if any(column[1:])), strict=True))

    @property
    def paired_head(self) -> tuple[str, ...]:
        """The columns of `PairedTest.cells`."""
        numbers = f"only {self.best} right", "only this right"
        if self.measure == "mAP":
            numbers = f"mAP less that of {self.best}", "95% interval"
        return ("run", "common images", *numbers, "p", "verdict")

    @property
    def summary(self) -> str:
        """The best run and those that do not differ significantly from it, in words."""
        if self.best is None:
            return f"{counted(len(self.runs), 'training' if self.classifies else 'pre-training')}."
        result = next(run.result for run in self.runs if run.name == self.best)
        rivals = ", ".join(test.run for test in self.paired if test.verdict == "not significant")
        text = f"Highest {self.measure}: {self.best}, {result:.2%}."
        return f"{text} Not significantly different: {rivals}." if rivals else text

    def difference_rows(self) -> list[tuple[str, ...]]:
        """The options and records of the environment that differ, as text: name and a value per run."""
        rows = {**self.options, **self.environment}
        return [
            (name, *(printable(without_home(option_text(value)), _WIDEST) for value in values))
            for name, values in rows.items()
        ]

    def notes(self) -> list[str]:
        """What to know when reading the results."""
        lines = [f"{run.name} has not finished." for run in self.runs if not run.run.finished]
        on_val = [run.name for run in self.runs if run.test.get("split") == "val"]
        if on_val and self.classifies:
            lines.append(
                f"{', '.join(on_val)}: measured on the validation images, which also selected the weights."
            )
        if "target" in self.options and not self.classifies:
            lines.append("Losses of different targets cannot be compared.")
        if machines := sorted(_SPEED & self.environment.keys()):
            lines.append(f"Training times cannot be compared: the runs differ in {', '.join(machines)}.")
        return lines

    def text(self) -> str:
        """The comparison for a terminal."""
        parts = [[*aligned(self.results()), *map(_in_words, self.groups)]]
        if rows := self.difference_rows():
            head = ("differs", *(printable(run.name, _WIDEST) for run in self.runs))
            parts.append([*aligned([head, *rows])])
        if self.paired:
            method = "bootstrap" if self.measure == "mAP" else "McNemar's, exact"
            title = f"Paired test on the same images ({method}), against {self.best}:"
            note = "p is not corrected for the number of runs, and knows nothing of other seeds."
            rows = [self.paired_head, *(test.cells() for test in self.paired)]
            parts.append([title, *aligned(rows, left={0, len(self.paired_head) - 1}), note])
        parts.append([*self.notes(), self.summary])
        return "\n\n".join("\n".join(lines) for lines in parts)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values, for `--json`."""
        return {
            "runs": [run.to_dict() for run in self.runs],
            "options": {name: list(values) for name, values in self.options.items()},
            "environment": {name: list(values) for name, values in self.environment.items()},
            "groups": [dict(group) for group in self.groups],
            "best": self.best,
            "paired": [{**dataclasses.asdict(test), "verdict": test.verdict} for test in self.paired],
            "notes": self.notes(),
        }

    def to_dataframe(self) -> Any:
        """The results as a pandas data frame, one row per run; UserError without pandas."""
        rows = [run.to_dict() for run in self.runs]
        return pandas_library().DataFrame(rows).drop(columns="curve").set_index("run")

    def __repr__(self) -> str:
        return f"RunComparison({', '.join(run.name for run in self.runs)}; best: {self.best})"


def _differences(records: Sequence[Mapping[str, Any]], left_out: set[str]) -> dict[str, tuple[Any, ...]]:
    """The values that are not the same in all records; None where one is missing."""
    names = dict.fromkeys(name for record in records for name in record if name not in left_out)
    values = {name: tuple(record.get(name) for record in records) for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, [], {})}


def seed_group(run: Run) -> str:
    """A key that runs share whose options are the same except for the seed."""
    shared = {name: value for name, value in _set(run.config).items() if name not in {"seed", *_RECORDS}}
    return json.dumps(shared, sort_keys=True, default=str)


def _seed_groups(runs: Sequence[ComparedRun]) -> Iterator[SeedGroup]:
    members: dict[str, list[ComparedRun]] = {}
    for run in runs:
        if run.result is not None:
            members.setdefault(seed_group(run.run), []).append(run)
    for group in members.values():
        if len(group) > 1:
            results = [run.result for run in group if run.result is not None]
            yield {
                "runs": [run.name for run in group],
                "seeds": [run.run.config["seed"] for run in group],
                "results": results,
                "mean": float(np.mean(results)),
                "std": float(np.std(results, ddof=1)),
            }


def _in_words(group: SeedGroup) -> str:
    names = f"{', '.join(group['runs'])} (seeds {', '.join(map(str, group['seeds']))})"
    low, high = min(group["results"]), max(group["results"])
    return f"{names}: mean {group['mean']:.2%}, lowest {low:.2%}, highest {high:.2%}"


def _rank(run: ComparedRun) -> tuple[float, float]:
    """The result of a tested classifier, and then its loss: higher is better."""
    assert run.score is not None
    return run.score.value_and_limits[0], -run.test.get("loss", math.inf)


def _paired_tests(tested: Sequence[ComparedRun], best: ComparedRun) -> Iterator[PairedTest]:
    places = {run.name: _places(run.run) for run in tested}
    for run in tested:
        unknown = [name for name in (best.name, run.name) if places[name] is None]
        if unknown and run is not best:
            reason = f"the predictions of {unknown[0]} do not fit its record of the split"
            yield PairedTest(run=run.name, reason=reason)
        elif run is not best:
            yield _paired_test(run, best, places[run.name] or {}, places[best.name] or {})


_Image = tuple[bytes, tuple[str, ...], int]
"""Content and sorted classes of an image, and the number of this copy of it: runs may have other splits, and
the data may lie elsewhere now."""


def _places(run: Run) -> dict[_Image, int] | None:
    """The place of each test image in a classifier's predictions; None if they do not fit its split."""
    predictions, record = run.predictions, run.split_record()
    assert predictions is not None
    split = "train" if predictions.split == OUT_OF_FOLD else predictions.split
    part, indices = record.parts.get(split), predictions.indices
    targets = None if part is None else part.targets
    fits = targets is not None and int(indices.max()) < len(targets)
    if part is None or targets is None or not fits or targets.take(indices) != predictions.targets:
        return None
    places, copies = {}, Counter[tuple[bytes, tuple[str, ...]]]()
    for place, (index, names) in enumerate(zip(indices, predictions.targets.names(), strict=True)):
        image = (bytes(part.contents[index]), tuple(sorted(names)))
        if image[0] != UNREADABLE:
            places[(*image, copies[image])] = place
            copies[image] += 1
    return places


def _paired_test(
    run: ComparedRun, best: ComparedRun, places: Mapping[_Image, int], of_best: Mapping[_Image, int]
) -> PairedTest:
    mine, theirs, name = run.run.predictions, best.run.predictions, run.name
    assert mine is not None
    assert theirs is not None
    if other := sorted({*mine.class_names} ^ {*theirs.class_names}):
        return PairedTest(run=name, reason=f"other classes, such as {printable(other[0], 40)}")
    common = [image for image in places if image in of_best]
    if not common:
        return PairedTest(run=name, reason="no test image in common")
    here, there = (np.array([images[image] for image in common]) for images in (places, of_best))
    images = len(common)
    if mine.several:
        labels = mine.labels[here]
        if not labels.any():
            return PairedTest(run=name, reason="no common test image has a class")
        order = [theirs.class_names.index(label) for label in mine.class_names]
        gap = paired_difference(labels, mine.scored[here], theirs.scored[there][:, order])
        interval = gap.low, gap.high
        return PairedTest(run=name, images=images, difference=gap.value, p=gap.p, interval=interval)
    right, best_right = mine.correct[here], theirs.correct[there]
    only_run, only_best = int((right & ~best_right).sum()), int((best_right & ~right).sum())
    difference, p = (only_run - only_best) / images, mcnemar(only_run, only_best)
    return PairedTest(
        run=name, images=images, difference=difference, p=p, only_best=only_best, only_run=only_run
    )
