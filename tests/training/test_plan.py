import dataclasses
import math
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data import write_picture, write_tree
from tests.model import small_model
from tests.training import planned, undrawn, write_folder
from vitascope.cli import main
from vitascope.data.datasets import open_data
from vitascope.errors import Interrupted, UserError
from vitascope.model.config import ViTConfig
from vitascope.options.groups import Balance
from vitascope.options.recipes import RECIPES, TrainConfig
from vitascope.run.run import Run
from vitascope.training.loop import Trainer, augmentation_of
from vitascope.training.plan import Facts, Plan, default_batch_size, inspect, resolve
from vitascope.training.schedule import Schedule
from vitascope.training.train import prepare, pretrain, resume, train
from vitascope.weights.loading import save_pretrained


def sizes(config: TrainConfig) -> tuple[int | None, int | None]:
    return config.architecture.image_size, config.architecture.patch_size


@pytest.fixture
def data(tmp_path):
    return write_folder(tmp_path / "greys")


def test_small_images_keep_their_size(data) -> None:
    config, model = planned(TrainConfig().replace(data=str(data)), open_data(str(data)))
    assert (*sizes(config), model.grid) == (16, 2, (8, 8))


def test_photographs_are_resized_to_224(tmp_path) -> None:
    folder = write_folder(tmp_path / "photos", per_class=4, side=300)
    config, model = planned(TrainConfig().replace(data=str(folder)), open_data(str(folder)))
    assert (*sizes(config), model.grid) == (224, 16, (14, 14))
    assert config.architecture.model == "vit_ti16"


def enlarged(data, tmp_path, **shape) -> str:
    """The line about images of 16 pixels that start from weights of another size."""
    weights = save_pretrained(small_model(**shape), tmp_path / "weights")
    asked = TrainConfig().replace(data=str(data), weights=str(weights))
    return prepare(asked, open_data(str(data))).plan.note


def test_images_that_weights_enlarge_get_a_line_with_the_cost_and_a_smaller_size(data, tmp_path) -> None:
    line = enlarged(data, tmp_path, image_size=112, patch_size=4)
    found = re.fullmatch(
        r"the images of about 16x16 pixels are enlarged to 112x112, the size of the weights; image_size=32 "
        r"needs ([\d.]+)% of the computation",
        line,
    )
    assert found is not None
    large, small = (small_model(image_size=side, patch_size=4).config.flops for side in (112, 32))
    assert float(found[1]) == pytest.approx(100 * small / large, abs=0.051)


def test_images_of_about_the_size_of_the_weights_get_no_line(data, tmp_path) -> None:
    assert enlarged(data, tmp_path, image_size=32, patch_size=4) == ""


def test_a_named_image_size_needs_no_line(data, tmp_path) -> None:
    weights = save_pretrained(small_model(image_size=112, patch_size=4), tmp_path / "weights")
    asked = TrainConfig().replace(data=str(data), weights=str(weights), image_size=112)
    assert prepare(asked, open_data(str(data))).plan.note == ""


def test_given_small_size_has_patches_of_an_eighth(data) -> None:
    config, model = planned(TrainConfig().replace(data=str(data), image_size=32), open_data(str(data)))
    assert (sizes(config)[1], model.grid) == (4, (8, 8))


def test_given_options_are_kept(data) -> None:
    named = TrainConfig().replace(
        data=str(data), image_size=96, patch_size=32, batch_size=3, model="vit_s32", pool="mean", ema=0.5
    )
    config, model = planned(named, open_data(str(data)))
    assert config.to_dict() == named.replace(loss="cross_entropy").to_dict()
    assert (model.embed_dim, model.patch_hw, model.readout.pool) == (384, (32, 32), "mean")
    assert model.class_names == ("dark", "light")


@pytest.fixture
def facts(data) -> Facts:
    return dataclasses.replace(inspect(open_data(str(data))), images=1000, shards=12)


