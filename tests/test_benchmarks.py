"""Benchmarks cover all options, their numbers are read back, and the docs show the newest ones.

No benchmark runs completely here: they take minutes, and their results need an idle machine.
"""

import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitascope as vs
from tests.allocating import allocating
from tests.data import read_tree
from tests.model import random_images, randomize, small_config, small_model
from tests.training import tiny_config, undrawn, write_folder
from vitascope.cli.parsing import parse
from vitascope.cli.serve import Serve
from vitascope.data.datasets import open_data
from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError
from vitascope.evaluation.measure import Evaluation
from vitascope.model.config import OPTIONS, ViTConfig
from vitascope.model.options import (
    BlockOptions,
    EmbeddingOptions,
    NormOptions,
    ReadoutOptions,
    Regularization,
    RotaryOptions,
    TokenizerOptions,
)
from vitascope.model.sizes import named_config
from vitascope.options.groups import Masking
from vitascope.weights.preprocess import preprocess_of
from vitascope.weights.saving import save_pretrained

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


ablation, axial, reading, reports = load("ablation"), load("axial"), load("reading"), load("reports")


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


@pytest.fixture(scope="module")
def followed() -> object:
    """A fake measurement that follows the formula exactly."""
    found = [
        axial.Result(point, [1e-9 * point.multiply_adds()], 2.0 * math.prod(point.grid), point.weights_mib())
        for point in axial.points()
    ]
    return axial.Measurement(**CONDITIONS, method="made up", results=found)


def test_ablation_covers_every_choice_of_every_option(configs) -> None:
    assert {"positions", "pool", "stem", "norm", "attention", "mlp", "qkv_bias", "head"} <= CHOICES.keys()
    for name, choices in CHOICES.items():
        covered = {config.option(name) for config in configs.values()}
        assert covered | NOT_TRAINED.get(name, set()) >= set(choices), name


def test_ablation_covers_options_without_named_choices(configs) -> None:
    base = configs["base"]
    for name in ("num_registers", "distillation_token", "layer_scale", "embedding_norm", "position_prefix"):
        assert any(config.option(name) != base.option(name) for config in configs.values()), name


def test_changes_have_unique_names_and_models(configs) -> None:
    assert len(configs) == len(ablation.CHANGES)
    assert next(iter(configs)) == "base"
    assert len(set(configs.values())) == len(configs)


def test_base_of_the_ablation_is_the_recipe_digits(configs) -> None:
    base = configs["base"]
    assert base == ablation.Change().model_config()
    assert (base.image_hw, base.patch_hw, base.grid, base.depth) == ((32, 32), (8, 8), (4, 4), 3)
    assert configs["stem=resnet resnet_layers=[1] resnet_width=16"].grid == base.grid
    assert configs["stem=tokenizer tokenizer_widths=[32, 64]"].grid == base.grid
    assert configs["stem=overlap stride=4"].grid == (7, 7)
    swiglu = configs["mlp=swiglu mlp_ratio=2.667"]
    assert swiglu.num_parameters == pytest.approx(base.num_parameters, rel=0.002)


def test_only_selects_names_that_contain_the_text() -> None:
    assert [change.name for change in ablation.selected(["positions="])] == [
        f"positions={kind}" for kind in CHOICES["positions"] if kind != "learned"
    ] + ["positions=rotary absolute=patches", "positions=rotary absolute=all"]


def test_a_change_is_trained_and_timed() -> None:
    (change,) = ablation.selected(["attention=axial"])
    with undrawn():
        assert 0 < ablation.test_accuracy(change, seed=0, epochs=1) < 1
    timing = ablation.Timing(warmup=1, steps=1, seconds=0)
    seconds = ablation.measure_steps([ablation.Change(), change], 2, timing)
    assert [len(times) for times in seconds.values()] == [2, 2]
    assert all(second > 0 for times in seconds.values() for second in times)


def test_ablation_table_shows_means_ranges_and_medians(ablated) -> None:
    assert ablated.results[0].row() == ("base", "98.50", "98.00 to 99.00", "344,650", "11.81", "2,133")
    assert ablation.BATCH_SIZE == 64


def test_attention_step_has_the_flops_of_the_formula() -> None:
    for attention, backward in itertools.product(axial.LIMITS, (False, True)):
        point = axial.Point(attention, (16, 16), backward)
        with FlopCounterMode(display=False) as counter:  # it does not count fused kernels
            axial.attention_step(point, materialized=True)()
        assert counter.get_total_flops() == 2 * point.multiply_adds(), point


@pytest.mark.skipif(sys.platform == "win32", reason="no fork server")
def test_peak_memory_includes_materialized_weights() -> None:
    point = axial.Point("global", (32, 32), False)
    held = axial.peak_mib(point, materialized=True)
    assert held > 1.5 * point.weights_mib()  # scores and weights
    assert axial.peak_mib(point, materialized=False) < held / 2


def test_costs_by_the_formula_have_its_exponents_and_ratios(followed) -> None:
    rows = [
        re.split(r" *\| *", line)[1:-1]
        for line in axial.exponents_table(followed, axial.SQUARES).splitlines()
    ]
    for attention, limit, formula, *measured in rows[2:]:
        forward, both, held, runs = map(float, measured)
        assert float(formula) == pytest.approx(int(limit), abs=0.05), attention
        assert forward == both == held == float(formula)
        assert runs == 2
    rows = [re.split(r" *\| *", line)[1:-1] for line in axial.comparison_table(followed).splitlines()]
    assert all(row[1] == row[2] == row[3] == row[4] and row[5] == "1.0" for row in rows[2:])
    assert {line.split("|")[5].strip() for line in axial.points_table(followed).splitlines()[2:]} == {"1.00"}


def test_readers_deliver_every_image_as_normalized_floats(tmp_path: Path) -> None:
    folder = reading.make_photographs(tmp_path / "pictures", 8)
    entrants = [e for e in reading.entrants_of(folder, tmp_path, [0, 1]) if e.name != reading.PEER]
    assert len(entrants) == 6
    for entrant in entrants:
        batches = list(entrant.build(3, entrant.workers)(1))
        assert sum(map(len, batches)) == (8 if "folder" in entrant.name else 4)  # the rest is val and test
        for batch in batches:
            assert batch.shape[1:] == (3, 224, 224)
            assert -1 <= batch.min() < 0 < batch.max() <= 1
    assert "8 images, median 500 x 375 pixels" in reading.describe_pictures(folder)


def test_readers_are_compared_with_torchvision_with_the_same_number_of_workers() -> None:
    entrants = [reading.Entrant(name, None, workers) for workers in (0, 2) for name in (reading.PEER, "ours")]
    rows = reading.table(entrants, [[100, 50], [150, 100], [400, 400], [300, 500]]).splitlines()[2:]
    shares = [row.split("|")[-2].strip() for row in rows]
    assert shares == ["1.00", "1.75", "1.00", "1.00"]
    assert reading.table(entrants[1:2], [[150, 100]]).split("|")[-2].strip() == "-"


