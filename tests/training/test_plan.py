import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data import write_picture, write_tree
from tests.models import small_config, small_model, with_preprocess
from tests.training import assert_bitwise, clock, interrupted, tiny_config, undrawn
from vitascope.cli import main
from vitascope.data.datasets import open_data
from vitascope.deploy.predict.predictor import Predictor
from vitascope.errors import UserError
from vitascope.models.lora import add_adapters
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.loading import save_pretrained
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.runs import pretrain, resume, train
from vitascope.training import plan as planning
from vitascope.training.building import prepare, start_model
from vitascope.training.loop import augmentation_of
from vitascope.training.optimizers import freeze_body, optimizer_of, train_mode
from vitascope.training.options.groups import Balance, Optimization
from vitascope.training.options.recipes import RECIPES, TrainConfig
from vitascope.training.plan import Facts, Plan, Request, default_batch_size, inspect, resolve
from vitascope.training.run.run import Run
from vitascope.training.schedule import Schedule
from vitascope.training.tasks.classify import Classify
from vitascope.training.tasks.losses import Criterion

FROM_WEIGHTS = ("finetune", "lora", "paper-finetune")


def plan_of(data: Path | str, recipe: str | None = "base", **options: Any) -> Plan:
    config = TrainConfig.from_recipe(recipe, data=str(data), **options)
    return prepare(config, open_data(str(data))).plan


def needed(recipe: str, weights: Path) -> dict[str, Any]:
    if recipe in FROM_WEIGHTS:
        return {"weights": str(weights)}
    return {"model": "resnet29_w32_cifar"} if recipe == "cnn" else {}


def test_small_images_keep_their_size_and_photographs_get_that_of_the_paper(data, photos) -> None:
    for folder, sizes in ((data, (16, 2, (8, 8))), (photos, (224, 16, (14, 14)))):
        plan = plan_of(folder)
        architecture = plan.config.architecture
        assert (architecture.image_size, architecture.patch_size, plan.model.grid) == sizes
        assert architecture.model == "vit_ti16"


def test_small_images_of_one_shape_keep_it_and_others_are_made_square(tmp_path: Path) -> None:
    oblong = write_tree(tmp_path / "oblong", {"cat": 6, "dog": 6}, size=(16, 40))
    for recipe in ("small-data", "cnn", "base"):
        assert plan_of(oblong, recipe).model.image_hw == (16, 40)
    write_picture(oblong / "cat" / "other.png", size=(40, 16))
    assert plan_of(oblong, "small-data").model.image_hw == (16, 16)


def test_images_that_weights_enlarge_get_a_line_with_the_cost_and_a_smaller_size(data, tmp_path) -> None:
    weights = save_pretrained(small_model(image_size=112, patch_size=4), tmp_path / "weights")
    found = re.fullmatch(
        r"the images of about 16x16 pixels are enlarged to 112x112, the size of the weights; image_size=32 "
        r"needs ([\d.]+)% of the computation",
        plan_of(data, weights=str(weights)).note,
    )
    assert found is not None
    large, small = (small_model(image_size=side, patch_size=4).config.flops for side in (112, 32))
    assert float(found[1]) == pytest.approx(100 * small / large, abs=0.051)
    assert plan_of(data, weights=str(weights), image_size=112).note == ""


def test_named_options_are_kept(data) -> None:
    named = {"image_size": 96, "patch_size": 32, "batch_size": 3, "model": "vit_s32", "pool": "mean"}
    named |= {"crop_scale": 0.9, "shift": 0.1, "randaugment": 1, "erase": 0.5, "ema": 0.5}
    plan = plan_of(data, **named)
    assert {name: plan.config.option(name) for name in named} == named
    assert (plan.model.embed_dim, plan.model.patch_hw, plan.model.readout.pool) == (384, (32, 32), "mean")
    assert plan.model.class_names == ("dark", "light")


