"""Benchmarks cover all options, their numbers are read back, and the docs show the newest ones.

No benchmark runs completely here: they take minutes, and their results need an idle machine.
"""

import dataclasses
import functools
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

import vitascope as vs
from tests.models import random_images, small_model
from tests.training import write_folder
from vitascope.cli.parsing import parse
from vitascope.cli.ship import Serve
from vitascope.models.config import OPTIONS, ViTConfig
from vitascope.models.options import (
    BlockOptions,
    EmbeddingOptions,
    NormOptions,
    ReadoutOptions,
    Regularization,
    RotaryOptions,
    TokenizerOptions,
)
from vitascope.models.sizes import named_config

ROOT = Path(__file__).parent.parent
OPTIONS_PAGE = ROOT / "docs" / "options.md"
CONDITIONS = {"machine": "a CPU", "versions": "torch", "date": "2026-01-02", "command": "python x"}

GROUPS = (
    EmbeddingOptions,
    RotaryOptions,
    TokenizerOptions,
    BlockOptions,
    NormOptions,
    ReadoutOptions,
    Regularization,
)
CHOICES = {
    name: get_args(kind)
    for group in GROUPS
    for name, kind in get_type_hints(group).items()
    if get_origin(kind) is Literal
}
NOT_TRAINED = {
    "resample": {"huggingface", "torchvision", "jax", "dinov2"},  # the digits have one size
    "resnet_dialect": {"timm"},  # epsilons
    "head": {"pre_logits", "none", "cosine"},  # no classes, or those of texts
    "outputs": {"independent", "embedding"},  # not for one class per image
}