def test_numbers_are_read_back_as_they_were_written(ablated, followed, results) -> None:
    for script, measured in ((ablation, ablated), (axial, followed)):
        name = script.__name__
        measured.write()
        assert reports.newest_numbers(name).parent == results
        assert script.Measurement.newest() == measured
        assert measured.machine in measured.report()
    assert axial.draw(followed).axes


def test_newest_numbers_are_those_of_the_latest_date(results) -> None:
    with pytest.raises(FileNotFoundError, match="measure with --out first"):
        reports.newest_numbers("ablation")
    for day in ("2026-03-01", "2026-12-01", "2026-11-20"):
        (results / f"{day}-ablation.json").touch()
    assert reports.newest_numbers("ablation").name == "2026-12-01-ablation.json"


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


@pytest.mark.parametrize("script", [ablation, axial, load("rates")], ids=lambda script: script.__name__)
def test_docs_show_the_newest_numbers(script: ModuleType) -> None:
    shown = reports.between(OPTIONS_PAGE.read_text(encoding="utf-8"), script.__name__)
    if not list(reports.RESULTS.glob(f"*-{script.__name__}.json")):
        assert shown == ""
        return
    assert shown == script.Measurement.newest().for_docs() + "\n"


def test_newest_ablation_has_parameters_and_flops_of_the_current_models(configs) -> None:
    if not list(reports.RESULTS.glob("*-ablation.json")):
        pytest.skip("no ablation has been measured yet")
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


data_sizes = load("data_sizes")


@pytest.fixture(scope="module")
def compared() -> object:
    """A fake measurement: two seeds for the smaller share; one for the larger, without the ViT."""
    runs = [
        data_sizes.Run(
            model, share, seed, int(10 * share), 30, 900, 5_000_000, 10**9, half, rate, valid, accuracy, 60.0
        )
        for model, start in (("ViT", 0.5), ("hybrid", 0.7), ("ResNet", 0.7))
        for share, seeds in ((10.0, 2), (100.0, 1))
        for half, rate, valid in ((True, 0.01, 0.4), (True, 0.003, 0.6), (False, 0.003, 0.6))
        for seed, accuracy in enumerate([start, start + 0.1 - 0.05 * half][:seeds])
        if (model, share) != ("ViT", 100.0)
    ]
    setting = {"data": "/data/cifar10", "batch_size": 128, "rates": [0.01, 0.003], "tune_up_to": 10.0}
    setting["options"] = ["flip=0"]
    return data_sizes.Measurement(**CONDITIONS, setting=setting, runs=runs)


def test_shares_are_nested_per_class_and_keep_all_test_images(tmp_path: Path) -> None:
    splits = data_sizes.open_data("digits")
    found = {}
    for share in (5, 40):
        data_sizes.write_share(splits, share, tmp_path / str(share))
        found[share] = data_sizes.open_data(str(tmp_path / str(share)))
        for name in ("train", "val"):
            whole, part = (data_sizes.np.bincount(getattr(s, name).labels) for s in (splits, found[share]))
            assert part.tolist() == [max(1, round(share / 100 * count)) for count in whole], (name, share)
        assert len(found[share].test) == len(splits.test)
    few, many = ([path.read_bytes() for path in found[share].train.sources] for share in (5, 40))
    assert set(few) < set(many)


def test_models_of_the_study_have_the_same_training() -> None:
    asked = data_sizes.parse(["flip=0"])
    vit, hybrid, cnn = data_sizes.configs(asked, "digits", 3).values()
    assert vit.augmentation.flip == 0
    assert vit.replace(model_options=hybrid.architecture.model_options) == hybrid
    added = vit.architecture.model_options.keys() - hybrid.architecture.model_options.keys()
    assert {name: vit.architecture.model_options[name] for name in added} == {"stem": "conv"}
    assert cnn.architecture.model == "resnet29_w16_cifar"
    assert vit.augmentation == cnn.augmentation
    assert vit.optimization == cnn.optimization


def test_smaller_shares_have_more_epochs_and_fewer_steps() -> None:
    epochs = [data_sizes.epochs_of(22, share) for share in (2, 20, 100)]
    assert epochs == sorted(epochs, reverse=True)
    assert epochs[-1] == 22
    steps = [count * share for count, share in zip(epochs, (2, 20, 100), strict=True)]
    assert steps == sorted(steps)


TINY_STUDY = [
    "depth=1",
    "image_size=8",
    "patch_size=4",
    "--embed-dim",
    "8",
    "--device",
    "cpu",
    "--epochs",
    "1",
]


def test_longer_runs_have_the_rate_with_the_best_validation(monkeypatch) -> None:
    asked = []

    def run_once(model, share, seed, rate, data, arguments, *, half: bool) -> object:
        asked.append((model, rate, half))
        validation = {"ViT": rate, "hybrid": -rate}[model]
        return data_sizes.Run(model, share, seed, 100, 5, 10, 1, 1, half, rate, validation, 0.5, 1.0)

    monkeypatch.setattr(data_sizes, "run_once", run_once)
    given = ["--shares", "8", "--models", "ViT", "hybrid", "--rates", "0.001", "0.003", "--batch-size", "64"]
    arguments, splits = data_sizes.parse(given), data_sizes.open_data("digits")
    runs = list(data_sizes.runs_of(arguments, splits, []))
    assert asked == [(run.model, run.rate, run.half) for run in runs] == [
        ("ViT", 0.001, True), ("ViT", 0.003, True), ("ViT", 0.003, False),
        ("hybrid", 0.001, True), ("hybrid", 0.003, True), ("hybrid", 0.001, False),
    ]  # fmt: skip
    asked.clear()
    assert list(data_sizes.runs_of(arguments, splits, runs[:1] + runs[3:])) == runs[1:3]  # resumed


def test_larger_shares_may_take_the_best_rate_of_the_share_before(monkeypatch) -> None:
    def run_once(model, share, seed, rate, data, arguments, *, half: bool) -> object:
        return data_sizes.Run(model, share, seed, 100, 5, 10, 1, 1, half, rate, rate, 0.5, 1.0)

    monkeypatch.setattr(data_sizes, "run_once", run_once)
    given = ["--shares", "8", "16", "--models", "ViT", "--rates", "0.003", "0.001", "--tune-up-to", "8"]
    arguments, splits = data_sizes.parse([*given, "--batch-size", "64"]), data_sizes.open_data("digits")
    runs = list(data_sizes.runs_of(arguments, splits, []))
    assert [(run.share, run.rate, run.half) for run in runs] == [
        (8, 0.003, True), (8, 0.001, True), (8, 0.003, False), (16, 0.003, True), (16, 0.003, False),
    ]  # fmt: skip
    assert list(data_sizes.runs_of(arguments, splits, runs[:3])) == runs[3:]  # resumed