@pytest.mark.parametrize(
    ("options", "shards", "message"),
    [
        ({"streams": 13}, 12, "in 12 shards, in batches of 128: set it to 12 or less"),
        ({"streams": 5, "batch_size": 8}, 12, "in 12 shards, in batches of 8: set it to 4 or less"),
        ({"streams": 2}, 0, "in files of their own: leave it out"),
        ({"streams": 2, "repeats": 3}, 12, "leave out one of them"),
    ],
)
def test_streams_that_the_shards_do_not_allow_are_rejected(
    facts, options: dict[str, Any], shards: int, message: str
) -> None:
    with pytest.raises(UserError, match=rf"^streams={options['streams']} .*{message}"):
        resolve(TrainConfig(**options), dataclasses.replace(facts, shards=shards))


def test_size_that_patches_do_not_tile_is_rejected(data) -> None:
    with pytest.raises(UserError, match="nearest: 36x36"):
        planned(TrainConfig().replace(data=str(data), image_size=35), open_data(str(data)))


@pytest.mark.parametrize("images", [1, 20, 71, 511, 512, 50_000])
def test_batch_size_leaves_four_steps_per_epoch_down_to_a_minimum(images: int) -> None:
    batch = default_batch_size(images)
    assert 8 <= batch <= 128
    assert batch == 8 or images / batch >= 4
    assert batch == 128 or images / (2 * batch) < 4


def test_batch_size_above_the_number_of_images_becomes_the_default_and_is_explained(data) -> None:
    splits = open_data(str(data))
    named = TrainConfig(data=str(data), batch_size=4096)
    plan = prepare(named, splits).plan
    assert len(splits.train) == 20
    assert plan.options.optimization.batch_size == default_batch_size(20) == 8
    assert "batches of 8 instead of 4,096, which is more than the training images" in plan.explained()[0]
    assert planned(named.replace(batch_size=20), splits)[0].option("batch_size") == 20


@pytest.mark.parametrize(
    ("few", "photographs", "expected"),
    [
        (True, True, {"crop_scale": 0.35, "shift": 0.0, "randaugment": 2, "erase": 0.25}),
        (True, False, {"crop_scale": 1.0, "shift": 0.125, "randaugment": 2, "erase": 0.25}),
        (False, False, {"crop_scale": 1.0, "shift": 0.125, "randaugment": 0, "erase": 0.0}),
    ],
)
def test_the_images_choose_the_augmentation_of_small_data(
    tmp_path, monkeypatch, few: bool, photographs: bool, expected: dict[str, float]
) -> None:
    monkeypatch.setattr("vitascope.training.plan.FEW_IMAGES", 1000 if few else 3)
    splits = open_data(str(write_folder(tmp_path / "images", per_class=4, side=300 if photographs else 16)))
    asked = TrainConfig.from_recipe("small-data", data=str(tmp_path / "images"))
    plan = prepare(asked, splits).plan
    assert {name: plan.options.option(name) for name in expected} == expected
    said = plan.explained()[0]
    assert ("RandAugment of 2, erasing 25%" in said) == few
    assert ("crops of 35% or more" in said) == photographs
    assert ("shifts of 12.5%" in said) != photographs


def test_weights_leave_only_the_training_to_the_images(data, tmp_path) -> None:
    weights = save_pretrained(small_model(), tmp_path / "weights")
    asked = TrainConfig.from_recipe("small-finetune", data=str(data), weights=str(weights))
    (said,) = prepare(asked, open_data(str(data))).plan.explained()
    assert said.startswith("200 epochs, batches of 8, shifts of 12.5%")


def test_given_augmentation_is_kept(data) -> None:
    given = {"crop_scale": 0.9, "shift": 0.1, "randaugment": 1, "erase": 0.5}
    config, _ = planned(TrainConfig.from_recipe("small-data", data=str(data), **given), open_data(str(data)))
    assert {name: config.option(name) for name in given} == given