def test_streams_that_the_shards_do_not_allow_are_rejected(data) -> None:
    facts = dataclasses.replace(inspect(open_data(str(data))), images=1000)
    for options, shards, message in (
        ({"streams": 13}, 12, "in 12 shards, in batches of 128: set it to 12 or less"),
        ({"streams": 5, "batch_size": 8}, 12, "in 12 shards, in batches of 8: set it to 4 or less"),
        ({"streams": 2}, 0, "in files of their own: leave it out"),
    ):
        with pytest.raises(UserError, match=rf"^streams={options['streams']} .*{message}"):
            resolve(Request.of(None, "base", options), dataclasses.replace(facts, shards=shards))


@pytest.mark.parametrize("images", [1, 20, 71, 511, 512, 50_000])
def test_batch_size_leaves_four_steps_per_epoch_down_to_a_minimum(images: int) -> None:
    batch = default_batch_size(images)
    assert 8 <= batch <= 128
    assert batch == 8 or images / batch >= 4
    assert batch == 128 or images / (2 * batch) < 4


def test_batch_size_above_the_number_of_images_becomes_the_default_and_is_explained(data) -> None:
    plan = plan_of(data, batch_size=4096)
    assert plan.config.option("batch_size") == default_batch_size(20) == 8
    assert "batches of 8 instead of 4,096, which is more than the training images" in plan.explained()[0]
    assert plan_of(data, batch_size=20).config.option("batch_size") == 20
    three = dataclasses.replace(inspect(open_data(str(data))), images=3)  # fewer than in the default batch
    assert resolve(Request.of(None, "base", {"batch_size": 6}), three).config.option("batch_size") == 6


def test_the_images_choose_the_augmentation_of_small_data(data, photos, monkeypatch) -> None:
    names = ("crop_scale", "shift", "randaugment", "erase")
    for few, folder, values in (
        (1000, photos, (0.35, 0.0, 2, 0.25)),
        (1000, data, (1.0, None, 2, 0.25)),
        (3, data, (1.0, None, 0, 0.0)),
    ):
        monkeypatch.setattr("vitascope.training.plan.FEW_IMAGES", few)
        plan = plan_of(folder, "small-data")
        assert tuple(plan.config.option(name) for name in names) == values
        words = plan.explained()[0]
        assert ("RandAugment of 2, erasing 25%" in words) == (few == 1000)
        assert ("crops of 35% or more" in words) == (folder == photos)
        assert ("shifts of 6.2%, of 12.5% after 5 epochs" in words) == (folder == data)
        assert not re.search(r"RandAugment of 0|erasing 0%|shifts of 0.0%|crops of 100%", words)


def test_weights_of_another_shape_are_rejected_with_advice(data, tmp_path) -> None:
    save_pretrained(small_model(head="none"), tmp_path / "m")
    for task, options, message in (
        ("classify", {"patch_size": 4}, "m has another body: patch_size is 8, not 4; leave that out"),
        ("masked", {"depth": 2}, "m has another body: depth is 3, not 2; leave that out"),
        (
            "classify",
            {"model": "vit_s16"},
            "depth is 3, not 12; embed_dim is 16, not 384.*leave out the model",
        ),
    ):
        with pytest.raises(UserError, match=message):
            plan_of(data, None, weights=str(tmp_path / "m"), task=task, **options)


def test_patches_of_digits_and_the_hidden_share_suit_the_target() -> None:
    for options, patch_size, share in (
        ({}, 1, 0.5),
        ({"target": "mae"}, 2, 0.75),
        ({"target": "mae", "corrupt": 0.6}, 2, 0.6),
    ):
        plan = plan_of("digits", None, task="masked", **options)
        assert plan.config.architecture.patch_size == patch_size
        assert plan.model.patch_hw == (patch_size, patch_size)
        assert plan.config.masking.corrupt == share