def test_models_of_the_study_are_trained_on_their_share() -> None:
    given = ["--shares", "8", "--models", "ViT", "hybrid", "--rates", "0.001", "--batch-size", "64"]
    arguments, splits = data_sizes.parse([*given, *TINY_STUDY]), data_sizes.open_data("digits")
    done = [
        data_sizes.Run("ViT", 8.0, 0, 100, 2, 4, 1, 1, True, 0.001, 0.5, 0.5, 1.0),
        data_sizes.Run("ViT", 8.0, 0, 100, 5, 10, 1, 1, False, 0.001, 0.5, 0.5, 1.0),
        data_sizes.Run("hybrid", 8.0, 0, 100, 2, 4, 1, 1, True, 0.001, 0.5, 0.5, 1.0),
    ]
    with undrawn():
        (run,) = data_sizes.runs_of(arguments, splits, done)
    assert (run.model, run.share, run.seed, run.half, run.images) == ("hybrid", 8.0, 0, False, 100)
    assert (run.epochs, run.steps, run.rate) == (5, 10, 0.001)
    assert 0 <= run.accuracy < 1
    arguments.shares = [1.0]
    with pytest.raises(data_sizes.UserError, match="1% are 10 images, less than a batch"):
        list(data_sizes.runs_of(arguments, splits, []))


def test_data_sizes_are_read_back_tabulated_and_drawn(compared, results) -> None:
    compared.write()
    assert data_sizes.Measurement.newest() == compared
    rows = [re.split(r" *\| *", line)[1:-1] for line in compared.table().splitlines()]
    assert rows[2] == ["100", "10%", "30", "55.0 (50.0 to 60.0) (+2.5)", *2 * ["75.0 (70.0 to 80.0) (+2.5)"]]
    assert rows[3] == ["1,000", "100%", "30", "-", "70.0 (+0.0)", "70.0 (+0.0)"]
    assert "a CPU" in compared.report()
    (axes,) = data_sizes.draw(compared).axes
    halves, wholes = axes.lines[::2], axes.lines[1::2]
    assert [line.get_xdata().tolist() for line in wholes] == [[100], [100, 1000], [100, 1000]]
    assert [line.get_ydata()[0] for line in wholes] == pytest.approx([55, 75, 75])
    assert [line.get_ydata()[0] for line in halves] == pytest.approx([52.5, 72.5, 72.5])
    names = {text.get_text(): text for text in axes.texts}
    assert names.keys() == set(data_sizes.MODELS)
    apart = abs(names["hybrid"].xy[1] - names["ResNet"].xy[1])  # both lines end at 70
    assert apart >= (axes.get_ylim()[1] - axes.get_ylim()[0]) / 20


def test_page_of_training_shows_the_newest_data_sizes() -> None:
    shown = reports.between((ROOT / "docs" / "training.md").read_text(encoding="utf-8"), "data_sizes")
    if not list(reports.RESULTS.glob("*-data_sizes.json")):
        assert shown == ""
        return
    assert shown == data_sizes.Measurement.newest().for_docs() + "\n"


distillation, pretraining = load("distillation"), load("pretraining")


@pytest.mark.parametrize(
    ("teacher", "recipe", "model"),
    [("hybrid", "small-data", "cct_mini"), ("resnet29_w32_cifar", "cnn", "resnet29_w32_cifar")],
)
def test_students_differ_only_in_their_teacher(teacher: str, recipe: str, model: str | None) -> None:
    given = ["--teacher", teacher, "--teacher-epochs", "7", "--epochs", "40", "--patch-size", "8", "mixup=0"]
    first, *students = distillation.configs(distillation.parse(given), "digits", Path("runs")).values()
    assert (first.architecture.model, first.optimization.epochs) == (model, 7)
    options = vs.TrainConfig.from_recipe(recipe).architecture.model_options
    assert first.architecture.model_options == options
    alone, hard, soft = students
    assert [student.distillation.teacher for student in students] == [None, first.run, first.run]
    assert [hard.distillation.distill, soft.distillation.distill] == ["hard", "soft"]
    for student in students:
        assert student.replace(run=None, teacher=None, distill=alone.distillation.distill) == alone.replace(
            run=None
        )
        assert student.architecture.model_options == {"init": "mimetic", "stem": "conv"}
        assert (student.architecture.patch_size, student.optimization.epochs) == (8, 40)
    assert all(config.augmentation.mixup == 0 for config in (first, *students))


def test_row_of_a_student_has_the_accuracy_of_each_head() -> None:
    heads = {"class_head": 0.5, "distillation_head": 0.25, "both_heads": 0.75}
    assert distillation.Result("taught", 1200, heads, 60.0).row() == (
        "taught", "1,200", "50.00", "25.00", "75.00", "60",
    )  # fmt: skip
    assert distillation.Result("alone", 1200, {"class_head": 0.5}, 60.0).row()[2:5] == ("50.00", "-", "-")


@torch.no_grad()
def test_each_head_is_measured_alone_and_with_the_other(tmp_path: Path) -> None:
    model = randomize(small_model(distillation_token=True, num_classes=2), seed=3)
    model.head.linear.bias.copy_(torch.tensor([50.0, -50.0]))  # always 0
    model.head.distillation.bias.copy_(torch.tensor([-200.0, 200.0]))  # always 1, and more certain
    images = read_tree(write_folder(tmp_path / "data", per_class=5, side=32))
    images = images.subset("test", np.arange(1, 10))  # four of one class, five of the other
    found = distillation.both_heads(model, Loader(images, preprocess_of(model), 3), torch.float32)
    assert found == pytest.approx({"class_head": 4 / 9, "distillation_head": 5 / 9, "both_heads": 5 / 9})