def load(name: str) -> ModuleType:
    """Import a script of benchmarks/ without running it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module(name)


ablation, reports = load("ablation"), load("reports")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_every_benchmark_can_be_imported(path: Path) -> None:
    assert load(path.stem).__doc__


@pytest.fixture(scope="module")
def configs() -> dict[str, ViTConfig]:
    """The model of each change, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ablation, "open_data", functools.cache(ablation.open_data))
        return {change.name: change.model_config() for change in ablation.CHANGES}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder instead of benchmarks/results."""
    monkeypatch.setattr(reports, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def ablated() -> object:
    """A fake measurement."""
    found = [
        ablation.Result(change.name, 344_650, 11_811_840, [0.99, 0.98], [0.02, 0.04, 0.03])
        for change in ablation.CHANGES[:3]
    ]
    return ablation.Measurement(**CONDITIONS, seeds=2, epochs=40, rounds=3, jobs=2, results=found)


def test_ablation_covers_every_choice_of_every_option(configs) -> None:
    assert {"positions", "pool", "stem", "norm", "attention", "mlp", "qkv_bias", "head"} <= CHOICES.keys()
    for name, choices in CHOICES.items():
        covered = {config.option(name) for config in configs.values()}
        assert covered | NOT_TRAINED.get(name, set()) >= set(choices), name


def test_a_change_is_timed() -> None:
    (change,) = ablation.selected(["attention=axial"])
    timing = ablation.Timing(warmup=1, steps=1, seconds=0)
    seconds = ablation.measure_steps([ablation.Change(), change], 2, timing)
    assert [len(times) for times in seconds.values()] == [2, 2]
    assert all(second > 0 for times in seconds.values() for second in times)


def test_numbers_are_read_back_as_they_were_written(ablated, results) -> None:
    ablated.write()
    assert reports.newest_numbers("ablation").parent == results
    assert ablation.Measurement.newest() == ablated
    assert ablated.machine in ablated.report()


def test_page_is_filled_in_only_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- /a -->\n<!-- b -->\n<!-- /b -->\nafter\n")
    for _ in range(2):
        reports.fill_in(page, "a", "new\\1")
    reports.fill_in(page, "b", "more")
    assert (
        page.read_text() == "before\n<!-- a -->\nnew\\1\n<!-- /a -->\n<!-- b -->\nmore\n<!-- /b -->\nafter\n"
    )
    with pytest.raises(ValueError, match="no <!-- c -->"):
        reports.fill_in(page, "c", "")


def test_docs_show_the_newest_numbers() -> None:
    shown = reports.between(OPTIONS_PAGE.read_text(encoding="utf-8"), "ablation")
    assert shown == ablation.Measurement.newest().for_docs() + "\n"


def test_newest_ablation_has_parameters_and_flops_of_the_current_models(configs) -> None:
    for result in ablation.Measurement.newest().results:
        config = configs[result.name]
        assert (result.parameters, result.flops) == (config.num_parameters, config.flops), result.name


def test_docs_name_every_option_and_every_choice() -> None:
    named = set(re.findall(r"`([^`\n]+)`", OPTIONS_PAGE.read_text(encoding="utf-8")))
    assert named >= set(OPTIONS)
    for name, choices in CHOICES.items():
        assert named >= set(choices), name


def test_groups_contain_every_option() -> None:
    fields = {field.name for group in GROUPS for field in dataclasses.fields(group)}
    assert fields == {name for name, group in OPTIONS.items() if group is not None}


small_data = load("small_data")


def test_small_data_commands_learn_the_same_images_of_classes_that_the_body_has_not_seen(
    tmp_path: Path, monkeypatch
) -> None:
    for part, per_class in (("train", 20), ("test", 2)):
        write_folder(tmp_path / "data" / part, per_class=per_class, side=8, classes=("a", "b", "c", "d"))
    commands = []

    def timed(command: str) -> tuple[float, float]:
        commands.append(shlex.split(command))
        return float(len(commands)), 100.0

    monkeypatch.setattr(small_data, "timed", timed)
    monkeypatch.setattr(small_data, "train", lambda name, config: SimpleNamespace(path=config.run))
    monkeypatch.setattr(small_data, "tested", lambda run: {"accuracy": 0.5 + 0.1 * int(run.path.name[-1])})
    monkeypatch.setenv("VITASCOPE_CACHE", "")
    given = ["--data", str(tmp_path / "data"), "--images", "10", "--seeds", "2"]
    rows = small_data.measured(small_data.parse(given), tmp_path)
    assert len(commands) == 2 * len(rows) == 2 * len(small_data.COMMANDS)
    for number, words in enumerate(commands):
        data = Path(words[words.index("--data") + 1])
        assert data.name == f"10-{number % 2}"
        assert {path.name: len(list(path.iterdir())) for path in (data / "train").iterdir()} == {
            "b": 5,
            "d": 5,
        }
    first, second = (
        {path.name for path in (tmp_path / "unseen" / f"10-{seed}" / "train" / "b").iterdir()}
        for seed in (0, 1)
    )
    assert len(first) == len(second) == 5
    assert rows[0] == ("`probe`", "55.0 (50.0 to 60.0)", "2", "100")


gpu_parts = load("gpu_parts")


@pytest.fixture
def recorded(tmp_path: Path) -> dict[str, str]:
    """An environment for on_gpu.sh in which python3 only appends its arguments to `arguments`, a line each.

    It ends with $STATUS if $FAILING has its second argument.
    """
    program = tmp_path / "python3"
    program.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" >> {tmp_path}/arguments\n"
        'case " $FAILING " in *" $2 "*) exit "$STATUS" ;; esac\n'
    )
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OUT": str(tmp_path / "out"), "FAILING": "", "STATUS": "1"}


def on_gpu(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(ROOT / "benchmarks" / "on_gpu.sh"), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_failed_parts_on_a_gpu_are_listed_and_stop_no_others(recorded, tmp_path: Path) -> None:
    ended = on_gpu({**recorded, "FAILING": "agreement minute"})
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == "failed: agreement"
    ended = on_gpu({**recorded, "FAILING": "waits", "STATUS": "124"})  # as of timeout
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (1, "failed: waits (time limit)")
    logs = {path.stem for path in (tmp_path / "out").iterdir()}
    assert logs == {*gpu_parts.PARTS, "throughput", "minute"}
    assert on_gpu(recorded, "waits", "minute").stdout.endswith("all parts passed: waits minute\n")


@pytest.mark.parametrize("words", [("waits", "throughputs"), ("--wet",), ("--data",)])
def test_on_gpu_rejects_unknown_parts_and_options(words: tuple[str, ...], recorded, tmp_path: Path) -> None:
    ended = on_gpu(recorded, *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "arguments").exists()


def test_checks_for_a_gpu_pass_at_tiny_size(tmp_path: Path) -> None:
    """On this machine's CPU, with one thread: its tensors are tiny."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": path}
    ended = on_gpu(env, "--dry", "waits")
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr
    (path,) = tmp_path.glob("*-gpu_waits.json")
    rows = json.loads(path.read_text())["rows"]
    assert rows
    assert not any("failure" in row for row in rows)