def test_weights_keep_options_that_the_run_does_not_set(data, tmp_path) -> None:
    of_data = {"num_classes": 2, "class_names": ("dark", "light"), "image_size": 16}
    for number, options in enumerate(
        (
            {"distillation_token": True, "num_registers": 2, "positions": "rotary", "mlp": "swiglu"},
            {"attention": "axial", "pool": "cls_mean", "norm": "post", "positions": "relative"},
            {"stem": "overlap", "pool": "map", "position_prefix": False, "layer_scale": 0.1},
        )
    ):
        weights = save_pretrained(small_model(**options), tmp_path / str(number))
        plan = plan_of(data, weights=str(weights), image_size=16, drop_path=0.1)
        assert plan.model == small_model(**options).config.replace(**of_data, drop_path=0.1, dropout=0.0)


def test_invalid_or_ineffective_model_options_are_rejected(data) -> None:
    for options, reason in (
        ({"stem": "resnet", "resnet_layers": 4}, "resnet_layers must be a list of whole numbers, not 4"),
        ({"resnet_layers": [1]}, "resnet_layers has no effect with stem=conv; add stem=resnet"),
        ({"attention": "axial", "window": 3}, "window has no effect with attention=axial"),
        ({"tokenizer_widths": [8]}, "tokenizer_widths has no effect with stem=conv; add stem=tokenizer"),
    ):
        with pytest.raises(UserError, match=re.escape(reason)):
            plan_of(data, model_options=options)


def test_a_tokenizer_makes_a_grid_of_eight_patches_a_side_as_far_as_its_layers_reach(data) -> None:
    for side, widths, patch in ((16, 2, 2), (32, 2, 4), (128, 2, 8), (128, 3, 16)):
        options = {"stem": "tokenizer", "tokenizer_widths": [4] * widths}
        plan = plan_of(data, model_options=options, image_size=side)
        assert (plan.model.image_hw, plan.model.patch_hw) == ((side, side), (patch, patch))
        assert plan.config.architecture.patch_size == patch


def test_rate_belongs_to_a_width_and_is_recorded_for_that_of_the_model(data) -> None:
    options: dict[str, Any] = {"lr": 1e-3, "embed_dim": 32, "num_heads": 2}
    for width, rate in ((16, 5e-4), (32, 1e-3), (64, 1e-3)):
        plan = plan_of(data, **options, lr_width=width)
        assert (plan.config.optimization.lr, plan.config.optimization.lr_width) == (rate, None)
        assert prepare(plan.config, open_data(str(data))).plan.config.optimization.lr == rate
    assert TrainConfig.from_recipe("lora", lr=1e-3).optimization.lr_width is None  # a named rate is of any


# Recipes


@pytest.mark.parametrize("side", [16, 300])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_plan(data, photos, weights, recipe: str, side: int) -> None:
    folder = data if side == 16 else photos
    plan = plan_of(folder, recipe, **needed(recipe, weights))
    config, model = plan.config, plan.model
    augmentation_of(config)
    assert model.image_hw == (config.option("image_size"),) * 2
    assert model.num_classes == 2 or config.task == "masked"
    optimization, batch_size = config.optimization, config.option("batch_size")
    schedule = Schedule.of(optimization, batch_size, math.ceil(20 / batch_size))
    rates = [schedule.rate(step) for step in (0, schedule.total(0) - 1)]
    peak = optimization.lr * (batch_size / optimization.lr_batch if optimization.lr_batch else 1)
    assert all(0 < rate <= peak for rate in rates)
    if recipe in ("paper-pretrain", "deit", "deit3", "plain") and side == 300:
        size = (768, 12, 12) if recipe == "paper-pretrain" else (384, 12, 6)
        assert (model.embed_dim, model.depth, model.num_heads, model.patch_hw) == (*size, (16, 16))
        assert (model.image_hw, model.readout.pool) == ((224, 224), "mean" if recipe == "plain" else "cls")


