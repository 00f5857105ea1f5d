from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from tests.data import noise
from tests.forked import in_group
from tests.models import small_model, small_resnet
from tests.training import tiny_config, trainer_of, undrawn, write_folder
from vitascope import runs
from vitascope.cli import main
from vitascope.data.datasets import open_data
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.targets import ClassSets
from vitascope.errors import UserError
from vitascope.models.preprocess import Fit, Preprocess
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.runs import train
from vitascope.training.announcement import announce_data
from vitascope.training.building import make_task, prepare, start_model
from vitascope.training.loop import augmentation_of
from vitascope.training.options.recipes import RECIPES, TrainConfig
from vitascope.training.placement import place
from vitascope.training.run.run import Run

pytestmark = pytest.mark.usefixtures("without_figures")


def test_the_first_line_names_the_start_the_way_out_and_a_better_one(data, tmp_path, unfit, capsys) -> None:
    command, library = tmp_path / "command", tmp_path / "library"
    words = ["--data", str(data), "--run", str(command), "--epochs", "1", "--device", "cpu"]
    assert main(["train", *words]) == 130
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
    with pytest.raises(KeyboardInterrupt):
        runs.train(data=str(data), run=str(library), epochs=1, device="cpu")
    assert {**Run(library).config, "run": None} == config


def test_images_that_were_drawn_for_other_splits_count_for_the_recipe(
    data, tmp_path, unfit, monkeypatch
) -> None:
    """20 of 24 are training images."""
    for most, recipe in ((23, "small-finetune"), (24, "finetune")):
        monkeypatch.setattr("vitascope.training.options.recipes.FEW_TO_TUNE", most)
        folder = tmp_path / str(most)
        with pytest.raises(KeyboardInterrupt):
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


INVALID = {
    "--teacher nowhere": "nowhere: no such model",
    "--teacher {weights}": "has 5 classes, without names; the data have 2",
    "--teacher {weights} --recipe small-data": 'a distillation token goes with pool "cls"',
    "--teacher {weights} --pool map": 'a distillation token goes with pool "cls"',
    "--teacher {weights} --model resnet29_w32_cifar": "no distillation token for the teacher",
    "--recipe masked": "the recipe masked is for `vitascope pretrain`",
    "--recipe cnn": "the recipe cnn is for a CNN",
    "--config {masked}": "this configuration is for `vitascope pretrain`",
    "--layer-decay 0.5 --model resnet29_w32_cifar --recipe cnn": "no blocks",
    "--freeze --weights none": "set weights",
    "--lora 4": "lora needs a body that is trained already: set weights",
    "--lora 4 --weights {weights} --freeze": "and lora=4 the body too: leave out one",
    "--lora 4 --weights {resnet}": "{resnet} is a CNN, which has no lora; leave it out",
}


def test_invalid_start_is_rejected_in_one_line_with_advice(data, weights, tmp_path, capsys) -> None:
    places = {"weights": weights, "masked": tmp_path / "masked.yaml", "resnet": tmp_path / "resnet"}
    places["masked"].write_text(RECIPES["masked"].to_yaml())
    save_pretrained(small_resnet(), places["resnet"])
    common = ["train", "--data", str(data), "--run", str(tmp_path / "run"), "--device", "cpu"]
    for options, message in INVALID.items():
        assert main([*common, *options.format(**places).split()]) == 2
        error = capsys.readouterr().err
        assert message.format(**places) in error
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


def test_balancing_a_class_without_training_images_is_rejected_and_leaves_no_folder(
    without_dim, tmp_path
) -> None:
    for option, named in (("class_weights", "class_weights=balanced"), ("sampling", "balanced sampling")):
        message = f"1 of 3 classes has no image in train: dim; {named} needs images of every class: add some"
        with pytest.raises(UserError, match=message):
            runs.train(tiny_config(without_dim, run=str(tmp_path / "run"), **{option: "balanced"}))
        assert not (tmp_path / "run").exists()


def test_plain_training_warns_of_a_class_without_training_images(without_dim, tmp_path, caplog) -> None:
    with undrawn():
        runs.train(tiny_config(without_dim, run=str(tmp_path / "run"), steps=1))
    assert [record.message for record in caplog.records] == [
        "1 of 3 classes has no image in train: dim; a class without images is not learned",
        "1 of 3 classes has no image in val: dim; a class without images is not validated",
    ]


