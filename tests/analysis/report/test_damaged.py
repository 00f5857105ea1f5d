"""Damaged run folders: every reader ends with a result or a `UserError`, whatever a file contains."""

import gzip
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import vitascope as vs
from tests.analysis.report import leave_empty
from tests.analysis.report.runs import write_label_run, write_run
from vitascope import layout
from vitascope.analysis.report import classification, internals, labels, overview
from vitascope.analysis.report.charts import draw_curves, kept_place
from vitascope.analysis.report.write import rewrite_report

MUTATIONS = 11  # of each file
DRAWN = 1  # of them with charts and a whole report, which take longest
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2.5, 1e300, -1e300, 10**400, 2**63, float("inf"), float("nan")),
    *("", "x", "\ud800", "a\0b", "$\\frac{$", "~nobody/x", "x" * 5000, "2020-01-01", "\u202e"),
    *([], [1], [[1]], [[[[[[1]]]]]], {}, {"a": {"b": [{"c": 1}]}}, [None]),
]
NUMBERS = [-1, 2**31, 2**62, 5, 0]
TEXTS = ["", "\ud800", "$\\frac{$", "x" * 300, "_a", "\u202e"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "good").path


def damaged_value(rng: random.Random, value: Any) -> Any:
    inner = isinstance(value, dict | list) and value and rng.random() < 0.8
    if not inner:
        return rng.choice(VALUES)
    value = value.copy()
    place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    chance = rng.random()
    if chance < 0.15:
        del value[place]
    elif chance < 0.25 and isinstance(value, dict):
        value["unknown"] = rng.choice(VALUES)
    else:
        value[place] = damaged_value(rng, value[place])
    return value


def damaged_bytes(rng: random.Random, content: bytes) -> bytes:
    chance = rng.random()
    if chance < 0.4:
        return content[: rng.randrange(len(content))]
    if chance < 0.5:
        return b"[" * 100_000
    changed = bytearray(content)
    for _ in range(rng.choice([1, 3, 20])):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def damage(rng: random.Random, path: Path) -> None:
    content = path.read_bytes()
    if rng.random() < 0.3 or path.suffix == ".npz":
        path.write_bytes(damaged_bytes(rng, content))
    elif path.suffix == ".yaml":
        path.write_text(yaml.dump(damaged_value(rng, yaml.safe_load(content))))
    else:
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
        whole = path.suffix == ".json"
        values = [json.loads(content)] if whole else [json.loads(line) for line in lines]
        place = rng.randrange(len(values))
        values[place] = damaged_value(rng, values[place])
        text = "\n".join(map(json.dumps, values)).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def readings(folder: Path, whole: Path) -> Iterator[Callable[[], object]]:
    """All that reads a run folder, without drawing."""
    run = vs.Run(folder)
    yield lambda: run.config
    yield lambda: run.environment
    yield lambda: run.metrics
    yield lambda: run.predictions and run.predictions.score
    yield run.test_images
    yield lambda: overview.header(run, None)
    yield lambda: overview.training(run, None, None, "")
    yield lambda: overview.configuration_section(run)
    yield lambda: overview.environment_section(run)
    yield lambda: json.dumps((found := vs.compare([folder, whole])).to_dict()) + found.text()


def drawings(folder: Path, whole: Path) -> Iterator[Callable[[], object]]:
    run = vs.Run(folder)
    epochs = "epoch", "step"
    yield lambda: draw_curves(*map(run.records, epochs), kept_place(run, run.records("epoch")))
    yield lambda: rewrite_report(run)
    yield lambda: vs.compare([folder, whole], folder / "compared.html")


@pytest.mark.parametrize(
    ("write", "name"),
    [
        *((write_run, name) for name in (layout.CONFIG, layout.PLAN, layout.ENVIRONMENT)),
        (write_run, "model/preprocessor_config.json"),
        *(
            (write, name)
            for write in (write_run, write_label_run)
            for name in (layout.METRICS, layout.PREDICTIONS, layout.SPLIT, "model/config.json")
        ),
    ],
)
def test_a_damaged_folder_gives_a_result_or_one_line(tmp_path, monkeypatch, write, name) -> None:
    good = write(tmp_path / "good").path
    leave_empty(monkeypatch, overview, classification, labels, internals)
    rejected: list[str] = []
    for seed in range(MUTATIONS):
        folder = tmp_path / f"{seed}"
        shutil.copytree(good, folder)
        damage(random.Random(f"{name} {seed}"), folder / name)
        readers = [*readings(folder, good), *(drawings(folder, good) if seed < DRAWN else ())]
        for read in readers:
            try:
                read()
            except vs.UserError as error:
                rejected.append(str(error))
    assert len(rejected) > MUTATIONS
    assert all(len(text.splitlines()) == 1 for text in rejected)


def test_a_run_that_predicted_nothing_is_reported_and_compared(good: Path, tmp_path: Path) -> None:
    empty = shutil.copytree(good, tmp_path / "empty")
    path = empty / layout.PREDICTIONS
    with np.load(path) as stored:
        arrays = dict(stored)
    of_images = {name: array[:0] for name, array in arrays.items() if array.ndim and name != "class_names"}
    np.savez(path, **(arrays | of_images))
    assert vs.Run(empty).predictions is None
    assert vs.compare([empty, good]).best is None
    assert "Most confident mistakes" not in rewrite_report(vs.Run(empty))[0].read_text()


def test_a_broken_configuration_is_not_taken_for_missing_images(good: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(good, tmp_path / "broken")
    (broken / "report.html").touch()
    (broken / layout.CONFIG).write_text("task: &task classify\ndata: *task\n")
    with pytest.raises(vs.UserError, match=r"config\.yaml is broken: line 2: references .* are not read; "):
        rewrite_report(vs.Run(broken))