@pytest.mark.parametrize("recipe", ["lora", "paper-finetune", "deit3", "plain", "mae"])
def test_a_recipe_trains_a_small_model_for_an_epoch(data, weights, tmp_path, recipe: str) -> None:
    options: dict[str, Any] = {"data": str(data), "run": str(tmp_path / "run"), "epochs": 1, "device": "cpu"}
    options |= needed(recipe, weights) or {"embed_dim": 16, "depth": 2, "num_heads": 2}
    if RECIPES[recipe].option("warmup_steps") is not None:  # meant for a million images and more
        options["warmup_steps"] = 0
    with undrawn():
        result = (pretrain if RECIPES[recipe].task == "masked" else train)(recipe=recipe, **options)
    (epoch,) = Run(result.run).records("epoch")
    assert math.isfinite(epoch["val_loss"])


# Plans in run folders


@pytest.mark.parametrize(
    ("recipe", "length"),
    [("small-data", {"minutes": 0.5}), ("cnn", {"steps": 7}), ("finetune", {}), ("mae", {})],
)
def test_a_plan_is_read_as_it_was_written(data, tmp_path, recipe: str, length: dict[str, Any]) -> None:
    oblong = save_pretrained(small_model(image_size=(16, 32), patch_size=(4, 8)), tmp_path / "oblong")
    plan = plan_of(data, recipe, **needed(recipe, oblong), **length)
    if recipe == "finetune":
        assert plan.config.architecture.image_size == plan.model.image_hw == (16, 32)
    config = plan.config.replace(run=str(tmp_path / "run")).to_dict()
    run = Run.open(Run.create(config, {"asked": {}, **plan.to_dict()}).path)
    assert Plan.of_run(run, TrainConfig.from_dict({**run.config, "run": plan.config.run})) == plan


def test_a_length_on_the_command_line_replaces_that_of_the_configuration(data, tmp_path, monkeypatch) -> None:
    clock(monkeypatch)
    small = {"embed_dim": 16, "depth": 1, "num_heads": 2, "device": "cpu", "model": "vit_ti16"}
    small |= {"image_size": 16, "patch_size": 8}
    with undrawn():
        first = train(recipe="base", data=str(data), run=str(tmp_path / "run"), minutes=0.03, **small).run
    for name, value in (("steps", 7), ("minutes", 0.02)):
        again, words = tmp_path / name, ["--config", str(first / "config.yaml"), f"--{name}", str(value)]
        with undrawn():
            assert main(["train", *words, "--run", str(again)]) == 0
        config = Run(again).config
        lengths = {key: config[key] for key in ("epochs", "steps", "minutes") if config[key] is not None}
        assert lengths == {name: value}
        if name == "minutes":
            assert config["lengths"] != Run(first).config["lengths"]
        else:
            assert Run(again).records("epoch")[-1]["step"] == value


def test_pre_training_rejects_an_option_of_training(data, tmp_path) -> None:
    with pytest.raises(UserError, match="keep compares weights by validation"):
        pretrain(data=str(data), run=tmp_path / "run", keep="best")
    assert not (tmp_path / "run").exists()


def test_what_was_asked_for_is_recorded_as_plain_values_without_the_home_folder(
    data, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(data.parent))
    balance = Balance(sampling="balanced")
    small = {"embed_dim": np.int64(16), "depth": 1, "num_heads": 2, "epochs": 1, "device": "cpu"}
    with undrawn():
        run = Run(train(recipe="base", data=data, run=tmp_path / "run", balance=balance, **small).run)
    places = {"data": f"~/{data.name}", "run": str(tmp_path / "run")}
    asked = {**small, "class_weights": [], "sampling": "balanced", **places}
    assert run.plan["asked"] == {"recipe": "base", "options": asked}


# Every two options act, or are rejected

