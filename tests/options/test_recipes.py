import dataclasses
from typing import Any

import numpy as np
import pytest
import yaml

from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.model.sizes import named_config
from vitascope.options.groups import Architecture
from vitascope.options.recipes import GROUP_OF, RECIPES, TrainConfig, default_recipe
from vitascope.training.optim import MOMENTUM


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_a_valid_configuration_and_differs_from_the_others(recipe: str) -> None:
    configs = {name: TrainConfig.from_recipe(name) for name in RECIPES}
    assert all(configs[recipe] != config for name, config in configs.items() if name != recipe)


def test_options_override_the_recipe() -> None:
    assert TrainConfig.from_recipe("digits", epochs=3).option("epochs") == 3
    assert RECIPES["digits"].option("epochs") != 3


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({}, "digits"),
        ({"data": "photos/"}, "small-data"),
        ({"data": "photos/", "weights": "runs/x"}, "finetune"),
        ({"data": "photos/", "weights": "runs/x", "lora": 4}, "lora"),
        ({"data": "photos/", "weights": "runs/x", "freeze": True}, "linear-probe"),
        ({"data": "photos/", "teacher": "runs/x"}, "distill"),
        ({"data": "photos/", "model": "resnet29_w32_cifar"}, "cnn"),
        ({"data": "photos/", "model": "vit_s16"}, "small-data"),
        ({"data": "digits", "task": "masked"}, "masked"),
        ({"data": "photos/", "task": "masked", "target": "pixels"}, "masked"),
        ({"data": "photos/", "task": "masked", "target": "mae"}, "mae"),
    ],
)
def test_recipe_follows_from_the_given_options(options: dict[str, str], recipe: str) -> None:
    assert default_recipe(TrainConfig.from_dict(options)) == recipe
    assert TrainConfig.from_recipe(**options) == RECIPES[recipe].replace(**options)


def test_model_options_are_added_to_the_recipes() -> None:
    given = {"init": "paper", "num_registers": 2}
    config = TrainConfig.from_recipe("deit3", model_options=given)
    assert config.architecture.model_options == {"layer_scale": 1e-4, "position_prefix": False, **given}


def test_dependent_recipe_option_is_dropped_with_its_base_option() -> None:
    given = TrainConfig.from_recipe("deit3", model_options={"positions": "rotary"}).architecture
    assert given.model_options == {"init": "timm", "layer_scale": 1e-4, "positions": "rotary"}
    same = TrainConfig.from_recipe("deit3", model_options={"positions": "learned"}).architecture
    assert same.model_options["position_prefix"] is False


def test_named_set_of_model_options_is_replaced_by_its_parts() -> None:
    modern = {"positions": "rotary", "num_registers": 4, "layer_scale": 0.1}
    assert Architecture(model_options="modern").model_options == modern
    given = TrainConfig(model_options=["num_registers=1", "modern", "mlp=swiglu"]).architecture.model_options
    assert given == {**modern, "num_registers": 1, "mlp": "swiglu"}


def test_every_option_has_a_unique_name_and_one_group() -> None:
    config = TrainConfig()
    groups = [getattr(config, group) for group in set(GROUP_OF.values()) - {None}]
    names = [field.name for part in (config, *groups) for field in dataclasses.fields(part)]
    assert sorted(names) == sorted([*GROUP_OF, *set(GROUP_OF.values()) - {None}])
    assert len(set(GROUP_OF)) == len(GROUP_OF)


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match="nearest: small-data"):
        TrainConfig.from_recipe("smal-data")


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(UserError, match="'learning_rat'"):
        TrainConfig.from_dict({"learning_rat": 1.0})
    with pytest.raises(UserError, match="nearest: weight_decay"):
        TrainConfig.from_dict({"weight_decy": 1.0})


OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    **{"epochs": (0,), "batch_size": (0,), "lr": (-1.0, 0.0, 1e9, float("nan")), "rotate": (-10.0,)},
    **{"weight_decay": (1000.0, -0.1), "label_smoothing": (1.0,), "layer_decay": (0.0,), "erase": (1.5,)},
    **{"magnitude": (11.0,), "accumulate": (0,), "temperature": (0.0,), "distill_weight": (2.0,)},
    **{"corrupt": (1.0,), "decoder_dim": (0, 100), "decoder_depth": (0,), "keep_checkpoints": (0,)},
    **{"ema": (1.0,), "crop_scale": (0.0,), "flip": (1.5,), "keep": ("worst",), "precision": ("fp8",)},
    **{"workers": (-1,), "patience": (-1,), "class_weights": ("inverse",), "sampling": ("sqrt",)},
    **{"seed": (-1, 2**63)},
}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in OUT_OF_RANGE.items() for value in values]
)
def test_out_of_range_numbers_are_rejected_by_name(option: str, value: float | str) -> None:
    with pytest.raises(UserError, match=option):
        TrainConfig.from_dict({option: value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: three", "epochs must be a whole number or null, not 'three'"),
        ("depth: 2.5", "depth must be a whole number or null, not 2.5"),
        ("lr: '1e-3'", "lr must be a number, not '1e-3'"),
        ("model_options: 3", "model_options must be values by name, not 3"),
        ("model_options: [3]", "model_options must be values by name, not [3]"),
    ],
)
def test_value_of_the_wrong_type_in_a_file_is_rejected_by_name(tmp_path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError) as rejected:
        TrainConfig.from_yaml(tmp_path / "config.yaml")
    assert str(rejected.value) == f"{tmp_path / 'config.yaml'}: {message}"


def test_invalid_yaml_is_rejected_in_one_line(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("a: [1\nb: 2\n")
    with pytest.raises(UserError, match="not readable as YAML") as rejected:
        TrainConfig.from_yaml(tmp_path / "config.yaml")
    assert "\n" not in str(rejected.value)


def test_model_option_given_twice_is_rejected() -> None:
    with pytest.raises(UserError, match="positions is given twice"):
        TrainConfig(model_options=["positions=rotary", "positions=none"])


def test_model_options_are_parsed_as_values() -> None:
    texts = ["positions=rotary", "window=[2, 3]", "num_registers=4", "class_token=true"]
    values = {"positions": "rotary", "window": [2, 3], "num_registers": 4, "class_token": True}
    assert TrainConfig(model_options=texts).architecture.model_options == values
    assert TrainConfig(model_options=texts) == TrainConfig(model_options={**values, "window": (2, 3)})


def test_numbers_of_numpy_are_model_options_and_the_callers_dict_stays_apart(tmp_path) -> None:
    given: dict[str, Any] = {"num_registers": np.int64(4), "layer_scale": np.float32(0.5)}
    config = TrainConfig(model_options=given)
    given["positions"] = config.to_dict()["model_options"]["positions"] = "rotary"
    assert yaml.safe_load(config.to_yaml())["model_options"] == {"num_registers": 4, "layer_scale": 0.5}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("positions", "NAME=VALUE"),
        ("position=rotary", "nearest: positions"),
        *(
            (f"{name}=1", "leave it out")
            for name in ("depth", "pool", "dropout", "num_classes", "image_size")
        ),
    ],
)
def test_malformed_model_options_are_rejected(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        TrainConfig(model_options=[text])


def test_yaml_round_trip_keeps_every_option(tmp_path) -> None:
    config = TrainConfig.from_recipe(
        "digits",
        seed=7,
        lr=1e-5,
        run="a b/ü",
        model_options={"mlp": "swiglu", "attention": "window", "window": [2, 3], "layer_scale": 1e-5},
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert TrainConfig.from_yaml(path) == config
    assert set(yaml.safe_load(config.to_yaml())) == set(GROUP_OF)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "epochs: 3\nepocs: 4"])
def test_file_that_is_not_a_configuration_is_rejected(tmp_path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError):
        TrainConfig.from_yaml(path)