def test_weights_of_another_architecture_are_rejected_with_the_difference(data, tmp_path) -> None:
    save_pretrained(small_model(), tmp_path / "m")
    config = TrainConfig().replace(data=str(data), weights=str(tmp_path / "m"), model="vit_s16")
    with pytest.raises(UserError, match=r"depth is 3, not 12; embed_dim is 16, not 384.*leave out the model"):
        planned(config, open_data(str(data)))


@pytest.mark.parametrize("task", ["classify", "masked"])
@pytest.mark.parametrize(("option", "value", "was"), [("patch_size", 4, 8), ("depth", 2, 3)])
def test_body_of_another_shape_is_rejected_with_advice(data, tmp_path, task, option, value, was) -> None:
    save_pretrained(small_model(head="none"), tmp_path / "m")
    given = {"data": str(data), "weights": str(tmp_path / "m"), "task": task, option: value}
    with pytest.raises(
        UserError, match=f"m has another body: {option} is {was}, not {value}; leave that out"
    ):
        planned(TrainConfig.from_recipe(**given), open_data(str(data)))


@pytest.mark.parametrize(("target", "patch_size"), [("mean_color", 1), ("mae", 2)])
def test_patches_of_digits_suit_the_target(target: str, patch_size: int) -> None:
    config, model = planned(TrainConfig.from_recipe(task="masked", target=target), open_data("digits"))
    assert (config.architecture.patch_size, model.patch_hw) == (patch_size, (patch_size, patch_size))


@pytest.mark.parametrize(
    ("options", "share"), [({}, 0.5), ({"target": "mae"}, 0.75), ({"target": "mae", "corrupt": 0.6}, 0.6)]
)
def test_share_of_hidden_patches_follows_from_the_target(data, options, share) -> None:
    config, _ = planned(
        TrainConfig.from_recipe(data=str(data), task="masked", **options), open_data(str(data))
    )
    assert config.masking.corrupt == share


@pytest.mark.parametrize(
    "options",
    [
        {"distillation_token": True, "num_registers": 2, "positions": "rotary", "mlp": "swiglu"},
        {"attention": "axial", "pool": "cls_mean", "norm": "post", "positions": "relative"},
        {"stem": "overlap", "pool": "map", "position_prefix": False, "layer_scale": 0.1},
    ],
)
def test_weights_keep_options_that_the_run_does_not_set(data, tmp_path, options) -> None:
    base = small_model(**options).config
    save_pretrained(small_model(**options), tmp_path / "m")
    config = TrainConfig().replace(data=str(data), weights=str(tmp_path / "m"), image_size=16, drop_path=0.1)
    _, model = planned(config, open_data(str(data)))
    assert model == base.replace(
        image_size=16, num_classes=2, class_names=("dark", "light"), drop_path=0.1, dropout=0.0
    )


def test_model_options_reach_the_model(data) -> None:
    config = TrainConfig().replace(
        data=str(data), model_options={"positions": "rotary", "window": [2, 4], "attention": "window"}
    )
    resolved, model = planned(config, open_data(str(data)))
    assert resolved.architecture.model_options == config.architecture.model_options
    block = model.block
    assert (model.embedding.positions, block.attention, block.window) == ("rotary", "window", (2, 4))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stem": "resnet", "resnet_layers": 4}, "resnet_layers must be a list of whole numbers, not 4"),
        ({"resnet_layers": [1]}, "resnet_layers has no effect with stem=conv; add stem=resnet"),
        ({"attention": "axial", "window": 3}, "window has no effect with attention=axial"),
        ({"tokenizer_widths": [8]}, "tokenizer_widths has no effect with stem=conv; add stem=tokenizer"),
    ],
)
def test_invalid_or_ineffective_model_options_are_rejected(data, options, reason) -> None:
    with pytest.raises(UserError, match=re.escape(reason)):
        planned(TrainConfig().replace(data=str(data), model_options=options), open_data(str(data)))