VALUES: dict[str, Any] = {
    **{"epochs": 3, "steps": 9, "minutes": 2.0, "progressive": 0.5, "batch_size": 32, "optimizer": "sgd"},
    **{"lr": 0.02, "lr_batch": 64, "lr_width": 8, "schedule": "linear", "warmup_epochs": 0.5},
    **{"warmup_steps": 2, "weight_decay": 0.2, "layer_decay": 0.5, "freeze": True, "lora": 2},
    **{"clip_grad": 0.5, "loss": "focal", "label_smoothing": 0.3, "ema": 0.5, "keep": "last", "patience": 3},
    **{"flip": 0.1, "repeats": 2, "crop_scale": 0.3, "shift": 0.2, "rotate": 9.0, "color_jitter": 0.5},
    **{"three_augment": True, "randaugment": 2, "magnitude": 3.0, "operation_probability": 0.3, "erase": 0.4},
    **{"mixup": 0.4, "cutmix": 0.5, "class_weights": ["balanced"], "sampling": "balanced"},
    **{"distill": "soft", "distill_weight": 0.3, "temperature": 2.0, "target": "mae", "corrupt": 0.3},
    **{"decoder_dim": 64, "decoder_depth": 3, "dropout": 0.3, "drop_path": 0.4},
}
"""A value of each option that differs from the default."""
PASSED_ON = ("clip_grad", "keep", "patience", "repeats", "sampling", "class_weights", "minutes")
"""Options that the loop reads with no other option beside them."""


def planned(**options: Any) -> TrainConfig:
    """The options of a run on eight small images, from weights; UserError if it is rejected."""
    length = {} if {"epochs", "steps", "minutes"} & options.keys() else {"epochs": 12}
    request = Request.of(None, "base", {"weights": "body", **length, **options})
    facts = Facts(
        **{"images": 80, "height": 32, "width": 32, "one_size": True, "sides": (32, 32)},
        **{"channels": 3, "greatest": None},
        class_names=("a", "b", "c", "d", "e"),
        weights=small_config(class_names=("a", "b", "c", "d", "e")),
    )
    return resolve(request, facts).config


@functools.cache
def trained_parts(dropout: float, drop_path: float, lora: int | None, **options: Any) -> list[Any]:
    """What an optimizer does to each parameter, and what training mode computes."""
    model = small_model(dropout=dropout, drop_path=drop_path)
    if options["freeze"]:
        freeze_body(model)
    if lora is not None:
        freeze_body(model)
        add_adapters(model.encoder, lora)
    optimizer = optimizer_of(model, Optimization(lora=lora, **options))
    groups = [
        {name: value if name != "params" else [p.shape for p in value] for name, value in group.items()}
        for group in optimizer.param_groups
    ]
    train_mode(model, frozen=options["freeze"])
    torch.manual_seed(0)
    return [type(optimizer), groups, model(torch.ones(2, 3, 32, 32)).tolist()]


@functools.cache
def effects(*names: str) -> list[Any] | None:
    """All that the loop does differently for other options than their default; None if they are rejected."""
    try:
        config = planned(**{name: VALUES[name] for name in names})
    except UserError:
        return None
    options = config.optimization
    schedule = Schedule.of(options, options.batch_size, 5)
    schedule = schedule if options.minutes is None else schedule.correct(0, 60)
    steps = range(schedule.total(0))
    task = Classify(Preprocess(image_size=(32, 32)), Criterion.of(options))
    logits, labels = torch.arange(10.0).view(2, 5) ** 2 / 9, torch.tensor([1, 3])
    rest = [config.option(name) for name in PASSED_ON]
    named = ("weight_decay", "layer_decay", "optimizer", "freeze")
    architecture = config.architecture
    return [
        [(schedule.rate(step), schedule.side(step)) for step in steps],
        [schedule.average_decay, options.batch_size, rest],
        repr(augmentation_of(config)),
        task.label_losses(logits, labels).tolist(),
        trained_parts(
            dropout=architecture.dropout,
            drop_path=architecture.drop_path,
            lora=options.lora,
            **{name: config.option(name) for name in named},
        ),
    ]


