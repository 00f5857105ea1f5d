"""What the benchmarks measure is complete, what they write is read back, and docs/options.md shows it.

None is run to its end here: they take minutes, and mean something only on a quiet machine.
"""

import dataclasses
import importlib
import itertools
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from torch.utils.flop_counter import FlopCounterMode

from vitascope.model.config import OPTIONS, ViTConfig
from vitascope.model.options import BlockOptions, EmbeddingOptions, ReadoutOptions, TrainingOptions

ROOT = Path(__file__).parent.parent
OPTIONS_PAGE = ROOT / "docs" / "options.md"

GROUPS = (EmbeddingOptions, BlockOptions, ReadoutOptions, TrainingOptions)
CHOICES = {
    name: get_args(kind)
    for group in GROUPS
    for name, kind in get_type_hints(group).items()
    if get_origin(kind) is Literal
}
NOT_TRAINED = {
    "resample": {"huggingface", "torchvision", "jax", "dinov2"},  # the digits have one size
    "resnet_dialect": {"timm"},  # epsilons
    "head": {"pre_logits", "none"},  # no classes
}


def load(name: str) -> ModuleType:
    """A script of benchmarks/, imported and not run."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module(name)


ablation, axial, reading, reports = load("ablation"), load("axial"), load("reading"), load("reports")


@pytest.fixture(scope="module")
def configs() -> dict[str, ViTConfig]:
    """The model of each change, by name."""
    return {change.name: change.model_config() for change in ablation.CHANGES}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of benchmarks/results."""
    monkeypatch.setattr(reports, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def ablated() -> object:
    """A made-up measurement."""
    found = [
        ablation.Result(change.name, 344_650, 11_811_840, [0.99, 0.98], [0.02, 0.04, 0.03])
        for change in ablation.CHANGES[:3]
    ]
    return ablation.Measurement("a CPU", "torch", "2026-01-02", "python x", 2, 40, 3, 2, found)


@pytest.fixture(scope="module")
def followed() -> object:
    """A made-up measurement that follows the formula exactly."""
    found = [
        axial.Result(point, [1e-9 * point.multiply_adds()], 2.0 * math.prod(point.grid), point.weights_mib())
        for point in axial.points()
    ]
    return axial.Measurement("a CPU", "torch", "2026-01-02", "python x", "made up", found)


def test_ablation_covers_every_choice_of_every_option(configs) -> None:
    assert {"positions", "pool", "stem", "norm", "attention", "mlp", "qkv_bias", "head"} <= CHOICES.keys()
    for name, choices in CHOICES.items():
        covered = {config.option(name) for config in configs.values()}
        assert covered | NOT_TRAINED.get(name, set()) >= set(choices), name


def test_ablation_covers_options_that_are_no_choice(configs) -> None:
    base = configs["base"]
    for name in ("num_registers", "distillation_token", "layer_scale", "embedding_norm", "position_prefix"):
        assert any(config.option(name) != base.option(name) for config in configs.values()), name


def test_each_change_is_another_model_than_the_base_and_has_a_name_of_its_own(configs) -> None:
    assert len(configs) == len(ablation.CHANGES)
    assert next(iter(configs)) == "base"
    assert len(set(configs.values())) == len(configs)


def test_changes_are_to_the_recipe_as_users_have_it(configs) -> None:
    base = configs["base"]
    assert base == ablation.Change().model_config()
    assert (base.image_hw, base.patch_hw, base.grid, base.depth) == ((32, 32), (8, 8), (4, 4), 3)
    assert configs["stem=resnet resnet_layers=[1] resnet_width=16"].grid == base.grid
    assert configs["stem=overlap stride=4"].grid == (7, 7)
    swiglu = configs["mlp=swiglu mlp_ratio=2.667"]
    assert swiglu.num_parameters == pytest.approx(base.num_parameters, rel=0.002)


def test_only_selects_by_what_a_name_holds() -> None:
    assert [change.name for change in ablation.selected(["positions="])] == [
        f"positions={kind}" for kind in CHOICES["positions"] if kind != "learned"
    ]


def test_a_change_is_trained_and_timed() -> None:
    (change,) = ablation.selected(["attention=axial"])
    assert 0 < ablation.test_accuracy(change, seed=0, epochs=1) < 1
    timing = ablation.Timing(warmup=1, steps=1, seconds=0)
    seconds = ablation.measure_steps([ablation.Change(), change], 2, timing)
    assert [len(times) for times in seconds.values()] == [2, 2]
    assert all(second > 0 for times in seconds.values() for second in times)


def test_ablation_table_says_what_was_measured(ablated) -> None:
    assert ablated.results[0].row() == ("base", "98.50", "98.00 to 99.00", "344,650", "11.81", "2,133")
    assert ablation.BATCH_SIZE == 64


def test_attention_step_computes_what_the_formula_counts() -> None:
    for attention, backward in itertools.product(axial.LIMITS, (False, True)):
        point = axial.Point(attention, (16, 16), backward)
        with FlopCounterMode(display=False) as counter:  # it does not see into the fused kernels
            axial.attention_step(point, materialized=True)()
        assert counter.get_total_flops() == 2 * point.multiply_adds(), point


@pytest.mark.skipif(sys.platform == "win32", reason="no fork server")
def test_peak_memory_sees_weights_that_are_held() -> None:
    point = axial.Point("global", (32, 32), False)
    held = axial.peak_mib(point, materialized=True)
    assert held > 1.5 * point.weights_mib()  # scores and weights
    assert axial.peak_mib(point, materialized=False) < held / 2


def test_exponents_and_ratios_of_costs_that_follow_the_formula(followed) -> None:
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


def test_readers_deliver_every_picture_as_normalized_floats(tmp_path: Path) -> None:
    folder = reading.make_photographs(tmp_path / "pictures", 8)
    entrants = [e for e in reading.entrants_of(folder, tmp_path, [0, 1]) if e.name != reading.PEER]
    assert len(entrants) == 6
    for entrant in entrants:
        batches = list(entrant.build(3, entrant.workers)(1))
        assert sum(map(len, batches)) == (8 if "folder" in entrant.name else 4)  # the rest is val and test
        for batch in batches:
            assert batch.shape[1:] == (3, 224, 224)
            assert -1 <= batch.min() < 0 < batch.max() <= 1
    assert "8 pictures, median 500 x 375 pixels" in reading.describe_pictures(folder)


def test_readers_are_compared_with_torchvision_of_as_many_workers() -> None:
    entrants = [reading.Entrant(name, None, workers) for workers in (0, 2) for name in (reading.PEER, "ours")]
    rows = reading.table(entrants, [[100, 50], [150, 100], [400, 400], [300, 500]]).splitlines()[2:]
    shares = [row.split("|")[-2].strip() for row in rows]
    assert shares == ["1.00", "1.75", "1.00", "1.00"]
    assert reading.table(entrants[1:2], [[150, 100]]).split("|")[-2].strip() == "-"


def test_numbers_are_read_back_as_they_were_written(ablated, followed, results) -> None:
    for script, measured in ((ablation, ablated), (axial, followed)):
        name = script.__name__
        reports.write_numbers(name, measured.to_json())
        path = reports.newest_numbers(name)
        assert path.parent == results
        assert script.Measurement.from_json(path.read_text()) == measured
        assert measured.machine in measured.report()
    assert axial.draw(followed).axes


def test_newest_numbers_are_those_of_the_last_day(results) -> None:
    with pytest.raises(FileNotFoundError, match="measure with --out first"):
        reports.newest_numbers("ablation")
    for day in ("2026-03-01", "2026-12-01", "2026-11-20"):
        (results / f"{day}-ablation.json").touch()
    assert reports.newest_numbers("ablation").name == "2026-12-01-ablation.json"


def test_page_is_filled_in_between_its_markers_only(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("script", [ablation, axial], ids=lambda script: script.__name__)
def test_docs_show_the_newest_numbers(script: ModuleType) -> None:
    shown = reports.between(OPTIONS_PAGE.read_text(encoding="utf-8"), script.__name__)
    if not list(reports.RESULTS.glob(f"*-{script.__name__}.json")):
        assert shown == ""
        return
    numbers = reports.newest_numbers(script.__name__).read_text(encoding="utf-8")
    assert shown == script.Measurement.from_json(numbers).for_docs() + "\n"


def test_newest_ablation_is_of_models_as_they_are_now(configs) -> None:
    if not list(reports.RESULTS.glob("*-ablation.json")):
        pytest.skip("nothing is measured yet")
    numbers = reports.newest_numbers("ablation").read_text(encoding="utf-8")
    for result in ablation.Measurement.from_json(numbers).results:
        config = configs[result.name]
        assert (result.parameters, result.flops) == (config.num_parameters, config.flops), result.name


def test_docs_name_every_option_and_every_choice() -> None:
    named = set(re.findall(r"`([^`\n]+)`", OPTIONS_PAGE.read_text(encoding="utf-8")))
    assert named >= set(OPTIONS)
    for name, choices in CHOICES.items():
        assert named >= set(choices), name


def test_every_group_of_options_is_looked_at() -> None:
    fields = {field.name for group in GROUPS for field in dataclasses.fields(group)}
    assert fields == {name for name, group in OPTIONS.items() if group is not None}