def test_uneven_classes_are_announced_with_the_options(tmp_path, capsys) -> None:
    folder = write_folder(tmp_path / "data", per_class=16)
    for path in sorted((folder / "light").iterdir())[5:]:
        path.unlink()
    for options, end in (
        ({}, "class_weights=balanced or sampling=balanced would balance them"),
        ({"class_weights": "balanced"}, "class_weights=balanced"),
        ({"sampling": "balanced"}, "sampling=balanced"),
    ):
        announce_data(trainer_of(tiny_config(folder, **options)))
        lines = capsys.readouterr().out.splitlines()
        assert lines[2] == f"       uneven: 3 (light) to 12 (dark) training images per class; {end}"


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


SQUARE = Preprocess(image_size=(16, 16))


@pytest.fixture(scope="module")
def strips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "strips"
    random = np.random.default_rng(0)
    for name, value in (("white", 255), ("black", 0)):
        (root / name).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(80, 170, (16, 64, 3), dtype=np.uint8)
            pixels[:, :12] = value
            Image.fromarray(pixels).save(root / name / f"{number:02}.png")
    return root


@pytest.mark.parametrize(("fit", "share"), [("crop", 0.25), ("pad", 1.0), ("squash", 1.0)])
def test_a_fit_shows_a_part_or_all_of_a_picture(fit: Fit, share: float) -> None:
    fitted = SQUARE.fitted(fit)
    assert fitted.share_seen(64, 16) == pytest.approx(share)
    assert fitted.share_seen(16, 64) == pytest.approx(share)
    assert fitted.share_seen(40, 40) == pytest.approx(1)


def test_padding_keeps_the_proportions_and_squashing_does_not() -> None:
    picture = Image.new("RGB", (64, 16), "white")
    padded = SQUARE.fitted("pad").pixels(picture)
    assert (padded == 255).all(axis=0).sum() == 16 * 4  # in a grey square
    assert (padded[:, 0] == 128).all()
    assert (SQUARE.fitted("squash").pixels(picture) == 255).all()


def test_a_fit_replaces_the_rule_of_weights() -> None:
    theirs = Preprocess(image_size=(16, 16), resize_to=(18, 18), side_rounding="nearest")
    assert theirs.fitted("squash") == SQUARE.fitted("squash")
    assert theirs.fitted("crop") == SQUARE


def test_a_model_keeps_its_fit(strips: Path, tmp_path: Path) -> None:
    run = train(tiny_config(strips, run=str(tmp_path / "run"), steps=1, fit="pad")).run
    ours = preprocess_of(from_pretrained(run))
    assert ours == ours.fitted("pad") != ours.fitted("squash")


def announced(data: Path, capsys, **options: object) -> str:
    announce_data(trainer_of(tiny_config(data, **options)))
    return " ".join(capsys.readouterr().out.split())


def test_the_start_says_how_much_a_crop_shows_and_what_shows_more(strips: Path, capsys) -> None:
    line = "fit the model sees 25% of a picture of 16x64 pixels, its centre"
    assert announced(strips, capsys).endswith(f"{line}: fit=pad or fit=squash shows it the whole picture")
    assert announced(strips, capsys, fit="crop").endswith(line)
    assert "the model sees" not in announced(strips, capsys, fit="squash")


def test_the_start_says_how_sizes_spread_and_what_is_cut_off_of_the_longest(tmp_path: Path, capsys) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(20):
            size = (320, 320) if number % 2 else (32, 32)
            Image.new("L", (3000, 20) if number == 7 else size, 9 * number + (name == "a")).save(
                tmp_path / name / f"{number:02}.png"
            )
    printed = announced(tmp_path, capsys, batch_size=None)
    sides = r"images of about \d+x\d+ pixels, with sides from 20 to 3,000"
    assert re.search(sides, printed)
    least = r"; of [12] of 3\d less than 75%, down to 1% of 20x3000 pixels"
    assert re.search(least + ": fit=pad or fit=squash shows it the whole picture", printed)