@pytest.mark.parametrize(("side", "widths", "patch"), [(16, 2, 2), (32, 2, 4), (128, 2, 8), (128, 3, 16)])
def test_a_tokenizer_makes_a_grid_of_eight_patches_a_side_as_far_as_its_layers_reach(
    data, side: int, widths: int, patch: int
) -> None:
    options = {"stem": "tokenizer", "tokenizer_widths": [4] * widths}
    config = TrainConfig().replace(data=str(data), model_options=options, image_size=side)
    resolved, model = planned(config, open_data(str(data)))
    assert (model.image_hw, model.patch_hw) == ((side, side), (patch, patch))
    assert resolved.architecture.patch_size == patch


def test_a_patch_that_no_tokenizer_layer_ends_at_is_rejected(data) -> None:
    config = TrainConfig().replace(data=str(data), model_options={"stem": "tokenizer"}, patch_size=7)
    with pytest.raises(UserError, match="3 layers has patches of 2 or 4 or 8 pixels, not 7x7"):
        planned(config, open_data(str(data)))


def test_rate_belongs_to_a_width_and_is_recorded_for_that_of_the_model(data) -> None:
    splits = open_data(str(data))
    options = {"data": str(data), "lr": 1e-3, "embed_dim": 32, "num_heads": 2}
    for width, rate in ((16, 5e-4), (32, 1e-3), (64, 1e-3)):
        config, model = planned(TrainConfig().replace(**options, lr_width=width), splits)
        assert model.embed_dim == 32
        assert (config.optimization.lr, config.optimization.lr_width) == (rate, None)
        again, _ = planned(config, splits)
        assert again.optimization.lr == rate


def test_named_rate_is_that_of_any_width() -> None:
    assert TrainConfig.from_recipe("lora", lr=1e-3).optimization.lr_width is None
    assert TrainConfig.from_recipe("lora", lr=1e-3, lr_width=768).optimization.lr_width == 768
    assert TrainConfig.from_recipe("lora").optimization.lr_width == 128


# Recipes

FROM_WEIGHTS = ("finetune", "linear-probe", "lora", "paper-finetune")


@pytest.mark.parametrize("side", [16, 300])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_on_a_folder_of_photos_or_explains_the_missing_option(
    data, photos, weights, recipe: str, side: int
) -> None:
    folder = data if side == 16 else photos
    options: dict[str, Any] = {"data": str(folder)}
    if recipe in FROM_WEIGHTS:
        options["weights"] = str(weights)
    if recipe == "cnn":
        options["model"] = "resnet29_w32_cifar"
    splits = open_data(str(folder))
    config, model = planned(TrainConfig.from_recipe(recipe, **options), splits)
    augmentation_of(config)
    assert model.image_hw == (config.option("image_size"),) * 2
    assert model.num_classes == 2 or config.task == "masked"
    optimization = config.optimization
    assert optimization.batch_size is not None
    steps = math.ceil(len(splits.train) / optimization.batch_size)
    schedule = Schedule.of(optimization, optimization.batch_size, steps)
    rates = [schedule.rate(step) for step in (0, schedule.total(0) - 1)]
    peak = optimization.lr * (optimization.batch_size / optimization.lr_batch if optimization.lr_batch else 1)
    assert all(0 < rate <= peak for rate in rates)


