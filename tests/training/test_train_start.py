"""The start of a run: the recipe, the model, the task, the augmentation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.data import noise
from tests.forked import in_group
from tests.models import small_model, small_resnet
from tests.training import tiny_config, undrawn, write_folder
from vitascope import runs
from vitascope.cli import main
from vitascope.data.datasets import open_data
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.targets import ClassSets
from vitascope.errors import UserError
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.training.building import make_task, prepare, start_model
from vitascope.training.loop import augmentation_of
from vitascope.training.options.recipes import RECIPES, TrainConfig
from vitascope.training.placement import place
from vitascope.training.run.run import Run

pytestmark = pytest.mark.usefixtures("without_figures")


def test_the_first_line_names_the_start_the_way_out_and_a_better_one(data, tmp_path, capsys) -> None:
    command, library = tmp_path / "command", tmp_path / "library"
    words = ["--data", str(data), "--run", str(command), "--epochs", "1", "--device", "cpu"]
    assert main(["train", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("start  from cifar10: ")
    assert [line.strip() for line in lines[1:4]] == [
        "cifar10 is small, and was taught pictures of 32x32 pixels; with a network, a larger body that was "
        "taught photographs is a better start: --weights facebook/dinov2-small",
        "2 val images choose the epoch and 2 test images measure it; --folds 3 measures on all 24, and its "
        "ensemble had a lower log loss",
        "`vitascope probe cifar10 --data DATA` takes seconds, and measures on all images; 20 training "
        "images: few for random weights (--weights none)",
    ]
    config = {**Run(command).config, "run": None}
    assert config["weights"] == "cifar10"
    assert config["layer_decay"] == RECIPES["finetune"].option("layer_decay")
    runs.train(data=str(data), run=str(library), epochs=1, device="cpu")
    assert {**Run(library).config, "run": None} == config


def test_images_that_were_drawn_for_other_splits_count_for_the_recipe(data, tmp_path, monkeypatch) -> None:
    """20 of 24 are training images."""
    for most, recipe in ((23, "small-finetune"), (24, "finetune")):
        monkeypatch.setattr("vitascope.training.plan.FEW_TO_TUNE", most)
        folder = tmp_path / str(most)
        with undrawn():
            runs.train(data=str(data), run=str(folder), epochs=1, device="cpu")
        assert Run(folder).config["optimizer"] == RECIPES[recipe].option("optimizer")


# Several processes


def test_data_missing_in_one_process_stop_all_before_a_run_is_created(data, tmp_path) -> None:
    def begin() -> None:
        for failing in (0, 1):
            folder = data if dist.get_rank() != failing else tmp_path / "nowhere"
            with pytest.raises(UserError, match="nowhere: no such folder"):
                runs.train(tiny_config(folder, run=str(tmp_path / "run")))

    assert in_group(2, begin, tmp_path / "store") == [0, 0]
    assert not (tmp_path / "run").exists()


# The model, the task, the augmentation


def test_initial_weights_depend_on_the_seed_only_and_keep_torchs_generator(data) -> None:
    splits = open_data(str(data))
    first_seed, other_seed = (prepare(tiny_config(data, seed=seed), splits) for seed in (0, 1))
    torch.manual_seed(5)
    first = start_model(first_seed)
    after = torch.rand(2)
    second = start_model(first_seed)
    other = start_model(other_seed)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.patch_embedding.weight, other.patch_embedding.weight)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), after)


def test_weights_provide_the_body_and_preprocessing_at_the_new_size(data, weights, capsys) -> None:
    splits = open_data(str(data))
    config = TrainConfig().replace(data=str(data), weights=str(weights), image_size=16)
    model = start_model(prepare(config, splits))
    loaded = from_pretrained(weights)
    assert model.preprocess == loaded.preprocess.at_size((16, 16))
    ours, theirs = model.encoder.state_dict(), loaded.encoder.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert f"start  from {weights}: " in capsys.readouterr().out


@pytest.mark.parametrize(("channels", "model_channels"), [(1, 3), (3, 1), (3, 3)])
def test_grey_weights_with_colour_images_are_reported(
    data, tmp_path, capsys, channels: int, model_channels: int
) -> None:
    folder = tmp_path / "weights"
    save_pretrained(small_model(in_channels=model_channels, num_classes=2), folder)
    splits = open_data(str(data))
    config = TrainConfig().replace(data=str(data), weights=str(folder))
    start_model(prepare(config, dataclasses.replace(splits, channels=channels)))
    message = "converted to grey" in capsys.readouterr().out
    assert message == (channels == 3 and model_channels == 1)


def task_of(config: TrainConfig, splits: Splits) -> Any:
    opened = prepare(config, splits)
    model = start_model(opened)
    return make_task(opened.plan.config, model, splits, place(opened.plan, model, torch.device("cpu")))


@pytest.mark.parametrize("part", ["val", "test"])
def test_images_of_several_classes_are_measured_only_if_one_has_a_class(data, part: str) -> None:
    parts = {}
    for name in ("train", "val", "test"):
        labels = np.tile(np.eye(2, dtype=np.bool_), (4, 1)) & (name != part)
        sources = [noise(16, 16, seed=seed) for seed in range(8)]
        parts[name] = ImageSet(name, sources, ClassSets(labels, ("a", "b")))
    with pytest.raises(UserError, match=f"none of the 8 {part} images has a class to be measured by"):
        task_of(tiny_config(data), Splits(**parts, channels=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--teacher", "nowhere"], "nowhere: no such model"),
        (["--teacher", "{weights}"], "has 5 classes, without names; the data have 2"),
        (["--teacher", "{weights}", "--recipe", "small-data"], 'a distillation token goes with pool "cls"'),
        (["--teacher", "{weights}", "--pool", "map"], 'a distillation token goes with pool "cls"'),
        (
            ["--teacher", "{weights}", "--model", "resnet29_w32_cifar"],
            "no distillation token for the teacher",
        ),
        (["--recipe", "masked"], "the recipe masked is for `vitascope pretrain`"),
        (["--recipe", "cnn"], "the recipe cnn is for a CNN"),
        (["--config", "{masked}"], "this configuration is for `vitascope pretrain`"),
        (["--layer-decay", "0.5", "--model", "resnet29_w32_cifar", "--recipe", "cnn"], "no blocks"),
        (["--freeze", "--weights", "none"], "set weights"),
        (["--lora", "4"], "lora needs a body that is trained already: set weights"),
        (["--lora", "4", "--weights", "{weights}", "--freeze"], "and lora=4 the body too: leave out one"),
        (["--lora", "4", "--weights", "{resnet}"], "{resnet} is a CNN, which has no lora; leave it out"),
    ],
)
def test_invalid_start_is_rejected_in_one_line_with_advice(
    data, weights, tmp_path, capsys, options: list[str], message: str
) -> None:
    masked = tmp_path / "masked.yaml"
    masked.write_text(RECIPES["masked"].to_yaml())
    places = {"weights": weights, "masked": masked, "resnet": tmp_path / "resnet"}
    save_pretrained(small_resnet(), places["resnet"])
    options, message = [option.format(**places) for option in options], message.format(**places)
    assert (
        main(["train", "--data", str(data), "--run", str(tmp_path / "run"), "--device", "cpu", *options]) == 2
    )
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


# Uneven classes


@pytest.fixture
def without_dim(data, monkeypatch) -> Path:
    """Data with a listed class that has no images, as a hub data set or shards may have."""

    def with_a_third_class(place: str, **options: Any) -> Splits:
        splits = open_data(place, **options)
        names = ("dark", "light", "dim")
        parts = {
            part: dataclasses.replace(images, targets=images.truth.in_classes(names))
            for part, images in splits.parts.items()
        }
        return dataclasses.replace(splits, **parts)

    monkeypatch.setattr("vitascope.training.train.open_data", with_a_third_class)
    return data


@pytest.mark.parametrize(
    ("option", "named"), [("class_weights", "class_weights=balanced"), ("sampling", "balanced sampling")]
)
def test_balancing_a_class_without_training_images_is_rejected_and_leaves_no_folder(
    without_dim, tmp_path, option: str, named: str
) -> None:
    with pytest.raises(UserError) as rejected:
        runs.train(tiny_config(without_dim, run=str(tmp_path / "run"), **{option: "balanced"}))
    assert str(rejected.value) == (
        f"1 of 3 classes has no image in train: dim; {named} needs images of every class: add some, or leave "
        "the option out"
    )
    assert not (tmp_path / "run").exists()


def test_plain_training_warns_of_a_class_without_training_images(without_dim, tmp_path, caplog) -> None:
    with undrawn():
        runs.train(tiny_config(without_dim, run=str(tmp_path / "run"), epochs=1))
    assert [record.message for record in caplog.records] == [
        "1 of 3 classes has no image in train: dim; a class without images is not learned",
        "1 of 3 classes has no image in val: dim; a class without images is not validated",
    ]


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "class_weights=balanced or sampling=balanced would balance them"),
        ({"class_weights": "balanced"}, "class_weights=balanced"),
        ({"sampling": "balanced"}, "sampling=balanced"),
    ],
)
def test_uneven_classes_are_announced_with_the_options(tmp_path, capsys, options, end: str) -> None:
    folder = write_folder(tmp_path / "data", per_class=16)
    for path in sorted((folder / "light").iterdir())[5:]:
        path.unlink()
    with undrawn():
        runs.train(tiny_config(folder, run=str(tmp_path / "run"), epochs=1, **options))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"       uneven: 3 (light) to 12 (dark) training images per class; {end}"
    assert any(", balanced " in line for line in lines)


def test_augmentation_has_the_given_options() -> None:
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
