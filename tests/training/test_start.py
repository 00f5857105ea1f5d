"""What a run starts from: the model, the task, the published recipes; and what it may be continued with."""

import dataclasses
import math
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.model import small_model
from tests.training import tiny_config, write_folder
from vitascope.cli import main
from vitascope.data.datasets import open_data
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.training import train
from vitascope.training.checkpoint.identity import check_identity, run_identity
from vitascope.training.defaults import resolve_config
from vitascope.training.loop import augmentation_of
from vitascope.training.optim import MOMENTUM, learning_rate, peak_rate
from vitascope.training.options import ExecutionOptions
from vitascope.training.recipes import RECIPES, TrainConfig
from vitascope.training.tasks.classify import Classify
from vitascope.training.train import make_task, start_model
from vitascope.weights.loading import from_pretrained
from vitascope.weights.saving import save_pretrained


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "greys")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photos") / "photos", per_class=6, side=300)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return save_pretrained(small_model(), tmp_path_factory.mktemp("weights") / "small")


# The recipes


@pytest.mark.parametrize("side", [16, 300])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_makes_a_run_of_a_folder_of_photos_or_says_the_way_out(
    data, photos, weights, recipe: str, side: int
) -> None:
    folder = data if side == 16 else photos
    options: dict[str, Any] = {"data": str(folder)}
    if recipe in ("finetune", "linear-probe", "paper-finetune"):
        options["weights"] = str(weights)
    if recipe == "cnn":
        options["model"] = "resnet29_w32_cifar"
    splits = open_data(str(folder))
    config, model = resolve_config(TrainConfig.from_recipe(recipe, **options), splits)
    augmentation_of(config)
    assert model.image_hw == (config.option("image_size"),) * 2
    assert model.num_classes == 2 or config.task == "masked"
    optimization = config.optimization
    assert optimization.batch_size is not None
    steps = math.ceil(len(splits.train) / optimization.batch_size)
    if optimization.warmup_steps is not None:  # meant for a million images and more
        with pytest.raises(UserError, match="lower warmup_steps or raise epochs"):
            learning_rate(optimization, optimization.batch_size, 0, steps)
        optimization = dataclasses.replace(optimization, warmup_steps=0)
    last = optimization.epochs * steps - 1
    rates = [learning_rate(optimization, optimization.batch_size, step, steps) for step in (0, last)]
    peak = peak_rate(optimization, optimization.batch_size)
    assert all(0 < rate <= peak for rate in rates)


# Dosovitskiy et al. 2021, section 4.1 and appendix B.1
PAPER_PRETRAIN = {
    "model": "vit_b16",
    "optimizer": "adamw",
    "batch_size": 4096,
    "lr": 1e-3,
    "weight_decay": 0.1,
    "warmup_steps": 10_000,
    "schedule": "linear",
    "label_smoothing": 0.0,
    "options": ("head=mlp",),
    "dropout": 0.1,
}
PAPER_FINETUNE = {
    "optimizer": "sgd",
    "batch_size": 512,
    "schedule": "cosine",
    "weight_decay": 0.0,
    "clip_grad": 1.0,
    "image_size": 384,
    "ema": 0.9999,
    "options": ("head=zero",),
    "label_smoothing": 0.0,
    "keep": "last",
}
# Touvron et al. 2021, table 9
DEIT = {
    "model": "vit_s16",
    "image_size": 224,
    "optimizer": "adamw",
    "lr": 5e-4,
    "lr_batch": 512,
    "batch_size": 1024,
    "weight_decay": 0.05,
    "epochs": 300,
    "warmup_epochs": 5.0,
    "warmup_steps": None,
    "schedule": "cosine",
    "mixup": 0.8,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
    "drop_path": 0.1,
    "dropout": 0.0,
    "erase": 0.25,
    "randaugment": 2,
    "magnitude": 9.0,
    "operation_probability": 0.5,
    "ema": 0.99996,
    "clip_grad": 0.0,
}
# Beyer et al. 2022; torch multiplies the decay of 1e-4 by the rate of 1e-3
PLAIN = {
    "model": "vit_s16",
    "image_size": 224,
    "optimizer": "adamw",
    "batch_size": 1024,
    "lr": 1e-3,
    "weight_decay": 0.1,
    "warmup_steps": 10_000,
    "schedule": "cosine",
    "randaugment": 2,
    "magnitude": 10.0,
    "operation_probability": 1.0,
    "mixup": 0.2,
    "cutmix": 0.0,
    "clip_grad": 1.0,
    "options": ("positions=sincos_2d_big_vision",),
    "pool": "mean",
    "label_smoothing": 0.0,
    "epochs": 90,
}
# Dosovitskiy et al. 2021, appendix B.1.2; the rest is what photos of one's own take
MASKED = {"task": "masked", "corrupt": 0.5, "target": "mean_color", "schedule": "cosine"}