def test_published_recipes_build_the_published_models(photos) -> None:
    splits = open_data(str(photos))
    models = {}
    for recipe in ("paper-pretrain", "deit", "deit3", "plain"):
        config, model = planned(TrainConfig.from_recipe(recipe, data=str(photos)), splits)
        assert isinstance(model, ViTConfig)
        assert config.option("image_size") == 224
        shape = (model.embed_dim, model.depth, model.num_heads, model.patch_hw, model.grid)
        models[recipe] = (*shape, model.readout.pool, model.readout.head, model.embedding.positions)
    small, base = (384, 12, 6, (16, 16), (14, 14)), (768, 12, 12, (16, 16), (14, 14))
    assert models == {
        "paper-pretrain": (*base, "cls", "mlp", "learned"),
        "deit": (*small, "cls", "linear", "learned"),
        "deit3": (*small, "cls", "linear", "learned"),
        "plain": (*small, "mean", "linear", "sincos_2d_big_vision"),
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_a_small_model_for_an_epoch(data, weights, tmp_path, recipe: str) -> None:
    options: dict[str, Any] = {"data": str(data), "run": str(tmp_path / "run"), "epochs": 1, "device": "cpu"}
    if recipe in FROM_WEIGHTS:
        options["weights"] = str(weights)
    elif recipe == "cnn":
        options["model"] = "resnet29_w32_cifar"
    else:
        options |= {"embed_dim": 16, "depth": 2, "num_heads": 2}
    if RECIPES[recipe].option("warmup_steps") is not None:  # meant for a million images and more
        options["warmup_steps"] = 0
    with undrawn():
        result = (pretrain if RECIPES[recipe].task == "masked" else train)(recipe=recipe, **options)
    (epoch,) = Run(result.run).records("epoch")
    assert math.isfinite(epoch["val_loss"])
    assert result.model.config.image_hw == (
        (32, 32) if "weights" in options or recipe == "digits" else (16, 16)
    )


# Plans in run folders


def read_again(plan: Plan, folder: Path) -> Plan:
    """A plan that a run folder has recorded."""
    config = plan.options.replace(run=str(folder)).to_dict()
    run = Run.open(Run.create(config, {"asked": {}, **plan.to_dict()}).path)
    return Plan.of_run(run, TrainConfig.from_dict({**run.config, "run": plan.options.run}))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("length", [{}, {"minutes": 0.5}, {"steps": 7}])
def test_a_plan_is_read_as_it_was_written(
    data, weights, tmp_path, recipe: str, length: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"data": str(data), **length}
    if recipe in FROM_WEIGHTS:
        options["weights"] = str(weights)
    if recipe == "cnn":
        options["model"] = "resnet29_w32_cifar"
    plan = prepare(TrainConfig.from_recipe(recipe, **options), open_data(str(data))).plan
    assert read_again(plan, tmp_path / "run") == plan


@pytest.fixture
def oblong(tmp_path) -> Path:
    return save_pretrained(small_model(image_size=(16, 32), patch_size=(4, 8)), tmp_path / "oblong")


def test_a_plan_from_weights_that_are_not_square_is_read_as_it_was_written(data, oblong, tmp_path) -> None:
    asked = TrainConfig.from_recipe("finetune", data=str(data), weights=str(oblong))
    plan = prepare(asked, open_data(str(data))).plan
    assert plan.options.architecture.image_size == plan.model.image_hw == (16, 32)
    assert read_again(plan, tmp_path / "run") == plan


def test_a_fine_tune_that_is_not_square_resumes_and_repeats(data, oblong, tmp_path, monkeypatch) -> None:
    options = {"data": str(data), "weights": str(oblong), "epochs": 2, "device": "cpu"}
    step = Trainer._training_step

    def interrupted(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, *arguments)

    with undrawn():
        monkeypatch.setattr(Trainer, "_training_step", interrupted)
        with pytest.raises(Interrupted):
            train(recipe="finetune", run=str(tmp_path / "run"), **options)
        monkeypatch.setattr(Trainer, "_training_step", step)
        shutil.rmtree(oblong)  # the run has its own copy
        resumed = resume(tmp_path / "run")
        save_pretrained(small_model(image_size=(16, 32), patch_size=(4, 8)), oblong)
        again = tmp_path / "again"
        words = ["--config", str(tmp_path / "run/config.yaml"), "--run", str(again), "--device", "cpu"]
        assert main(["train", *words]) == 0
    assert resumed.model.config.image_hw == Run(again).model().config.image_hw == (16, 32)
    for one, other in zip(resumed.model.parameters(), Run(again).model().parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("words", "length"),
    [
        (["--epochs", "1"], {"epochs": 1}),
        (["--steps", "7"], {"steps": 7}),
        (["--minutes", "0.02"], {"minutes": 0.02}),
    ],
)
def test_a_length_on_the_command_line_replaces_that_of_the_configuration(
    data, tmp_path, words: list[str], length: dict[str, float]
) -> None:
    small = {"embed_dim": 16, "depth": 1, "num_heads": 2, "device": "cpu", "model": "vit_ti16"}
    with undrawn():
        first = train(recipe="base", data=str(data), run=str(tmp_path / "run"), minutes=0.03, **small).run
        again = tmp_path / "again"
        assert main(["train", "--config", str(first / "config.yaml"), "--run", str(again), *words]) == 0
    config = Run(again).config
    named = {name: config[name] for name in ("epochs", "steps", "minutes") if config[name] is not None}
    assert named == length
    last = Run(again).records("epoch")[-1]
    if "minutes" not in length:
        assert last["step"] == length.get("steps", 3)
    else:
        assert config["lengths"] != Run(first).config["lengths"]


@pytest.mark.parametrize("by_command", [True, False])
@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("train", {"recipe": "cnn"}, "the recipe cnn is for a CNN"),
        ("pretrain", {"keep": "best"}, "keep compares weights by validation"),
        ("pretrain", {"recipe": "digits"}, "the recipe digits is for `vitascope train`"),
        ("train", {"recipe": "mae"}, "the recipe mae is for `vitascope pretrain`"),
    ],
)
def test_library_and_command_reject_the_same_options(
    data, tmp_path, capsys, by_command: bool, task: str, options: dict[str, str], message: str
) -> None:
    given = {"data": str(data), "run": str(tmp_path / "run"), **options}
    if by_command:
        assert main([task, *(f"--{name}={value}" for name, value in given.items())]) == 2
        assert message in capsys.readouterr().err
    else:
        with pytest.raises(UserError, match=re.escape(message)):
            {"train": train, "pretrain": pretrain}[task](**given)
    assert not (tmp_path / "run").exists()