def test_a_failed_check_has_its_reason_and_the_next_ones_run(monkeypatch, results) -> None:
    def checks(device: torch.device, sizes: object) -> object:
        yield "unequal", lambda: gpu_parts.equal_enough({"difference": 0.5, "steps": 2}, "difference", 0.1)
        yield "nan", lambda: gpu_parts.equal_enough({"difference": math.nan}, "difference", 0.1)
        yield "wrong", lambda: {}["missing"]
        yield "right", lambda: gpu_parts.equal_enough({"difference": 0.1}, "difference", 0.1)

    monkeypatch.setitem(gpu_parts.PARTS, "waits", checks)
    monkeypatch.setattr(sys, "argv", ["gpu_parts.py", "waits", "--device", "cpu", "--dry", "--out"])
    with pytest.raises(SystemExit) as ended:
        gpu_parts.main()
    assert ended.value.code == 1
    (path,) = results.glob("*-gpu_waits.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["check"] for row in rows] == ["unequal", "nan", "wrong", "right"]
    assert rows[0]["steps"] == 2
    assert [row.get("failure") for row in rows] == [
        "difference: 0.5, more than 0.1",
        "difference: nan, more than 0.1",
        "KeyError: 'missing'",
        None,
    ]


grow = load("grow")


def test_grown_model_has_the_small_models_logits_on_boxes_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_model(class_names=("ant", "bee", "cat", "dog", "eel"), patch_size=4)  # a grid of 8x8
    size = {"image_size": 56, "patch_size": 8, "embed_dim": 64, "depth": 5, "num_heads": 4}  # of 7x7
    monkeypatch.setattr(grow, "named_config", lambda _, **options: vs.ViTConfig.from_dict(size | options))
    config = grow.grown_config(small.config, "large")
    images = random_images(2, 3, 28, 28)
    boxes = images.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    with torch.inference_mode():
        grown = grow.grow(small, config)
        noisy = grow.grow(small, config, noise=0.01)
        expected = small(images)
        torch.testing.assert_close(grown(boxes), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        assert 0 < (noisy(boxes) - expected).abs().max() < 0.1 * expected.abs().max()
    assert (config.depth, config.class_names) == (5, small.config.class_names)
    assert all(tensor.any() for tensor in noisy.state_dict().values() if tensor.ndim == 2)


@pytest.mark.parametrize("name", ["plain", "token", "prefix"])
def test_fuzzing_reads_the_openapi_document_of_the_server(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzzing = load("fuzzing")
    monkeypatch.setattr(fuzzing, "schemathesis", lambda: "st")
    variant = fuzzing.VARIANTS[name]
    words = fuzzing.command("http://127.0.0.1:1", variant, 90)
    prefix = "/vitascope" if name == "prefix" else ""
    assert words[:3] == ["st", "run", f"http://127.0.0.1:1{prefix}/openapi.json"]
    assert ("--header" in words) == (name == "token")
    assert words[words.index("--max-time") + 1] == "90"
    options = ["a" if option == "TOKEN_FILE" else option for option in variant.options]
    parse(Serve, "serve", ["model", *options])


operations = load("operations")


@pytest.mark.parametrize("name", ["cct_mini", "resnet29_w32_cifar"])
def test_an_image_costs_three_forward_passes_with_attention(name: str) -> None:
    config = named_config(name, num_classes=3)
    model = vs.create_model(name, num_classes=3)
    assert operations.training_operations(model, 3, *config.image_hw) == 3 * config.flops


def test_a_change_is_compared_with_the_row_without_options() -> None:
    losses = {
        "": [0.91, 0.90, 0.92, 0.905],
        "depth=1": [0.85, 0.86],
        "shift=0": [0.93, 0.91],
        "flip=0": [0.9],
    }
    seeds = [(command, *pair) for command, values in losses.items() for pair in enumerate(values)]
    trials = [operations.Trial(name or "as it is", name, seed, 1e13, loss=loss) for name, seed, loss in seeds]
    lines = [line.split("|")[1:] for line in operations.tables(trials).splitlines() if line.startswith("|")]
    row = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    assert row["flip=0"][5] == "0.9000"
    for command in ("depth=1", "shift=0"):
        values, base = np.array(losses[command]), np.array(losses[""])
        error = values.std(ddof=1) / np.sqrt(2)
        assert row[command][5] == f"{values.mean():.4f} ± {error:.4f}"
        squares = sum(((part - part.mean()) ** 2).sum() for part in (values, base))
        t = (values.mean() - base.mean()) / np.sqrt(squares / 4 * (1 / 2 + 1 / 4))
        # Student's distribution with 4 degrees of freedom, in closed form.
        share = t / np.sqrt(4 + t**2)
        assert float(row[command][6]) == pytest.approx((2 + 3 * share - share**3) / 4, rel=0.06)
    assert row["as it is"][6] == ""