@pytest.mark.parametrize(
    ("recipe", "published"),
    [
        ("paper-pretrain", PAPER_PRETRAIN),
        ("paper-finetune", PAPER_FINETUNE),
        ("deit", DEIT),
        ("plain", PLAIN),
        ("masked", MASKED),
    ],
)
def test_a_published_recipe_has_the_published_numbers(recipe: str, published: dict[str, Any]) -> None:
    assert {name: RECIPES[recipe].option(name) for name in published} == published
    assert MOMENTUM == 0.9


def test_the_published_recipes_make_the_published_models(photos) -> None:
    splits = open_data(str(photos))
    models = {}
    for recipe in ("paper-pretrain", "deit", "plain"):
        config, model = resolve_config(TrainConfig.from_recipe(recipe, data=str(photos)), splits)
        assert isinstance(model, ViTConfig)
        shape = (model.embed_dim, model.depth, model.num_heads, model.patch_hw, model.grid)
        models[recipe] = (*shape, model.readout.pool, model.readout.head, model.embedding.positions)
        assert config.option("batch_size") == RECIPES[recipe].option("batch_size")
    small, base = (384, 12, 6, (16, 16), (14, 14)), (768, 12, 12, (16, 16), (14, 14))
    assert models == {
        "paper-pretrain": (*base, "cls", "mlp", "learned"),
        "deit": (*small, "cls", "linear", "learned"),
        "plain": (*small, "mean", "linear", "sincos_2d_big_vision"),
    }


# Several processes


def in_two_processes(place: Path, act: Callable[[], None]) -> list[int]:
    """Do something in two processes that have joined; their exit statuses."""
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                store = dist.FileStore(str(place / "store"), 2)
                dist.init_process_group(
                    "gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=30)
                )
                act()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.parametrize("failing", [0, 1])
def test_data_that_one_process_lacks_stop_all_of_them_before_there_is_a_run(
    data, tmp_path, failing: int
) -> None:
    def begin() -> None:
        folder = data if dist.get_rank() != failing else tmp_path / "nowhere"
        with pytest.raises(UserError, match="nowhere: no such folder"):
            train.train(tiny_config(folder, run=str(tmp_path / "run")))

    assert in_two_processes(tmp_path, begin) == [0, 0]
    assert not (tmp_path / "run").exists()


# The model, the task, the augmentation


def test_the_first_weights_are_a_function_of_the_seed_and_leave_torchs_generator_alone(data) -> None:
    config, model_config = resolve_config(tiny_config(data), open_data(str(data)))
    torch.manual_seed(5)
    first = start_model(config, model_config, 3)
    after = torch.rand(2)
    second = start_model(config, model_config, 3)
    other = start_model(config.replace(seed=1), model_config, 3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.patch_embedding.weight, other.patch_embedding.weight)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), after)


def test_weights_bring_their_body_and_preprocessing_at_the_new_size(data, weights, capsys) -> None:
    config, model_config = resolve_config(
        TrainConfig().replace(data=str(data), weights=str(weights), image_size=16), open_data(str(data))
    )
    model = start_model(config, model_config, 3)
    loaded = from_pretrained(weights)
    assert model.preprocess == loaded.preprocess.at_size((16, 16))
    ours, theirs = model.encoder.state_dict(), loaded.encoder.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert f"weights of {weights}: " in capsys.readouterr().out


@pytest.mark.parametrize("model_channels", [1, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_grey_weights_under_colour_images_are_named(
    data, tmp_path, capsys, channels: int, model_channels: int
) -> None:
    folder = tmp_path / "weights"
    save_pretrained(small_model(in_channels=model_channels, num_classes=2), folder)
    config, model_config = resolve_config(
        TrainConfig().replace(data=str(data), weights=str(folder)), open_data(str(data))
    )
    start_model(config, model_config, channels)
    said = "converted to grey" in capsys.readouterr().out
    assert said == (channels == 3 and model_channels == 1)


def task_of(config: TrainConfig, splits: Splits) -> Any:
    config, model_config = resolve_config(config, splits)
    model = start_model(config, model_config, 3)
    return make_task(config, model, splits, torch.device("cpu"), torch.float32)


def test_without_a_teacher_the_task_is_classification_with_the_smoothing_asked_for(data) -> None:
    task = task_of(tiny_config(data, label_smoothing=0.25), open_data(str(data)))
    assert isinstance(task, Classify)
    assert task.label_smoothing == 0.25


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--teacher", "nowhere"], "nowhere: no such model"),
        (["--teacher", "{weights}"], "has 5 classes, without names; the data have 2"),
        (["--teacher", "{weights}", "--recipe", "small-data"], "add pool=cls or use the recipe distill"),
        (["--teacher", "{weights}", "--pool", "map"], "add pool=cls"),
        (["--teacher", "{weights}", "--model", "resnet29_w32_cifar"], "leave out the teacher"),
        (["--recipe", "masked"], "the recipe masked is for `vitascope pretrain`"),
        (["--config", "{masked}"], "masked.yaml is for `vitascope pretrain`"),
        (
            ["--layer-decay", "0.5", "--model", "resnet29_w32_cifar", "--recipe", "cnn"],
            "no blocks",
        ),
        (["--freeze"], "set weights"),
    ],
)
def test_what_cannot_begin_is_refused_in_one_line_with_the_way_out(
    data, weights, tmp_path, capsys, options: list[str], said: str
) -> None:
    masked = tmp_path / "masked.yaml"
    masked.write_text(RECIPES["masked"].to_yaml())
    options = [option.format(weights=weights, masked=masked) for option in options]
    assert (
        main(["train", "--data", str(data), "--run", str(tmp_path / "run"), "--device", "cpu", *options]) == 2
    )
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_augmentation_is_what_was_asked_for() -> None:
    config = TrainConfig().replace(
        flip=0.25, crop_scale=0.3, shift=0.1, rotate=5.0, color_jitter=0.4, erase=0.2, cutmix=0.7
    )
    augmentation, mixing = augmentation_of(config)
    asked = {field.name: getattr(augmentation, field.name) for field in dataclasses.fields(augmentation)}
    assert asked.pop("randaugment") is None
    assert asked == {name: config.option(name) for name in asked}
    assert mixing is not None
    assert (mixing.mixup, mixing.cutmix) == (0.0, 0.7)
    assert augmentation_of(TrainConfig())[1] is None
    drawn = augmentation_of(RECIPES["deit"])[0].randaugment
    assert drawn is not None
    assert (drawn.num_ops, drawn.magnitude, drawn.probability) == (2, 9.0, 0.5)