def test_what_was_asked_for_is_recorded_as_plain_values_without_the_home_folder(
    data, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(data.parent))
    balance = Balance(sampling="balanced")
    small = {"embed_dim": np.int64(16), "depth": 1, "num_heads": 2, "epochs": 1, "device": "cpu"}
    with undrawn():
        run = Run(train(recipe="base", data=data, run=tmp_path / "run", balance=balance, **small).run)
    assert run.plan["asked"] == {
        "recipe": "base",
        "options": {
            **small,
            **dataclasses.asdict(balance),
            "data": f"~/{data.name}",
            "run": str(tmp_path / "run"),
        },
    }


@pytest.mark.parametrize("size", [0, 3_000_000_000, (16, 0), (16, 3_000_000_000)])
def test_sides_out_of_range_are_rejected(size: Any) -> None:
    with pytest.raises(UserError, match=r"image_size must be (at least 1|below 2,000,000,000), not"):
        TrainConfig(image_size=size)


def test_small_images_of_one_shape_keep_it_and_others_are_made_square(tmp_path: Path) -> None:
    oblong = write_tree(tmp_path / "oblong", {"cat": 6, "dog": 6}, size=(16, 40))
    mixed = write_tree(tmp_path / "mixed", {"cat": 6, "dog": 6}, size=(16, 40))
    write_picture(mixed / "cat" / "other.png", size=(40, 16))
    for recipe in ("small-data", "cnn", "base"):
        _, model = planned(TrainConfig.from_recipe(recipe, data=str(oblong)), open_data(str(oblong)))
        assert model.image_hw == (16, 40)
    _, model = planned(TrainConfig.from_recipe("small-data", data=str(mixed)), open_data(str(mixed)))
    assert model.image_hw == (16, 16)