def test_fine_tuning_from_pretrained_and_random_weights_has_the_same_settings(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(pretraining, "train", lambda name, config: seen.append(config))
    monkeypatch.setattr(pretraining, "tested", lambda run: {"accuracy": 0.5})
    given = ["--patch-size", "8", "--finetune-epochs", "40", "--precision", "fp32"]
    arguments = pretraining.parse([*given, "--finetune", "layer_decay=0.5", "keep=last"])
    for start in (None, "pixels"):
        assert pretraining.finetune(start, 3, arguments, "digits", Path("runs")) == 0.5
    scratch, tuned = seen
    assert (scratch.option("weights"), tuned.option("weights")) == (None, "runs/pixels")
    assert tuned.replace(weights=None, run=scratch.run) == scratch
    assert (scratch.seed, scratch.architecture.patch_size, scratch.optimization.epochs) == (3, 8, 40)
    assert (scratch.optimization.layer_decay, scratch.optimization.keep) == (0.5, "last")


def test_each_target_is_pretrained_with_its_recipe_epochs_and_options(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(pretraining, "train", lambda name, config: seen.append(config))
    given = ["--targets", "mae:7", "pixels", "--epochs", "3", "--pretrain", "batch_size=64", "lr=0.002"]
    arguments = pretraining.parse(given)
    assert arguments.targets == [("mae", 7), ("pixels", None)]
    for name, epochs in arguments.targets:
        pretraining.pretrain(name, epochs or arguments.epochs, arguments, Path("runs"))
    assert [config.masking.target for config in seen] == ["mae", "pixels"]
    assert [config.optimization.epochs for config in seen] == [7, 3]
    for config in seen:
        assert (config.optimization.batch_size, config.optimization.lr) == (64, 0.002)
        recipe = vs.TrainConfig.from_recipe(task="masked", target=config.masking.target)
        assert config.augmentation == recipe.augmentation


def test_targets_of_the_benchmark_are_those_of_the_command() -> None:
    assert set(pretraining.TARGETS) == set(get_args(get_type_hints(Masking)["target"]))
    with pytest.raises(SystemExit):
        pretraining.parse(["--targets", "colour"])


uneven = load("uneven")


def test_uneven_classes_have_the_asked_training_images_and_all_test_images(tmp_path: Path) -> None:
    for part, per_class in (("train", 9), ("test", 4)):
        write_folder(tmp_path / "data" / part, per_class=per_class, side=8, classes=("a", "b", "c"))
    given = uneven.parse(["--counts", "c=7", "a=3"])
    data = uneven.write_classes(str(tmp_path / "data"), dict(given.counts), tmp_path / "uneven")
    counts = {
        part: {name: len(list((Path(data) / part / name).iterdir())) for name in ("a", "c")}
        for part in ("train", "test")
    }
    assert counts == {"train": {"a": 3, "c": 7}, "test": {"a": 4, "c": 4}}
    assert not (Path(data) / "train" / "b").exists()


few_images = load("few_images")


def test_few_images_are_of_classes_that_the_body_has_not_seen(tmp_path: Path, monkeypatch) -> None:
    for part, per_class in (("train", 20), ("test", 2)):
        write_folder(tmp_path / "data" / part, per_class=per_class, side=8, classes=("a", "b", "c", "d"))
    configs = []

    def train(name: str, config: vs.TrainConfig) -> SimpleNamespace:
        configs.append(config)
        return SimpleNamespace(path=config.run)

    monkeypatch.setattr(few_images, "train", train)
    found = {"correct": 3, "images": 4, "accuracy": 0.75, "seconds": 1.0}
    monkeypatch.setattr(few_images, "tested", lambda run: found)
    arguments = few_images.parse(["--data", str(tmp_path / "data"), "--sizes", "10", "--most-shown", "70"])
    rows = few_images.measured(arguments, tmp_path)
    body, scratch, *tuned = configs
    classes = [open_data(config.data).train.class_names for config in configs]
    assert classes == [("a", "c"), *3 * [("b", "d")]]
    assert [config.weights for config in configs] == [None, None, body.run, body.run]
    assert {len(list(Path(scratch.data, "train", name).iterdir())) for name in ("b", "d")} == {5}
    assert {config.optimization.epochs for config in (scratch, *tuned)} == {7}
    assert rows == [("10", "7", *3 * ["75.0 (30.1 to 95.4; 1)"])]


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


def test_runs_on_uneven_classes_differ_in_their_balance_alone() -> None:
    arguments = uneven.parse(["--epochs", "7"])
    configs = [uneven.config_of(kind, 1, arguments, "digits", Path("runs")) for kind in uneven.KINDS]
    neither = {"run": None, "class_weights": "none", "sampling": "uniform"}
    assert len({repr(config.replace(**neither)) for config in configs}) == 1
    balances = [(config.balance.class_weights, config.balance.sampling) for config in configs]
    assert balances == [("none", "uniform"), ("balanced", "uniform"), ("none", "balanced")]


def test_row_of_uneven_classes_has_means_over_the_seeds() -> None:
    def evaluation(guesses: list[int]) -> Evaluation:
        labels, outputs = np.array([0, 0, 1, 1]), np.eye(2, dtype=np.float32)[guesses]
        return Evaluation(
            split="test",
            indices=labels,
            targets=ClassIndices(labels, ("a", "b")),
            probabilities=outputs,
            loss=0.0,
        )

    row = uneven.row("sampling", [evaluation([0, 0, 1, 1]), evaluation([0, 1, 0, 0])])
    assert row == ("sampling", "62.5", "100.0, 25.0", "60.0", "75.0", "50.0")


gpu_parts, gpu_training, same_minutes = map(load, ("gpu_parts", "gpu_training", "same_minutes"))


@pytest.fixture
def tiny_case() -> object:
    """A model and images for very short training on a CPU."""
    return dataclasses.replace(gpu_training.TINY, image_size=8, num_classes=3, batch_size=4, depth=1)


def test_bare_steps_and_the_loop_have_the_same_model_and_batch_size(tiny_case, tmp_path: Path) -> None:
    setting = gpu_training.Setting(device=torch.device("cpu"), dtype=torch.float32)
    names = [gpu_training.OURS, gpu_training.LOOP]
    found = gpu_training.entrants(tiny_case, setting, "eager", names, tmp_path)
    assert [(entrant.name, entrant.images) for entrant in found] == [(name, 4) for name in names]
    assert len({entrant.flops for entrant in found}) == 1
    assert all(entrant.first > 0 for entrant in found)
    bare, loop = (inspect.getclosurevars(entrant.step).nonlocals for entrant in found)
    assert bare["model"].config == loop["trainer"].model_config
    assert bare["model"].config.replace(class_names=()) == named_config(
        "vit_ti16", image_size=8, patch_size=4, num_classes=3, depth=1
    )
    before = [parameter.clone() for parameter in bare["model"].parameters()]
    gpu_training.take_turns(found, setting, rounds=2, warmup=1, steps=2)
    assert all(len(entrant.times) == 2 for entrant in found)
    assert loop["trainer"].step == 10  # four to start, and three in each round
    pairs = zip(before, bare["model"].parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in pairs)
    assert loop["trainer"].train_loader.batches_per_epoch == 4
    assert loop["trainer"].config.augmentation.randaugment == 2
    assert not loop["trainer"].schedule.is_small(0)


def test_every_step_of_the_loop_has_a_full_batch(tiny_case) -> None:
    splits = gpu_training.random_splits(tiny_case)
    assert len(splits.train) % tiny_case.batch_size == 0
    assert set(splits.train.labels.tolist()) == {0, 1, 2}


def test_gpu_table_compares_within_a_mode_and_with_the_ceilings() -> None:
    seconds = {"timm, bare step": 0.2, "vitascope, bare step": 0.1, "vitascope, complete loop": 0.125}
    found = [
        gpu_training.Entrant(name=name, mode=mode, step=int, images=10, flops=10**12, first=1, times=times)
        for mode, factor in (("eager", 1), ("compiled", 0.5))
        for name, second in seconds.items()
        if (times := [factor * second, 9 * factor * second, factor * second / 2])
    ]
    found[2].profile = gpu_training.Profile(launches=1250.0, busy=0.1)  # of 0.125 s
    ceiling = gpu_training.Entrant(
        name="matmul", mode="eager", step=int, images=0, flops=10**12, times=[0.05]
    )
    lines = gpu_training.table([*found, ceiling], 40.0).splitlines()
    rows = [re.split(r" *\| *", line)[1:-1] for line in lines[2:8]]
    assert rows[2] == [
        *(
            "vitascope, complete loop",
            "eager",
            "80.0",
            "8.89 to 160",
            "1.60",
            "80.0%",
            "40.0%",
            "20.0%",
            "1.0 s",
            "1,250",
            "20%",
            "-",
        )
    ]
    assert [row[4] for row in rows] == 2 * ["1.00", "2.00", "1.60"]
    assert [row[5] for row in rows] == 2 * ["-", "-", "80.0%"]
    assert "Ceiling: 20.0 TFLOP/s." in lines
    assert "data sheet" not in gpu_training.table([*found, ceiling], None)


rates = load("rates")


def test_options_are_tabulated_with_the_test_accuracy_of_their_best_rate(results) -> None:
    runs = [
        rates.Trained("base", 0.003, 633_000, 0.70, 0.69, 100.0),
        rates.Trained("base", 0.001, 633_000, 0.65, 0.71, 100.0),
        rates.Trained("pool=cls", 0.003, 634_000, 0.60, 0.61, 100.0),
    ]
    measured = rates.Measurement(**CONDITIONS, data="/data/cifar10", epochs=2, options=["ema=0"], runs=runs)
    rows = [re.split(r" *\| *", line)[1:-1] for line in measured.table().splitlines()[2:]]
    assert rows == [
        ["base", "65.0", "70.0", "69.0", "633,000"],
        ["pool=cls", "-", "60.0", "61.0", "634,000"],
    ]
    assert "cifar10, 2 epochs, ema=0; a CPU; 2026-01-02." in measured.for_docs()
    measured.write()
    assert rates.Measurement.newest() == measured


def test_each_option_is_trained_at_each_rate_once(results, monkeypatch) -> None:
    asked: list[tuple[str, float]] = []

    def run(name: str, rate: float, arguments: object) -> object:
        asked.append((name, rate))
        return rates.Trained(name, rate, 1, 0.5, 0.5, 1.0)

    monkeypatch.setattr(rates, "trained", run)
    for extra in ([], ["--resume"]):
        arguments = rates.parse(["--data", "digits", "--out", "--rates", "0.001", "0.003", *extra])
        with monkeypatch.context() as patch:
            patch.setattr(rates, "parse", lambda arguments=arguments: arguments)
            rates.main()
    assert len(asked) == len(set(asked)) == 2 * len(rates.CHANGES)
    other = rates.parse(["--data", "digits", "--epochs", "3", "--resume"])
    with pytest.raises(UserError, match="cannot resume: the newest numbers have epochs 2, not 3"):
        rates.start(other)


def test_an_option_is_trained_at_a_rate() -> None:
    arguments = rates.parse(["embed_dim=8", "depth=1", "num_heads=1", "--data", "digits", "--epochs", "1"])
    with undrawn():
        found = rates.trained("pool=sequence", 0.002, arguments)
    assert (found.name, found.rate) == ("pool=sequence", 0.002)
    assert 0 <= found.validation <= 1


def test_every_row_of_the_rates_is_a_configuration_of_its_own() -> None:
    configs = {
        name: vs.TrainConfig.from_recipe(**{"recipe": "small-data", **options})
        for name, options in rates.CHANGES.items()
    }
    assert configs["base"] == vs.TrainConfig.from_recipe("small-data")
    assert len({config.to_yaml() for config in configs.values()}) == len(configs)
    cnn, base = configs[rates.CNN], configs["base"]
    assert (cnn.optimization, cnn.augmentation) == (base.optimization, base.augmentation)


def trained(name: str, seed: int, tested: float, minutes: list[float], accuracy: list[float]) -> object:
    """A fake run of same_minutes."""
    return same_minutes.Trained(name, seed, 630_000, 12.3, minutes, accuracy, tested, 30.5)


@pytest.fixture
def contest(monkeypatch) -> list[tuple[str, int, dict[str, object]]]:
    """The runs that same_minutes starts; none is trained."""
    started: list[tuple[str, int, dict[str, object]]] = []

    def run(name: str, data: str, minutes: float, seed: int, **options: object) -> object:
        started.append((name, seed, options))
        return trained(name, seed, 0.8, [1.0], [0.7])

    for name in ("vitascope", "timm's ViT-Ti/4"):
        monkeypatch.setitem(same_minutes.CONTESTANTS, name, run)
    return started


def run_same_minutes(monkeypatch, *given: str) -> None:
    asked = ["--only", "vitascope", "timm's ViT-Ti/4", "--data", "digits", "--seeds", "2", "--out"]
    arguments = same_minutes.parse([*asked, *given])
    with monkeypatch.context() as patch:
        patch.setattr(same_minutes, "parse", lambda: arguments)
        same_minutes.main()


def test_same_minutes_tabulates_accuracy_and_the_time_to_the_goal(results) -> None:
    runs = [
        trained("vitascope", 0, 0.81, [1.0, 2.0, 3.0], [0.5, 0.72, 0.8]),
        trained("vitascope", 1, 0.83, [1.0, 3.0, 4.0], [0.6, 0.7, 0.8]),
        trained("resnet29_w32_cifar", 0, 0.7, [8.0, 16.0], [0.6, 0.7]),
        trained("timm's ViT-Ti/4", 0, 0.6, [10.0, 20.0], [0.5, 0.6]),
    ]
    measured = same_minutes.Measurement(
        **CONDITIONS, data="digits", minutes=30, goal=0.7, options=[], trained=runs
    )
    rows = [re.split(r" *\| *", line)[1:-1] for line in measured.table().splitlines()[2:]]
    assert rows[0] == ["vitascope", "0.63 M", "12.3", "82.00 (81.00 to 83.00)", "2.5", "30.5"]
    assert rows[2][3:5] == ["60.00 (60.00 to 60.00)", "not reached"]
    measured.write()
    assert same_minutes.Measurement.newest() == measured
    (axes,) = same_minutes.draw(measured).axes
    lines = axes.lines[:-1]  # the last one is the goal
    assert [line.get_ydata().tolist() for line in lines] == [[50, 72, 80], [60, 70, 80], [60, 70], [50, 60]]
    assert len({line.get_color() for line in lines}) == 3


def test_same_minutes_gives_options_to_ours_alone_and_resumes(contest, results, monkeypatch) -> None:
    with undrawn():
        run_same_minutes(monkeypatch, "lr=0.002", "compile=true")
        assert [(name, seed) for name, seed, _ in contest] == [
            (name, seed) for seed in (0, 1) for name in ("vitascope", "timm's ViT-Ti/4")
        ]
        assert [options for *_, options in contest[:2]] == [{"lr": 0.002, "compile": True}, {}]
        assert {path.suffix for path in results.iterdir()} == {".json", ".md", ".png"}
        measured = same_minutes.Measurement.newest()
        dataclasses.replace(measured, trained=measured.trained[:3]).write()
        del contest[:]
        run_same_minutes(monkeypatch, "lr=0.002", "compile=true", "--resume")
        assert [(name, seed) for name, seed, _ in contest] == [("timm's ViT-Ti/4", 1)]
    with pytest.raises(UserError, match=r"cannot resume: the newest numbers have options \['lr=0.002'"):
        run_same_minutes(monkeypatch, "lr=0.1", "--resume")
    with pytest.raises(UserError, match="does not fix, not 'minutes=3'"):
        run_same_minutes(monkeypatch, "minutes=3")


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


@pytest.mark.parametrize("part", ["minute", "accuracy"])
def test_options_for_a_gpu_are_those_of_a_small_model(part: str, recorded, tmp_path: Path) -> None:
    assert on_gpu(recorded, "--data", "photos", part).returncode == 0
    script, *given = (tmp_path / "arguments").read_text().splitlines()
    assert script == "benchmarks/same_minutes.py"
    assert same_minutes.parse(given).data == "photos"
    words = same_minutes.parse(given).options
    config = vs.TrainConfig.from_recipe(
        "small-data", **same_minutes.named_values(words, fixed=same_minutes.FIXED)
    )
    architecture = config.architecture
    model = named_config("cct_mini", **architecture.model_options, **architecture.chosen())
    assert model.num_parameters < 6_300_000


def test_failed_parts_on_a_gpu_are_listed_and_stop_no_others(recorded, tmp_path: Path) -> None:
    ended = on_gpu({**recorded, "FAILING": "agreement sharded"})
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == "failed: agreement sharded"
    ended = on_gpu({**recorded, "FAILING": "waits", "STATUS": "124"})  # as of timeout
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (1, "failed: waits (time limit)")
    logs = {path.stem for path in (tmp_path / "out").iterdir()}
    assert logs == {*gpu_parts.PARTS, "throughput", "minute"}
    assert on_gpu(recorded, "waits", "minute").stdout.endswith("all parts passed: waits minute\n")


def test_parts_on_a_gpu_have_ten_minutes_together(recorded) -> None:
    lines = on_gpu(recorded).stdout.splitlines()
    limits = [int(found[1]) for line in lines if (found := re.match(r"== \w+, at most (\d+) s", line))]
    assert len(limits) == 7
    assert sum(limits) == 600
    assert "== throughput, at most 600 s" in on_gpu(recorded, "throughput").stdout


@pytest.mark.parametrize("words", [("waits", "throughputs"), ("--wet",), ("--data",), ("--seed", "x")])
def test_on_gpu_rejects_unknown_parts_and_options(words: tuple[str, ...], recorded, tmp_path: Path) -> None:
    ended = on_gpu(recorded, *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "arguments").exists()


def test_wheels_are_installed_for_what_a_gpu_machine_lacks(recorded, tmp_path: Path) -> None:
    recorded["FAILING"] = "import tyro"  # python3 -c "import tyro"
    assert on_gpu(recorded, "--wheels", "folder", "waits").returncode == 0
    words = (tmp_path / "arguments").read_text().split()
    assert words.count("install") == 1
    assert shlex.join(words).count("--no-index --find-links folder tyro") == 1


@pytest.mark.parametrize("part", ["ceilings", "agreement", "waits", "sharded", "compilation"])
def test_every_part_for_a_gpu_passes_at_tiny_size(part: str, tmp_path: Path) -> None:
    dry_run(part, tmp_path)
    (path,) = tmp_path.glob(f"*-gpu_{part}.json")
    rows = json.loads(path.read_text())["rows"]
    assert rows
    assert not any("failure" in row for row in rows)
    assert path.with_suffix(".md").read_text().count("\n| ") == len(rows) + 2


def test_throughput_for_a_gpu_runs_at_tiny_size_in_each_mode(tmp_path: Path) -> None:
    dry_run("throughput", tmp_path)
    (path,) = tmp_path.glob("*-gpu_training.json")
    cases = json.loads(path.read_text())["cases"]
    assert len(cases) == 2
    for entrants in cases.values():
        assert {entrant["mode"] for entrant in entrants} == set(gpu_training.MODES)
        ours = [entrant for entrant in entrants if entrant["name"] == gpu_training.OURS]
        assert [bool(entrant["launches"]) for entrant in ours] == [True, False, False]


def test_training_for_a_gpu_runs_at_tiny_size(tmp_path: Path) -> None:
    dry_run("minute", tmp_path)
    assert {path.suffix for path in tmp_path.glob("*-same_minutes.*")} == {".json", ".md", ".png"}


def dry_run(part: str, out: Path) -> None:
    """Run a part of on_gpu.sh on this machine's CPU, with one thread: its tensors are tiny."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = on_gpu({**os.environ, "OUT": str(out), "OMP_NUM_THREADS": "1", "PATH": path}, "--dry", part)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr


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


def test_a_profile_counts_launches_and_the_time_of_kernels() -> None:
    def event(name: str, device: str, start: float, end: float, annotation: bool = False) -> object:
        return SimpleNamespace(
            name=name,
            device_type=SimpleNamespace(name=device),
            time_range=SimpleNamespace(start=start, end=end),
            is_user_annotation=annotation,
        )

    events = [
        event("aten::mm", "CPU", 0, 90),
        event("cudaLaunchKernel", "CPU", 1, 2),
        event("cuLaunchKernelEx", "CPU", 3, 4),
        event("cudaGraphLaunch", "CPU", 5, 6),
        event("cudaMemcpyAsync", "CPU", 7, 8),
        event("cudaDeviceSynchronize", "CPU", 8, 90),
        event("gemm", "CUDA", 20, 40),
        event("copy", "CUDA", 30, 60),
        event("Optimizer.step#AdamW.step", "CUDA", 10, 90, annotation=True),
    ]
    launched, busy = gpu_training.seen(events)
    assert (launched, busy) == (4, pytest.approx(40e-6))


def test_the_time_in_which_kernels_run_counts_overlaps_once() -> None:
    assert gpu_training.covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0
    assert gpu_training.covered([]) == 0.0


def test_our_side_of_same_minutes_has_the_curve_of_its_run(monkeypatch) -> None:
    train = vs.train

    def short(*, minutes: float, **options: object) -> object:
        assert minutes == 30
        return train(**options, epochs=2, embed_dim=8, depth=1, num_heads=1)

    monkeypatch.setattr(same_minutes.vs, "train", short)
    with undrawn():
        found = same_minutes.CONTESTANTS["vitascope"]("vitascope", "digits", 30, 0, batch_size=256)
    assert found.epochs == len(found.minutes) == len(found.accuracy) == 2
    assert 0 < found.minutes[0] < found.minutes[1] < found.total
    assert all(0 <= share <= 1 for share in (*found.accuracy, found.tested))


def test_timm_in_same_minutes_trains_in_its_time(monkeypatch) -> None:
    explanations.make_torchvision_importable()  # timm imports it
    pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")
    peer = same_minutes.peer_model
    monkeypatch.setattr(
        same_minutes,
        "peer_model",
        lambda library, config: peer(library, config.replace(depth=1, embed_dim=12)),
    )
    found = same_minutes.CONTESTANTS["timm's ViT-Ti/4"]("timm's ViT-Ti/4", "digits", 0.02, 0)
    assert found.epochs > 0
    assert 0 < found.minutes[0] < found.total
    assert all(0 <= share <= 1 for share in (*found.accuracy, found.tested))


def test_resume_keeps_finished_runs_and_rejects_another_setting(compared, results, monkeypatch) -> None:
    first, second = compared.runs[:2]
    for run in (first, second):
        given = ["--data", "digits", "--out", *(["--resume"] if run is second else [])]
        monkeypatch.setattr(data_sizes, "runs_of", lambda arguments, splits, done, run=run: iter([run]))
        measured = data_sizes.measure(data_sizes.parse(given))
    assert measured.runs == [first, second]
    assert data_sizes.Measurement.newest() == measured
    with pytest.raises(data_sizes.UserError, match="cannot resume"):
        data_sizes.measure(data_sizes.parse([*given, "--batch-size", "64"]))


explanations = load("explanations")


@pytest.fixture(scope="module")
def explained_case(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Two images, and timm's smallest model with random weights."""
    explanations.make_torchvision_importable()  # timm imports it
    pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")
    folder = tmp_path_factory.mktemp("timm")
    explanations.write_model("test_vit", 64, folder)
    return explanations.Case(folder, 64, 2)


def test_explanations_are_compared_only_if_both_sides_compute_the_same_maps(explained_case) -> None:
    pytest.importorskip("pytorch_grad_cam", reason="grad-cam is not installed (vitascope[peers])")
    first = {}
    for method, who, prepare in explanations.entrants(
        explained_case, explanations.METHODS, list(explanations.PEERS)
    ):
        with prepare() as step:
            maps = explanations.np.asarray(step())
        first[method, who] = explanations.First(maps, 1, 2)
        assert len(maps) == 2, (method, who)
    for method in explanations.PEERS:
        assert "differ by at most" in explanations.agreement_of(method, first)
    first["rollout", "vitascope"] = first["gradient_rollout", "vitascope"]
    with pytest.raises(ValueError, match=r"rollout: the maps of vitascope and vit-explain's .* differ"):
        explanations.agreement_of("rollout", first)


def test_difference_of_maps_is_a_share_of_their_range_at_any_size() -> None:
    rng = explanations.np.random.default_rng(0)
    maps = rng.random((2, 4, 4), dtype="float32")
    enlarged = maps.repeat(1, axis=1)
    assert explanations.difference(maps, 3 * enlarged + 5) < 1e-6
    enlarged[1, 2, 3] += 0.5 * (enlarged[1].max() - enlarged[1].min())
    assert 0.2 < explanations.difference(maps, enlarged) <= 1
    flat = explanations.np.full((1, 4, 4), explanations.np.nan, "float32")
    assert math.isnan(explanations.difference(maps[:1], flat))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak cannot be reset")
def test_memory_of_an_explanation_excludes_that_of_loading() -> None:
    first = explanations.first_explanation(partial(allocating, 60))  # freed memory may be kept here
    assert first.beyond == pytest.approx(60e6, rel=0.1)
    assert first.total > 200e6 + first.beyond


def test_memory_estimate_of_vit_explain_includes_the_weights_of_every_layer(explained_case) -> None:
    config = vs.from_pretrained(explained_case.folder).config
    assert config.num_tokens == 17
    per_layer = 2 * config.num_heads * 17 * 17 * 4
    assert explanations.kept_bytes(explained_case) == (config.depth + 2) * per_layer


def test_explanations_table_compares_with_the_peer_of_the_same_method() -> None:
    none = explanations.np.zeros((1, 1, 1))
    measured = [
        explanations.Measured(
            method=method, who=who, seconds=seconds, first=explanations.First(none, beyond, 9 * 10**9)
        )
        for method, who, seconds, beyond in (
            ("rollout", "theirs", (0.3, 0.2, 0.4), 80_000_000),
            ("rollout", "vitascope", (0.1, 0.5, 0.15), 20_000_000),
            ("gradient_rollout", "vitascope", (0.6,), 10_000_000),
        )
    ]
    rows = [re.split(r" *\| *", line)[1:-1] for line in explanations.table(measured).splitlines()[2:]]
    assert rows == [
        ["rollout", "theirs", "0.300", "0.200 to 0.400", "-", "80", "-", "9,000"],
        ["rollout", "vitascope", "0.150", "0.100 to 0.500", "2.00", "20", "0.25", "9,000"],
        ["gradient_rollout", "vitascope", "0.600", "0.600 to 0.600", "-", "10", "-", "9,000"],
    ]


@pytest.mark.parametrize(("free", "total"), [(2_100_000_000, 3_900_000_000), (1_900_000_000, 4_100_000_000)])
def test_large_image_skips_a_peer_that_does_not_fit_and_prints_the_limit(
    free: int, total: int, explained_case, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    first = explanations.First(explanations.np.zeros((1, 1, 1)), 1, total)
    ours = explanations.Measured(method="rollout", who="vitascope", seconds=(1.0,), first=first)
    monkeypatch.setattr(
        explanations, "measure", lambda *given: seen.append(given) or ([ours], "no maps compared")
    )
    monkeypatch.setattr(explanations, "free_bytes", lambda: free)
    section = explanations.large(explained_case)
    ((_, methods, peers, _),) = seen
    assert set(methods) == {"rollout", "grad_cam", "gradient_rollout", "attention"}
    runs = free > 2e9
    assert peers == (["rollout", "grad_cam"] if runs else ["grad_cam"])
    assert ("not run. It would need" not in section) == runs
    assert f"process was {total / 1e9:.2f} GB, {'less' if runs else 'not less'} than 4 GB" in section


@pytest.mark.skipif(sys.platform != "linux", reason="known on Linux only")
def test_free_memory_is_positive_and_less_than_the_total() -> None:
    assert 0 < explanations.free_bytes() < 1024 * explanations.kib(Path("/proc/meminfo"), "MemTotal")


compression = load("compression")


def test_compression_times_the_original_model_first_then_merged_ones() -> None:
    entrants = compression.merging_entrants([8, 16], 4, "bf16")
    assert [entrant.name for entrant in entrants] == ["original", "merge 8", "merge 16"]
    merged = [named_config("vit_b16", token_merging=count) for count in (0, 8, 16)]
    assert [entrant.flops for entrant in entrants] == [4 * config.flops for config in merged]


def test_compression_measures_original_merged_pruned_and_fine_tuned_models(tmp_path, monkeypatch) -> None:
    names = tuple("0123456789")
    model = small_model(image_size=8, patch_size=2, in_channels=1, num_classes=10, class_names=names)
    save_pretrained(model, tmp_path / "model")
    monkeypatch.setattr(compression, "EXAMPLES", 40)
    monkeypatch.setattr(
        compression, "fine_tuned", lambda arguments, weights, run: shutil.copytree(weights, run)
    )
    given = ["--model", str(tmp_path / "model"), "--data", "digits", "--merge", "2", "--keep", "0.5"]
    found = list(compression.variants(compression.parse(given), tmp_path))
    names = [variant.name for variant in found]
    assert names == ["original", "merge 2", "heads 1, MLP 2", "heads 1, MLP 2, fine-tuned"]
    results = [
        SimpleNamespace(
            entrant=compression.entrant(variant.name, model.config, 2, "fp32", variant.folder),
            images_per_second=10.0 * place,
        )
        for place, variant in enumerate(found, 1)
    ]
    rows = compression.accuracy_table(found, results).splitlines()[2:]
    assert [row.split("|")[5].strip() for row in rows] == ["1.00", "2.00", "3.00", "4.00"]
    assert all(f"{100 * variant.accuracy:.2f}" in row for variant, row in zip(found, rows, strict=True))


grow, cpu_inference = load("grow"), load("cpu_inference")


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


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"embed_dim": 20}, "width: 768 is no multiple of 20"),
        ({"patch_size": 32}, "height of a patch: 16 is no multiple of 32"),
        ({"depth": 13}, "depth: 12 is less than 13"),
        ({"pool": "mean"}, "every option at its default"),
    ],
)
def test_models_that_cannot_grow_are_rejected(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        grow.grown_config(small_config(**options), "vit_b16")


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


def test_fuzzing_without_schemathesis_prints_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="pip install schemathesis"):
        load("fuzzing").main([])