# What a checkpoint belongs to


def identity_of(config: TrainConfig) -> dict[str, Any]:
    splits = open_data(config.data, seed=config.seed)
    resolved, model_config = resolve_config(config, splits)
    return run_identity(resolved, model_config, splits.train)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("epochs", 4),
        ("batch_size", 5),
        ("optimizer", "sgd"),
        ("lr", 0.5),
        ("lr_batch", 8),
        ("schedule", "linear"),
        ("warmup_steps", 1),
        ("weight_decay", 0.5),
        ("layer_decay", 0.5),
        ("freeze", True),
        ("clip_grad", 0.0),
        ("label_smoothing", 0.0),
        ("ema", 0.5),
        ("keep", "last"),
        ("flip", 0.0),
        ("mixup", 0.8),
        ("distill_weight", 0.75),
        ("corrupt", 0.25),
        ("task", "masked"),
        ("seed", 1),
        ("embed_dim", 32),
        ("dropout", 0.1),
        ("drop_path", 0.1),
        ("options", ("positions=rotary",)),
    ],
)
def test_what_changes_the_result_is_refused_by_name(data, option: str, value: Any) -> None:
    saved, now = identity_of(tiny_config(data)), identity_of(tiny_config(data, **{option: value}))
    shown = "positions" if option == "options" else option
    with pytest.raises(UserError, match=rf"(not of this run: |; )(model: )?{shown} was .*, is ") as refused:
        check_identity(saved, now)
    assert "\n" not in str(refused.value)


def test_options_of_the_engine_and_moved_files_are_no_difference(data, tmp_path) -> None:
    moved = tmp_path / "elsewhere" / "greys"
    moved.parent.mkdir()
    moved.symlink_to(data)
    saved = identity_of(tiny_config(data, run="here"))
    engine = {
        "precision": "bf16",
        "device": "meta",
        "workers": 3,
        "compile": True,
        "accumulate": 2,
        "gradient_checkpointing": True,
        "parallel": "fsdp",
        "checkpoint_seconds": 1.0,
        "keep_checkpoints": 7,
    }
    assert set(engine) == {field.name for field in dataclasses.fields(ExecutionOptions)}
    check_identity(saved, identity_of(tiny_config(moved, run="there", **engine)))


def test_other_images_are_refused_by_what_differs(data, tmp_path) -> None:
    config = tiny_config(data)
    saved = identity_of(config)
    fewer = write_folder(tmp_path / "fewer", per_class=10)
    relabelled = write_folder(tmp_path / "relabelled", classes=("light", "dark"))
    renamed = write_folder(tmp_path / "renamed")
    (renamed / "dark" / "000.png").rename(renamed / "dark" / "zero.png")
    for folder, name in (
        (fewer, "training images was 20, is 16"),
        (renamed, "names and labels of the training images, SHA-256 was"),
    ):
        with pytest.raises(UserError, match=re.escape(name)):
            check_identity(saved, identity_of(config.replace(data=str(folder))))
    assert identity_of(config.replace(data=str(relabelled)))["classes"] == ["dark", "light"]


def test_an_option_that_came_after_the_checkpoint_is_no_difference(data) -> None:
    saved = identity_of(tiny_config(data))
    check_identity(saved, saved | {"lookahead": 0})
    with pytest.raises(UserError, match="lookahead was 0, is None"):
        check_identity(saved | {"lookahead": 0}, saved)
