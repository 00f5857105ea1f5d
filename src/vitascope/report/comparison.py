"""Several runs side by side: their options, results, and paired tests on the same images."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.data.average_precision import paired_difference
from vitascope.data.contents import UNREADABLE
from vitascope.data.measures import Score, mcnemar
from vitascope.data.splits import OUT_OF_FOLD
from vitascope.errors import UserError, printable
from vitascope.formatting import aligned, counted, duration, pandas_library
from vitascope.model.configuration import traits
from vitascope.options.groups import Recorded
from vitascope.options.recipes import TrainConfig
from vitascope.report.overview import option_text
from vitascope.run.environment import without_home
from vitascope.run.layout import has_model
from vitascope.run.predictions import Predictions
from vitascope.run.run import Run
from vitascope.weights.identification import pretrained_config

MAX_RUNS = 24
"""Runs in a comparison: more curves cannot be told apart."""
SIGNIFICANT = 0.05
"""Largest p-value of a significant difference."""
_RECORDS = {"run", *traits(TrainConfig, Recorded)}
"""What a run sets itself: the runs did not ask for it."""
_INDIVIDUAL = {"seed", *_RECORDS}
"""Options in which the runs of a seed group may differ."""
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
    test: Mapping[str, Any] | None
    """The metrics of the final test, if the run has finished."""
    score: Score | None
    """The score on the test images, if it is a finished classifier."""
    parameters: int | None
    flops: int | None
    """FLOPs of one image's forward pass; a multiply-add counts as 2."""

    @classmethod
    def read(cls, run: Run, name: str) -> ComparedRun:
        """Read a run folder; a broken file is a `UserError`."""
        tests, predictions = run.records("test"), run.predictions if run.finished else None
        model = run.model_folder if run.finished else run.best
        config = pretrained_config(model) if has_model(model) else None
        return cls(
            name=name,
            run=run,
            epochs=tuple(run.records("epoch")),
            test=tests[-1] if tests and run.finished else None,
            score=None if predictions is None else predictions.score,
            parameters=None if config is None else config.num_parameters,
            flops=None if config is None else config.flops,
        )

    @property
    def measure(self) -> str | None:
        """What the run is measured by: `accuracy`, `mAP` if images may have several classes, or, of a
        pre-training, `correct colours`; None while it is unknown."""
        if not self.run.classifies:
            return "correct colours"
        if self.score is not None:
            return self.score.measure
        if self.epochs:
            return "mAP" if "val_map" in self.epochs[0] else "accuracy"
        return None

    @property
    def result(self) -> float | None:
        """The `measure` on the test images."""
        if self.score is not None:
            return self.score.value_and_limits[0]
        return None if self.test is None else self.test.get("accuracy")

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of a classifier's result."""
        return None if self.score is None else self.score.value_and_limits[1:]

    @property
    def by_class(self) -> float | None:
        """The balanced accuracy or, where images may have several classes, the macro F1 at the thresholds."""
        return None if self.score is None else self.score.mean_of_classes

    @property
    def seconds(self) -> float | None:
        """Training time, with validation."""
        last = self.test or (self.epochs[-1] if self.epochs else {})
        return last.get("seconds")

    @property
    def progress(self) -> str:
        """The number of epochs; of an unfinished run, also the planned one."""
        done, planned = self.run.epochs_done, self.run.planned_epochs
        return f"{done:.6g}" if self.run.finished or planned is None else f"{done:.6g} of {planned:g}"

    def cells(self) -> tuple[str, ...]:
        """The row in the table of results; see `RunComparison.results`."""
        loss = None if self.test is None else self.test.get("loss")
        return (
            self.name,
            self.progress,
            "" if self.result is None else f"{self.result:.2%}",
            "" if self.interval is None else "{:.1%} to {:.1%}".format(*self.interval),
            "" if self.by_class is None else f"{self.by_class:.2%}",
            "" if loss is None else f"{loss:.3f}",
            "" if self.seconds is None else duration(self.seconds),
            "" if self.parameters is None else f"{self.parameters:,}",
            "" if self.flops is None else f"{self.flops / 1e6:,.1f}",
        )

    def to_dict(self) -> dict[str, Any]:
        """The run as plain values."""
        test, score = self.test or {}, self.score
        measured: dict[str, Any] = {} if score is None else score.summary()
        named = ("epoch", "step", "seconds", "val_loss", "val_accuracy", "val_map")
        measures = ("balanced_accuracy", "map", "map_low", "map_high", "macro_f1_tuned")
        return {
            "run": self.name,
            "path": self.run.ref,
            "finished": self.run.finished,
            "epochs": self.run.epochs_done,
            "planned_epochs": self.run.planned_epochs,
            **{name: test.get(name) for name in ("split", "images", "correct", "accuracy")},
            "accuracy_low": measured.get("accuracy_low", measured.get("exact_low")),
            "accuracy_high": measured.get("accuracy_high", measured.get("exact_high")),
            **{name: measured.get(name) for name in measures},
            "loss": test.get("loss"),
            "seconds": self.seconds,
            "parameters": self.parameters,
            "flops": self.flops,
            "curve": [{name: epoch[name] for name in named if name in epoch} for epoch in self.epochs],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedGroup:
    """Several tested runs with the same options except for the seed."""

    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    results: tuple[float, ...]
    """Their accuracies, or mAPs; see `ComparedRun.measure`."""

    def __str__(self) -> str:
        mean, low, high = np.mean(self.results), min(self.results), max(self.results)
        names = f"{', '.join(self.runs)} (seeds {', '.join(map(str, self.seeds))})"
        return f"{names}: mean {mean:.2%}, lowest {low:.2%}, highest {high:.2%}"

    def to_dict(self) -> dict[str, Any]:
        """The group as plain values, with mean and sample standard deviation."""
        values = {"mean": float(np.mean(self.results)), "std": float(np.std(self.results, ddof=1))}
        return {**dataclasses.asdict(self), **values}


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
    """The accuracy, or mAP, of this run minus that of the best one, on the common images."""
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
        if self.interval is not None:
            numbers = f"{self.difference:+.2%}", "{:+.1%} to {:+.1%}".format(*self.interval)
        else:
            numbers = f"{self.only_best:,}", f"{self.only_run:,}"
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
    leaders: tuple[str, ...]
    """If two classifiers are tested, those with the highest test result and then the lowest test loss."""
    paired: tuple[PairedTest, ...]
    """The other tested classifiers beside the first leader."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> RunComparison:
        """Compare opened runs; errors as `compare`."""
        if not 2 <= len(runs) <= MAX_RUNS:
            raise UserError(f"a comparison takes 2 to {MAX_RUNS} runs, not {len(runs)}")
        places = [run.path.resolve() for run in runs]
        for place, run in zip(places, runs, strict=True):
            if places.count(place) > 1:
                raise UserError(f"{run.ref} is given more than once; give each run once")
        kinds = {run.classifies: run for run in reversed(runs)}
        if len(kinds) > 1:
            raise UserError(
                f"{kinds[True].ref} is a classifier and {kinds[False].ref} a pre-training, which have no "
                "common measure; compare runs of one kind"
            )
        short = [run.name for run in runs]
        names = short if len(set(short)) == len(short) else [without_home(run.ref) for run in runs]
        pairs = zip(runs, names, strict=True)
        compared = tuple(ComparedRun.read(run, printable(name)) for run, name in pairs)
        measures = {each.measure: each.run for each in reversed(compared) if each.measure is not None}
        if len(measures) > 1:
            raise UserError(
                f"the images of {measures['accuracy'].ref} have one class each, those of "
                f"{measures['mAP'].ref} may have several, so the runs have no common measure; compare runs "
                "of one kind"
            )
        leaders = _leaders(compared)
        return cls(
            runs=compared,
            options=_differences([_set(run.config) for run in runs], _RECORDS | _of_trainings_alone(runs)),
            environment=_differences([run.environment for run in runs], _MOMENT),
            groups=tuple(_seed_groups(compared)),
            leaders=leaders,
            paired=tuple(_paired_tests(compared, leaders)),
        )

    @property
    def best(self) -> str | None:
        """The only leader; None if there is none, or several that are equal."""
        return self.leaders[0] if len(self.leaders) == 1 else None

    @property
    def classifies(self) -> bool:
        """Whether the runs learn classes; otherwise, they are pre-trained."""
        return self.runs[0].run.classifies

    @property
    def measure(self) -> str:
        """What the runs are measured by; see `ComparedRun.measure`."""
        return next((run.measure for run in self.runs if run.measure is not None), "accuracy")

    def results(self) -> list[tuple[str, ...]]:
        """The table of results as text, with its head and without columns that are empty for all runs."""
        splits = {run.test["split"] for run in self.runs if run.test is not None}
        split = f"{splits.pop()} " if len(splits) == 1 else ""
        result = f"{split}{self.measure}" if self.classifies else self.measure
        by_class = "macro F1" if self.measure == "mAP" else "balanced"
        middle = (result, "95% interval", by_class, f"{split}loss")
        head = ("run", "epochs", *middle, "training time", "parameters", "MFLOPs")
        columns = zip(head, *(run.cells() for run in self.runs), strict=True)
        return list(zip(*(column for column in columns if any(column[1:])), strict=True))

    @property
    def paired_head(self) -> tuple[str, ...]:
        """The columns of `PairedTest.cells`."""
        best = self.leaders[0]
        if self.measure == "mAP":
            return ("run", "common images", f"mAP less that of {best}", "95% interval", "p", "verdict")
        return ("run", "common images", f"only {best} right", "only this right", "p", "verdict")

    @property
    def summary(self) -> str:
        """The best run and those that do not differ significantly from it, in words."""
        if not self.leaders:
            return f"{counted(len(self.runs), 'training' if self.classifies else 'pre-training')}."
        found, others = {run.name: run for run in self.runs}, {test.run: test for test in self.paired}
        result = found[self.leaders[0]].result
        equal = ", which are equal" if len(self.leaders) > 1 else ""
        behind = [name for name in others if name not in self.leaders]
        level = ", ".join(name for name in behind if found[name].result == result)
        by_loss = f", with a lower loss than {level}" if level else ""
        rivals = ", ".join(name for name in behind if others[name].verdict == "not significant")
        text = f"Highest {self.measure}: {', '.join(self.leaders)}{equal}, {result:.2%}{by_loss}."
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
        found = [f"{run.name} has not finished." for run in self.runs if not run.run.finished]
        on_val = [run.name for run in self.runs if run.test is not None and run.test["split"] == "val"]
        if on_val and self.classifies:
            found.append(
                f"{', '.join(on_val)}: measured on the validation images, which also selected the weights."
            )
        if "target" in self.options and not self.classifies:
            found.append("Losses of different targets cannot be compared.")
        if machines := sorted(_SPEED & self.environment.keys()):
            found.append(f"Training times cannot be compared: the runs differ in {', '.join(machines)}.")
        return found

    def text(self) -> str:
        """The comparison for a terminal."""
        parts = [[*aligned(self.results()), *map(str, self.groups)]]
        if self.options or self.environment:
            rows = [
                tuple(printable(cell, _WIDEST) for cell in row)
                for row in (("differs", *(run.name for run in self.runs)), *self.difference_rows())
            ]
            parts.append([*aligned(rows)])
        if self.paired:
            method = "bootstrap" if self.measure == "mAP" else "McNemar's, exact"
            title = f"Paired test on the same images ({method}), against {self.leaders[0]}:"
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
            "groups": [group.to_dict() for group in self.groups],
            "best": self.best,
            "leaders": list(self.leaders),
            "paired": [{**dataclasses.asdict(test), "verdict": test.verdict} for test in self.paired],
            "notes": self.notes(),
        }

    def to_dataframe(self) -> Any:
        """The results as a pandas data frame, one row per run; UserError without pandas."""
        rows = [run.to_dict() for run in self.runs]
        return pandas_library().DataFrame(rows).drop(columns="curve").set_index("run")

    def __repr__(self) -> str:
        return f"RunComparison({', '.join(run.name for run in self.runs)}; best: {', '.join(self.leaders)})"


def _differences(records: Sequence[Mapping[str, Any]], left_out: set[str]) -> dict[str, tuple[Any, ...]]:
    """The values that are not the same in all records; None where one is missing."""
    names = dict.fromkeys(name for record in records for name in record if name not in left_out)
    values = {name: tuple(record.get(name) for record in records) for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def _of_trainings_alone(runs: Sequence[Run]) -> set[str]:
    """The options of a training that a probe among the runs does not have."""
    probed = {name for run in runs if run.probes for name in run.config}
    return {name for run in runs for name in run.config} - probed if probed else set()


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are set."""
    return {name: value for name, value in options.items() if value not in (None, [], {})}


def seed_group(run: Run) -> str:
    """A key that runs share whose options are the same except for the seed."""
    shared = {name: value for name, value in _set(run.config).items() if name not in _INDIVIDUAL}
    return json.dumps(shared, sort_keys=True, default=str)


def _seed_groups(runs: Sequence[ComparedRun]) -> Iterator[SeedGroup]:
    members: dict[str, list[ComparedRun]] = {}
    for run in runs:
        if run.result is not None:
            members.setdefault(seed_group(run.run), []).append(run)
    for group in members.values():
        if len(group) > 1:
            yield SeedGroup(
                runs=tuple(each.name for each in group),
                seeds=tuple(each.run.config["seed"] for each in group),
                results=tuple(each.result for each in group if each.result is not None),
            )


@dataclasses.dataclass(frozen=True)
class TestedImages:
    """The test images of a classifier, identified as in other runs."""

    predictions: Predictions
    places: Mapping[tuple[bytes, tuple[str, ...], int], int] = dataclasses.field(default_factory=dict)
    """Places in the predictions, by content and sorted classes of an image, and the number of this copy of
    it: runs may have other splits, and the data may lie elsewhere now."""
    unknown: str = ""
    """The reason if the images are unknown."""

    @classmethod
    def of(cls, run: ComparedRun) -> TestedImages:
        """The images of a tested classifier."""
        predictions, record = run.run.predictions, run.run.split_record()
        assert predictions is not None
        split = "train" if predictions.split == OUT_OF_FOLD else predictions.split
        part, indices = record.parts.get(split), predictions.indices
        targets = None if part is None else part.targets
        fits = targets is not None and int(indices.max()) < len(targets)
        if part is None or targets is None or not fits or targets.take(indices) != predictions.targets:
            return cls(
                predictions, unknown=f"the predictions of {run.name} do not fit its record of the split"
            )
        places = {}
        copies: Counter[tuple[bytes, tuple[str, ...]]] = Counter()
        for place, (index, names) in enumerate(zip(indices, predictions.targets.names(), strict=True)):
            image = (bytes(part.contents[index]), tuple(sorted(names)))
            if image[0] != UNREADABLE:
                places[(*image, copies[image])] = place
                copies[image] += 1
        return cls(predictions, places)


def _leaders(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    """The best classifiers by result and then by loss; empty if fewer than two are tested."""
    ranks = {
        run.name: (run.score.value_and_limits[0], -(run.test or {}).get("loss", math.inf))
        for run in runs
        if run.score is not None
    }
    best = max(ranks.values(), default=None)
    return tuple(name for name, rank in ranks.items() if rank == best) if len(ranks) > 1 else ()


def _paired_tests(runs: Sequence[ComparedRun], leaders: Sequence[str]) -> Iterator[PairedTest]:
    tested = {run.name: TestedImages.of(run) for run in runs if run.score is not None and leaders}
    for name, found in tested.items():
        if name != leaders[0]:
            yield _paired_test(name, found, tested[leaders[0]])


def _paired_test(name: str, mine: TestedImages, best: TestedImages) -> PairedTest:
    if unknown := best.unknown or mine.unknown:
        return PairedTest(run=name, reason=unknown)
    classes = mine.predictions.class_names
    if other := sorted({*classes} ^ {*best.predictions.class_names}):
        return PairedTest(run=name, reason=f"other classes, such as {printable(other[0], 40)}")
    common = [image for image in mine.places if image in best.places]
    if not common:
        return PairedTest(run=name, reason="no test image in common")
    here, there = (np.array([images.places[image] for image in common]) for images in (mine, best))
    if mine.predictions.several:
        return _map_test(name, mine.predictions, best.predictions, here, there)
    right, best_right = mine.predictions.correct[here], best.predictions.correct[there]
    only_run, only_best, images = (
        int((right & ~best_right).sum()),
        int((best_right & ~right).sum()),
        len(here),
    )
    return PairedTest(
        run=name,
        images=images,
        difference=(only_run - only_best) / images,
        p=mcnemar(only_run, only_best),
        only_best=only_best,
        only_run=only_run,
    )


def _map_test(
    name: str, mine: Predictions, best: Predictions, here: npt.NDArray[np.int64], there: npt.NDArray[np.int64]
) -> PairedTest:
    """The test of two runs' predictions of the same images, at the places `here` and `there`."""
    labels = mine.labels[here]
    if not labels.any():
        return PairedTest(run=name, reason="no common test image has a class")
    order = [best.class_names.index(label) for label in mine.class_names]
    gap = paired_difference(labels, mine.scored[here], best.scored[there][:, order])
    return PairedTest(run=name, images=len(here), difference=gap.value, p=gap.p, interval=(gap.low, gap.high))
