"""A run on few images without named weights or recipe starts from the built-in model."""

import itertools

import pytest

from vitascope.cli import main
from vitascope.errors import UserError
from vitascope.options.recipes import FEW_TO_START, FEW_TO_TUNE, RECIPES, TrainConfig, configuration
from vitascope.run.run import Run
from vitascope.training import train

pytestmark = pytest.mark.usefixtures("without_figures")

SHORT = {"epochs": 1, "device": "cpu"}


def start(images: int = 24, channels: int = 3, **options: object) -> TrainConfig:
    return configuration({"recipe": None, "data": "photos/", **options}, images, channels)


def expected(recipe: str, **options: object) -> TrainConfig:
    return TrainConfig.from_recipe(recipe, data="photos/", **options)


def test_few_colour_images_start_from_the_built_in_model() -> None:
    assert start() == start(FEW_TO_TUNE) == expected("finetune", weights="cifar10")
    other = {"image_size": 64, "lr": 1e-4}
    assert start(**other) == expected("finetune", weights="cifar10", **other)
    for images in (FEW_TO_TUNE + 1, FEW_TO_START):
        assert start(images) == expected("small-finetune", weights="cifar10")
    assert start(FEW_TO_START + 1) == start(channels=1) == expected("small-data")


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({"weights": "runs/x"}, "finetune"),
        ({"model": "vit_s16"}, "small-data"),
        ({"model": "resnet29_w16_cifar"}, "cnn"),
        ({"depth": 2}, "small-data"),
        ({"model_options": {"positions": "rotary"}}, "small-data"),
        ({"teacher": "runs/x"}, "distill"),
        ({"task": "masked"}, "masked"),
    ],
)
def test_named_weights_models_and_tasks_are_respected(options: dict[str, object], recipe: str) -> None:
    assert start(**options) == expected(recipe, **options)


def test_random_weights_can_be_asked_for() -> None:
    assert start(weights="none") == expected("small-data")
    assert TrainConfig(weights="none").weights is None
    assert TrainConfig.from_recipe(data="photos/", weights="none") == RECIPES["small-data"].replace(
        data="photos/"
    )


def test_embedded_digits_keep_their_recipe() -> None:
    assert configuration({"recipe": None}, 1797, 1) == RECIPES["digits"]


def test_the_first_line_names_the_start_the_way_out_and_a_better_one(data, tmp_path, capsys) -> None:
    assert main(["train", "--data", str(data), "--run", str(tmp_path / "run"), "--epochs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("start  from cifar10: ")
    assert lines[1].strip() == (
        "20 training images: few for random weights (--weights none); `vitascope probe cifar10 --data DATA` "
        "takes seconds, and measures on all images; with a network, a larger model is a better start: "
        "--weights facebook/dinov2-small"
    )
    config = Run(tmp_path / "run").config
    assert config["weights"] == "cifar10"
    assert config["layer_decay"] == RECIPES["finetune"].option("layer_decay")


@pytest.mark.parametrize("by_command", [True, False])
def test_weights_none_and_a_recipe_train_from_scratch(data, tmp_path, capsys, by_command: bool) -> None:
    for number, option in enumerate(({"weights": "none"}, {"recipe": "small-data"})):
        run = tmp_path / f"run{number}"
        if by_command:
            words = [f"--{name}={value}" for name, value in option.items()]
            assert main(["train", "--data", str(data), "--run", str(run), "--epochs", "1", *words]) == 0
        else:
            train.train(data=str(data), run=str(run), **SHORT, **option)
        config = Run(run).config
        assert (config["weights"], config["model"]) == (None, "cct_mini")
        assert "start  from" not in capsys.readouterr().out


def test_library_and_command_start_alike_and_the_run_repeats(data, tmp_path) -> None:
    runs = [tmp_path / name for name in ("library", "command", "again")]
    train.train(data=str(data), run=str(runs[0]), **SHORT)
    words = ["--data", str(data), "--run", str(runs[1]), "--epochs", "1", "--device", "cpu"]
    assert main(["train", *words]) == 0
    assert main(["train", "--config", str(runs[0] / "config.yaml"), "--run", str(runs[2])]) == 0
    configs = [dict(Run(run).config) for run in runs]
    for config in configs:
        config.pop("run")
    assert all(one == other for one, other in itertools.pairwise(configs))


def test_data_that_are_not_there_are_reported_before_anything_is_created(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="nowhere: no such folder"):
        train.train(data="nowhere")
    assert not list(tmp_path.iterdir())