def test_inference_claims_compare_auto_and_int8_with_the_peers() -> None:
    found = [
        cpu_inference.Result(
            cpu_inference.Entrant(
                name=name, precision=precision, dtype=dtype, prepare=int, images=images, flops=100
            ),
            (1 / images_per_second,) if images else (100 / images_per_second,),
        )
        for name, precision, dtype, images, images_per_second in (
            ("timm", "fp32", torch.float32, 1, 5),
            ("timm", "bf16", torch.bfloat16, 1, 8),
            ("torchvision", "bf16", torch.bfloat16, 1, 10),
            ("vitascope", "auto", torch.bfloat16, 1, 12),
            ("vitascope, OpenVINO", "int8", torch.int8, 1, 20),
            ("matmul", "fp32", torch.float32, 0, 1000),
            ("matmul", "bf16", torch.bfloat16, 0, 2100),
            ("matmul", "int8", torch.int8, 0, 4000),
        )
    ]
    assert cpu_inference.claims(found) == [
        "- auto is 2.40 times as fast as timm's default, fp32",
        "- auto is 1.20 times as fast as the best peer in bf16, torchvision",
        "- this machine's matrix products are 2.10 times as fast in bf16 as in fp32",
        "- vitascope, OpenVINO in int8 is 2.50 times as fast as timm in bf16",
    ]


