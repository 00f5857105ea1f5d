"""Several runs side by side: their options, results, and paired tests on the same images."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vitascope.data.contents import UNREADABLE
from vitascope.errors import UserError, printable
from vitascope.formatting import aligned, counted, duration, pandas_library
from vitascope.model.configuration import traits
from vitascope.options.groups import Recorded
from vitascope.options.recipes import TrainConfig
from vitascope.report.overview import option_text
from vitascope.run.environment import without_home
from vitascope.run.layout import has_model
from vitascope.run.measures import Score, mcnemar
from vitascope.run.run import Run
from vitascope.weights.identification import pretrained_config

MAX_RUNS = 24
"""Runs in a comparison: more curves cannot be told apart."""
SIGNIFICANT = 0.05
"""Largest p-value of a significant difference."""
_INDIVIDUAL = {"run", "seed", *traits(TrainConfig, Recorded)}
"""Options in which the runs of a seed group may differ."""
_MOMENT = {"started", "command"}
"""Records of the environment that differ between all runs."""
_SPEED = {"cpu", "gpu", "device", "cores", "threads", "processes"}
"""Records of the environment that training time depends on."""
_WIDEST, _LONGEST = 40, 200  # characters of an option's value in the terminal, on the page


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
        score = None if predictions is None else predictions.score
        return cls(
            name=name,
            run=run,
            epochs=tuple(run.records("epoch")),
            test=tests[-1] if tests and run.finished else None,
            score=score if isinstance(score, Score) else None,
            parameters=None if config is None else config.num_parameters,
            flops=None if config is None else config.flops,
        )

    @property
    def accuracy(self) -> float | None:
        """On the test images; of a pre-training, the share of correct colours."""
        return None if self.test is None else self.test.get("accuracy")

    @property
    def seconds(self) -> float | None:
        """Training time, with validation."""
        last = self.test or (self.epochs[-1] if self.epochs else {})
        return last.get("seconds")

    @property
    def progress(self) -> str:
        """The number of epochs; of an unfinished run, also the planned one."""
        done, planned = self.epochs[-1]["epoch"] if self.epochs else 0, self.run.planned_epochs
        return f"{done:g}" if self.run.finished or planned is None else f"{done:g} of {planned:g}"

    def cells(self) -> tuple[str, ...]:
        """The row in the table of results; see `RunComparison.results`."""
        loss = None if self.test is None else self.test.get("loss")
        return (
            self.name,
            self.progress,
            "" if self.accuracy is None else f"{self.accuracy:.2%}",
            "" if self.score is None else "{:.1%} to {:.1%}".format(*self.score.interval),
            "" if self.score is None else f"{self.score.balanced:.2%}",
            "" if loss is None else f"{loss:.3f}",
            "" if self.seconds is None else duration(self.seconds),
            "" if self.parameters is None else f"{self.parameters:,}",
            "" if self.flops is None else f"{self.flops / 1e6:,.1f}",
        )

    def to_dict(self) -> dict[str, Any]:
        """The run as plain values."""
        test, score = self.test or {}, self.score
        low, high = (None, None) if score is None else score.interval
        named = ("epoch", "step", "seconds", "val_loss", "val_accuracy")
        return {
            "run": self.name,
            "path": str(self.run.path),
            "finished": self.run.finished,
            "epochs": self.epochs[-1]["epoch"] if self.epochs else 0,
            "planned_epochs": self.run.planned_epochs,
            **{name: test.get(name) for name in ("split", "images", "correct", "accuracy")},
            "accuracy_low": low,
            "accuracy_high": high,
            "balanced_accuracy": None if score is None else score.balanced,
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
    accuracies: tuple[float, ...]

    def __str__(self) -> str:
        mean, low, high = np.mean(self.accuracies), min(self.accuracies), max(self.accuracies)
        names = f"{', '.join(self.runs)} (seeds {', '.join(map(str, self.seeds))})"
        return f"{names}: mean {mean:.2%}, lowest {low:.2%}, highest {high:.2%}"

    def to_dict(self) -> dict[str, Any]:
        """The group as plain values, with mean and sample standard deviation."""
        values = {"mean": float(np.mean(self.accuracies)), "std": float(np.std(self.accuracies, ddof=1))}
        return {**dataclasses.asdict(self), **values}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedTest:
    """A run beside the best one on the images that both were tested on."""

    run: str
    images: int = 0
    """The number of common images."""
    only_run: int = 0
    """Images that this run alone predicts correctly."""
    only_best: int = 0
    """Images that the best run alone predicts correctly."""
    p: float | None = None
    """Two-sided p-value of the exact McNemar test."""
    reason: str = ""
    """The reason if there is no test."""

    @property
    def verdict(self) -> str:
        """`worse` or `better` than the best run, `not significant`, or the reason if there is no test."""
        if self.p is None:
            return f"no test: {self.reason}"
        if self.p > SIGNIFICANT:
            return "not significant"
        return "better" if self.only_run > self.only_best else "worse"

    def cells(self) -> tuple[str, ...]:
        """The row in the table of tests, below `RunComparison.paired_head`."""
        if self.p is None:
            return (self.run, "", "", "", "", self.verdict)
        p = f"{self.p:.4f}" if self.p >= 1e-4 else "< 0.0001"
        return (self.run, f"{self.images:,}", f"{self.only_best:,}", f"{self.only_run:,}", p, self.verdict)


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
    """If two classifiers are tested, those with the highest test accuracy and then the lowest test loss."""
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
                raise UserError(f"{run.path} is given more than once; give each run once")
        kinds = {run.classifies: run for run in reversed(runs)}
        if len(kinds) > 1:
            raise UserError(
                f"{kinds[True].path} is a classifier and {kinds[False].path} a pre-training, which have no "
                "common measure; compare runs of one kind"
            )
        short = [place.name for place in places]
        names = short if len(set(short)) == len(short) else [without_home(str(run.path)) for run in runs]
        pairs = zip(runs, names, strict=True)
        compared = tuple(ComparedRun.read(run, printable(name)) for run, name in pairs)
        leaders = _leaders(compared)
        return cls(
            runs=compared,
            options=_differences([_set(run.config) for run in runs], {"run"}),
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

    def results(self) -> list[tuple[str, ...]]:
        """The table of results as text, with its head and without columns that are empty for all runs."""
        splits = {each.test["split"] for each in self.runs if each.test is not None}
        split = f"{splits.pop()} " if len(splits) == 1 else ""
        accuracy = f"{split}accuracy" if self.classifies else "correct colours"
        middle = (accuracy, "95% interval", "balanced", f"{split}loss")
        head = ("run", "epochs", *middle, "training time", "parameters", "MFLOPs")
        columns = zip(head, *(each.cells() for each in self.runs), strict=True)
        return list(zip(*(column for column in columns if any(column[1:])), strict=True))

    @property
    def paired_head(self) -> tuple[str, ...]:
        """The columns of `PairedTest.cells`."""
        return ("run", "common images", f"only {self.leaders[0]} right", "only this right", "p", "verdict")

    @property
    def summary(self) -> str:
        """The best run and those that do not differ significantly from it, in words."""
        if not self.leaders:
            return f"{counted(len(self.runs), 'training' if self.classifies else 'pre-training')}."
        found, others = {each.name: each for each in self.runs}, {test.run: test for test in self.paired}
        accuracy = found[self.leaders[0]].accuracy
        equal = ", which are equal" if len(self.leaders) > 1 else ""
        behind = [name for name in others if name not in self.leaders]
        level = ", ".join(name for name in behind if found[name].accuracy == accuracy)
        by_loss = f", with a lower loss than {level}" if level else ""
        rivals = ", ".join(name for name in behind if others[name].verdict == "not significant")
        text = f"Highest accuracy: {', '.join(self.leaders)}{equal}, {accuracy:.2%}{by_loss}."
        return f"{text} Not significantly different: {rivals}." if rivals else text

    def difference_rows(self) -> list[tuple[str, ...]]:
        """The options and records of the environment that differ, as text: name and a value per run."""
        rows = {**self.options, **self.environment}
        return [
            (name, *(printable(without_home(option_text(value)), _LONGEST) for value in values))
            for name, values in rows.items()
        ]

    def notes(self) -> list[str]:
        """What to know when reading the results."""
        found = [f"{each.name} has not finished." for each in self.runs if not each.run.finished]
        on_val = [each.name for each in self.runs if each.test is not None and each.test["split"] == "val"]
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
                for row in (("differs", *(each.name for each in self.runs)), *self.difference_rows())
            ]
            parts.append([*aligned(rows)])
        if self.paired:
            title = f"Paired test on the same images (McNemar's, exact), against {self.leaders[0]}:"
            note = "p is not corrected for the number of runs, and knows nothing of other seeds."
            rows = [self.paired_head, *(test.cells() for test in self.paired)]
            parts.append([title, *aligned(rows, left={0, len(self.paired_head) - 1}), note])
        parts.append([*self.notes(), self.summary])
        return "\n\n".join("\n".join(lines) for lines in parts)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values, for `--json`."""
        return {
            "runs": [each.to_dict() for each in self.runs],
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
        rows = [each.to_dict() for each in self.runs]
        return pandas_library().DataFrame(rows).drop(columns="curve").set_index("run")

    def __repr__(self) -> str:
        return f"RunComparison({', '.join(each.name for each in self.runs)}; best: {', '.join(self.leaders)})"


def _differences(records: Sequence[Mapping[str, Any]], left_out: set[str]) -> dict[str, tuple[Any, ...]]:
    """The values that are not the same in all records; None where one is missing."""
    names = dict.fromkeys(name for record in records for name in record if name not in left_out)
    values = {name: tuple(record.get(name) for record in records) for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are set; older runs lack some of the others."""
    return {name: value for name, value in options.items() if value not in (None, [], {})}


def seed_group(run: Run) -> str:
    """A key that runs share whose options are the same except for the seed."""
    shared = {name: value for name, value in _set(run.config).items() if name not in _INDIVIDUAL}
    return json.dumps(shared, sort_keys=True, default=str)


def _seed_groups(runs: Sequence[ComparedRun]) -> Iterator[SeedGroup]:
    members: dict[str, list[ComparedRun]] = {}
    for each in runs:
        if each.accuracy is not None:
            members.setdefault(seed_group(each.run), []).append(each)
    for group in members.values():
        if len(group) > 1:
            yield SeedGroup(
                runs=tuple(each.name for each in group),
                seeds=tuple(each.run.config["seed"] for each in group),
                accuracies=tuple(each.accuracy for each in group if each.accuracy is not None),
            )


@dataclasses.dataclass(frozen=True)
class ImageAnswers:
    """Whether a classifier is right for each of its test images."""

    classes: frozenset[str] = frozenset()
    right: Mapping[tuple[bytes, str, int], bool] = dataclasses.field(default_factory=dict)
    """By content and class of an image, and the number of this copy of it: runs may have other splits, and
    the data may lie elsewhere now."""
    unknown: str = ""
    """The reason if the images are unknown."""

    @classmethod
    def of(cls, run: ComparedRun) -> ImageAnswers:
        """The answers of a tested classifier."""
        predictions, record = run.run.predictions, run.run.split_record()
        assert predictions is not None
        if record is None:
            return cls(unknown=f"{run.name} is an older run, which did not record its images")
        part, indices = record.parts.get(predictions.split), predictions.indices
        targets = None if part is None else part.targets
        fits = targets is not None and int(indices.max()) < len(targets)
        if part is None or targets is None or not fits or targets.take(indices) != predictions.targets:
            return cls(unknown=f"the predictions of {run.name} do not fit its record of the split")
        names, right = predictions.class_names, {}
        copies: Counter[tuple[bytes, str]] = Counter()
        for index, label, correct in zip(indices, predictions.labels, predictions.correct, strict=True):
            image = (bytes(part.contents[index]), names[label])
            if image[0] != UNREADABLE:
                right[(*image, copies[image])] = bool(correct)
                copies[image] += 1
        return cls(frozenset(names), right)


def _leaders(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    """The best classifiers by accuracy and then by loss; empty if fewer than two are tested."""
    ranks = {
        each.name: (each.score.right / each.score.total, -(each.test or {}).get("loss", math.inf))
        for each in runs
        if each.score is not None
    }
    best = max(ranks.values(), default=None)
    return tuple(name for name, rank in ranks.items() if rank == best) if len(ranks) > 1 else ()


def _paired_tests(runs: Sequence[ComparedRun], leaders: Sequence[str]) -> Iterator[PairedTest]:
    answers = {each.name: ImageAnswers.of(each) for each in runs if each.score is not None and leaders}
    for name, found in answers.items():
        if name != leaders[0]:
            yield _paired_test(name, found, answers[leaders[0]])


def _paired_test(name: str, mine: ImageAnswers, best: ImageAnswers) -> PairedTest:
    if unknown := best.unknown or mine.unknown:
        return PairedTest(run=name, reason=unknown)
    if other := sorted(mine.classes ^ best.classes):
        return PairedTest(run=name, reason=f"other classes, such as {printable(other[0], 40)}")
    common = mine.right.keys() & best.right.keys()
    if not common:
        return PairedTest(run=name, reason="no test image in common")
    only_run = sum(mine.right[image] and not best.right[image] for image in common)
    only_best = sum(best.right[image] and not mine.right[image] for image in common)
    p = mcnemar(only_run, only_best)
    return PairedTest(run=name, images=len(common), only_run=only_run, only_best=only_best, p=p)