def test_an_option_of_a_newer_version_is_named_with_its_file(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("epochs: 3\noptimizer: lion\n")
    with pytest.raises(
        UserError, match=rf"{path}: unknown optimizer 'lion'.*a newer version of vitascope than"
    ):
        TrainConfig.from_yaml(path)
    path.write_text("epochs: 3\nepocs: 4\n")
    with pytest.raises(
        UserError, match=rf"{path}: unknown training option 'epocs'; nearest: epochs; a newer"
    ):
        TrainConfig.from_yaml(path)


@pytest.mark.parametrize(
    "lengths",
    ["[[0]]", "[[0, x]]", "5", "[[1, 10]]", "[[0, 0]]", "[[0, 10], [0, 12]]", "[[0, 10], [11, 20]]"],
)
def test_edited_lengths_are_checked_like_every_option(tmp_path, lengths: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"lengths: {lengths}\n")
    with pytest.raises(UserError, match=rf"{path}: lengths must be .*pairs of .*[,;] not "):
        TrainConfig.from_yaml(path)
    path.write_text("lengths: [[0, 10], [4, 20], [6, 7]]\n")
    assert TrainConfig.from_yaml(path).optimization.lengths == ((0, 10), (4, 20), (6, 7))


def test_paths_and_numbers_of_numpy_are_options_as_they_are_recorded(tmp_path) -> None:
    config = TrainConfig(data=tmp_path, run=tmp_path / "r", lr=np.float64(0.5), epochs=np.int64(3))
    assert (config.data, config.run, config.optimization.lr) == (str(tmp_path), str(tmp_path / "r"), 0.5)
    assert "epochs: 3\n" in config.to_yaml()
    with pytest.raises(UserError, match="lr must be a number, not 1000"):
        TrainConfig(lr=10**400)


# Runs of the recipes


# Dosovitskiy et al. 2021, section 4.1 and appendix B.1
PAPER_PRETRAIN = {
    "model": "vit_b16",
    "optimizer": "adamw",
    "batch_size": 4096,
    "warmup_steps": 10_000,
    "label_smoothing": 0.0,
    "model_options": {"head": "mlp"},
    "crop_scale": 0.05,  # vit_jax/input_pipeline.py
    "color_jitter": 0.0,
    "ema": 0.0,
}
# Its table 3, of which a row has: epochs, rate, its schedule, weight decay, dropout, largest gradient norm
COLUMNS = ("epochs", "lr", "schedule", "weight_decay", "dropout", "clip_grad")
JFT = dict(zip(COLUMNS, (7, 8e-4, "linear", 0.1, 0.0, 0.0), strict=True))
IMAGENET_21K = dict(zip(COLUMNS, (90, 1e-3, "linear", 0.03, 0.1, 0.0), strict=True))
IMAGENET = dict(zip(COLUMNS, (300, 3e-3, "cosine", 0.3, 0.1, 1.0), strict=True))
PAPER_FINETUNE = {
    "optimizer": "sgd",
    "batch_size": 512,
    "schedule": "cosine",
    "weight_decay": 0.0,
    "clip_grad": 1.0,
    "ema": 0.9999,
    "model_options": {"head_init": "zero"},
    "label_smoothing": 0.0,
    "keep": "last",
}
# Touvron et al. 2021, table 9
DEIT = {
    "model": "vit_s16",
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
    "repeats": 3,
    "loss": "cross_entropy",
    "ema": 0.99996,
    "clip_grad": 0.0,
}
# Touvron et al. 2022, the authors' command for ViT-S, but for the optimizer and its rate (LAMB, 4e-3)
DEIT3 = {
    "model": "vit_s16",
    "batch_size": 2048,
    "weight_decay": 0.05,
    "epochs": 800,
    "warmup_epochs": 5.0,
    "schedule": "cosine",
    "loss": "bce",
    "mixup": 0.8,
    "cutmix": 1.0,
    "label_smoothing": 0.0,
    "drop_path": 0.05,
    "dropout": 0.0,
    "erase": 0.0,
    "randaugment": 0,
    "three_augment": True,
    "color_jitter": 0.3,
    "crop_scale": 0.08,
    "repeats": 3,
    "ema": 0.0,
}
# Beyer et al. 2022; torch multiplies the decay of 1e-4 by the rate of 1e-3
PLAIN = {
    "model": "vit_s16",
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
    "model_options": {"positions": "sincos_2d_big_vision"},
    "pool": "mean",
    "label_smoothing": 0.0,
    "epochs": 90,
}
# Dosovitskiy et al. 2021, appendix B.1.2; the rest is for a user's own photos
MASKED = {"task": "masked", "corrupt": None, "target": "mean_color", "schedule": "cosine"}


@pytest.mark.parametrize(
    ("recipe", "published"),
    [
        ("paper-pretrain", PAPER_PRETRAIN | IMAGENET_21K),
        ("paper-pretrain-jft", PAPER_PRETRAIN | JFT),
        ("paper-pretrain-imagenet", PAPER_PRETRAIN | IMAGENET),
        ("paper-finetune", PAPER_FINETUNE),
        ("deit", DEIT),
        ("deit3", DEIT3),
        ("plain", PLAIN),
        ("masked", MASKED),
    ],
)
def test_a_published_recipe_has_the_published_numbers(recipe: str, published: dict[str, Any]) -> None:
    assert {name: RECIPES[recipe].option(name) for name in published} == published
    assert MOMENTUM == 0.9


def test_deit3_builds_the_model_of_its_published_weights() -> None:
    """timm's deit3_small_patch16_224: a scale per channel, and positions of the patches alone."""
    model = named_config("vit_s16", **RECIPES["deit3"].architecture.model_options)
    assert isinstance(model, ViTConfig)
    assert model.block.layer_scale == 1e-4
    assert not model.embedding.position_prefix