def test_agreement_table_compares_with_our_fp32_and_the_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"fp32": [0, 1, 1, 0], "bf16": [0, 1, 1, 1], "auto": [0, 1, 1, 0]}
    images = ImageSet(
        "test", ["a", "b", "c", "d"], ClassIndices(cpu_inference.np.array([0, 0, 1, 1]), ("ant", "bee"))
    )
    monkeypatch.setattr(cpu_inference, "open_data", lambda _: SimpleNamespace(test=images))
    monkeypatch.setattr(cpu_inference, "open_engine", lambda _, precision, device: precision)
    monkeypatch.setattr(
        cpu_inference, "top_classes", lambda engine, sources: cpu_inference.np.array(answers[engine])
    )
    case = cpu_inference.Case(config=small_config(), model="model", weights={}, exported={})
    lines = cpu_inference.agreement_table(case, cpu_inference.Pictures.of("data", 4)).splitlines()
    assert lines[0] == "## On 4 labelled images"
    rows = [re.split(r" *\| *", line)[1:-1] for line in lines[4:]]
    assert rows == [
        ["vitascope fp32", "100.0%", "50.0%"],
        ["vitascope bf16", "75.0%", "75.0%"],
        ["vitascope auto", "100.0%", "50.0%"],
    ]


def test_a_repeated_command_continues_its_runs_and_keeps_finished_ones(tmp_path, monkeypatch) -> None:
    learning = load("learning")
    data = write_folder(tmp_path / "greys")
    arguments = learning.options("", epochs=1).parse_args(["--runs", str(tmp_path / "runs")])
    with learning.runs_of(arguments) as runs, undrawn():
        config = tiny_config(data, run=str(runs / "a"), epochs=1)
        finished = learning.train("a", config)
        assert learning.tested(finished)["split"] == "test"
        monkeypatch.setattr(learning.vs, "resume", None)
        monkeypatch.setattr(learning.vs, "train", None)
        assert learning.train("a", config).path == finished.path