@pytest.mark.parametrize("option", VALUES)
def test_every_option_acts_or_is_rejected_beside_every_other(option: str) -> None:
    rejected = []
    for other in VALUES.keys() - {option}:
        both, alone = effects(*sorted((option, other))), effects(other)
        if both is None:
            rejected.append(other)
        elif alone is not None:  # where the other one does not need this one
            assert both != alone, f"{option} beside {other}"
    needed = {"distill", "distill_weight", "temperature", "target", "corrupt", "decoder_dim", "decoder_depth"}
    needed |= {"magnitude", "operation_probability"}  # which need another option, or another task
    assert (len(rejected) > len(VALUES) // 2) == (option in needed), rejected


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16-bit images of 12-bit values, of two classes, with the greatest value 4000; one of 8 bits."""
    root, random = tmp_path_factory.mktemp("scans") / "scans", np.random.default_rng(0)
    for name, level in (("dark", 300), ("light", 2000)):
        (root / name).mkdir(parents=True)
        for number in range(12):
            values = random.integers(level, level + 1000, (16, 16)).astype(np.uint16)
            values[0, 0] = 4000
            Image.fromarray(values).save(root / name / f"{number:02}.{'png' if number % 2 else 'tif'}")
        Image.fromarray((values // 16).astype(np.uint8)).save(root / name / "00.png")
    return root


def test_the_greatest_value_of_the_training_images_is_the_upper_level_and_is_announced(scans: Path) -> None:
    plan = prepare(tiny_config(scans), open_data(str(scans))).plan
    assert plan.config.levels == (0, 4000)
    assert plan.chosen["levels"] == "levels 0 to 4,000"
    assert plan.explained() == ["levels 0 to 4,000: for 22 images of about 16x16 pixels"]


def test_named_levels_count_and_no_image_is_read_for_them(scans: Path, monkeypatch) -> None:
    monkeypatch.delattr(planning, "greatest_value")
    plan = plan_of(scans, levels=[10, 4095])
    assert plan.config.levels == (10, 4095)
    assert "levels" not in plan.chosen


def test_weights_keep_their_levels_unless_others_are_named(scans: Path, tmp_path: Path) -> None:
    model = small_model()
    fit = dataclasses.replace(default_preprocess(model.config), levels=(0, 1023))
    weights = save_pretrained(with_preprocess(model, fit), tmp_path / "weights")
    for named, levels in (({}, (0, 1023)), ({"levels": (0, 2047)}, (0, 2047))):
        config = TrainConfig.from_recipe("finetune", data=str(scans), weights=str(weights), **named)
        opened = prepare(config, open_data(str(scans)))
        assert opened.plan.config.levels == start_model(opened).preprocess.levels == levels


def test_a_run_records_its_levels_resumes_repeats_and_predicts_with_them(scans: Path, tmp_path: Path) -> None:
    with undrawn():
        with interrupted(3):
            train(tiny_config(scans, run=str(tmp_path / "run"), epochs=1))
        resumed = resume(tmp_path / "run")
        again = tmp_path / "again"
        words = ["--config", str(tmp_path / "run/config.yaml"), "--run", str(again), "--device", "cpu"]
        assert main(["train", *words]) == 0
    for run in (tmp_path / "run", again):
        assert Run(run).config["levels"] == [0, 4000]
        assert Run(run).model().preprocess.levels == (0, 4000)
    assert_bitwise(dict(resumed.model.state_dict()), dict(Run(again).model().state_dict()))
    values = np.asarray(Image.open(file := scans / "light" / "01.png")).astype(float)
    by_hand = np.rint(values / 4000 * 255).astype(np.uint8)
    predictions = Predictor(again)([file, by_hand, np.rint(values / 257).astype(np.uint8)])
    assert predictions[0] == predictions[1] != predictions[2]
    assert predictions[0]._repr_html_() == predictions[1]._repr_html_()