def test_parts_of_data_are_written_once(tmp_path: Path) -> None:
    learning = load("learning")
    data = write_folder(tmp_path / "greys")
    limited = learning.write_limited(str(data), 4, tmp_path / "few")
    assert learning.write_limited(str(data), 400, tmp_path / "few") == limited
    assert len(learning.open_data(limited).train) + len(learning.open_data(limited).val) == 4


operations = load("operations")


@pytest.mark.parametrize("name", ["cct_mini", "resnet29_w32_cifar"])
def test_an_image_costs_three_forward_passes_with_attention(name: str) -> None:
    config = named_config(name, num_classes=3)
    model = vs.create_model(name, num_classes=3)
    assert operations.training_operations(model, 3, *config.image_hw) == 3 * config.flops


def test_trials_of_one_change_share_a_row_and_failures_are_listed() -> None:
    numbers = {"loss": 1.0, "test": 0.5, "mirror": 0.5, "minutes": 1.0}
    trials = [
        operations.Trial("small", "lr=1", seed, 3e13, validation=share, **numbers)
        for seed, share in enumerate((0.25, 0.75))
    ]
    text = operations.tables([*trials, operations.Trial("large", "lr=9", 0, 3e13, failure="diverged")])
    assert text.count("50.00 (25.0 to 75.0)") == 1
    assert "diverged" in text
