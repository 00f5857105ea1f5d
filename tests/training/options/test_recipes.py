import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest
import yaml

from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.sizes import named_config
from vitascope.training.optimizers import SGD_MOMENTUM
from vitascope.training.options.groups import Architecture, Balance, Optimization
from vitascope.training.options.recipes import FEW_TO_START, FEW_TO_TUNE, GROUP_OF, RECIPES, TrainConfig
from vitascope.training.plan import Request, Start


def test_every_recipe_is_a_valid_configuration_and_differs_from_the_others() -> None:
    configs = [TrainConfig.from_recipe(name) for name in RECIPES]
    assert all(one != other for one, other in itertools.combinations(configs, 2))


def test_a_whole_group_replaces_that_of_the_recipe() -> None:
    groups = Architecture(depth=1), Optimization(lr=0.5), Balance(class_weights=("a=2",))
    for recipe, group in itertools.product(("small-data", "deit3", "lora"), groups):
        named = {type(group).__name__.lower(): group}
        assert TrainConfig.from_recipe(recipe, **named) == RECIPES[recipe].replace(**named)
        request = Request.of(None, recipe, named)
        assert TrainConfig(**Start.usual(request, 24, 3).over(request)) == RECIPES[recipe].replace(**named)


def start(images: int = 24, channels: int = 3, **options: object) -> TrainConfig:
    request = Request.of(None, None, {"data": "photos/", **options})
    return TrainConfig(**Start.usual(request, images, channels).over(request))


def expected(recipe: str, **options: object) -> TrainConfig:
    return RECIPES[recipe].replace(**{"data": "photos/", **options})


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({"data": "digits"}, "digits"),
        ({"weights": "runs/x"}, "finetune"),
        ({"weights": "runs/x", "lora": 4}, "lora"),
        ({"weights": "runs/x", "freeze": True}, "finetune"),
        ({"weights": "none"}, "small-data"),
        ({"model": "vit_s16"}, "small-data"),
        ({"model": "resnet29_w16_cifar"}, "cnn"),
        ({"depth": 2}, "small-data"),
        ({"model_options": {"init": "mimetic", "positions": "rotary"}}, "small-data"),
        ({"teacher": "runs/x"}, "distill"),
        ({"task": "masked"}, "masked"),
        ({"data": "digits", "task": "masked"}, "masked"),
        ({"task": "masked", "target": "pixels"}, "masked"),
        ({"task": "masked", "target": "mae"}, "mae"),
    ],
)
def test_named_weights_models_and_tasks_decide_the_recipe(options: dict[str, object], recipe: str) -> None:
    assert start(**options) == expected(recipe, **options)
    assert TrainConfig.from_recipe(**{"data": "photos/", **options}) == expected(recipe, **options)


def test_few_images_choose_the_epoch_by_one_rule() -> None:
    assert [start(images).optimization.keep for images in (24, FEW_TO_TUNE + 1)] == ["best", "best"]


def test_few_colour_images_start_from_the_built_in_model() -> None:
    for images in (24, FEW_TO_TUNE):
        assert start(images) == expected("finetune", weights="cifar10")
    other = {"image_size": 64, "lr": 1e-4}
    assert start(**other) == expected("finetune", weights="cifar10", **other)
    for images in (FEW_TO_TUNE + 1, FEW_TO_START):
        assert start(images) == expected("small-finetune", weights="cifar10")
    assert start(FEW_TO_START + 1) == start(channels=1) == expected("small-data")


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


def test_muon_is_rejected_with_shards_by_both_names() -> None:
    with pytest.raises(UserError, match=r"parallel=fsdp .* optimizer=muon .*: choose parallel=ddp, or"):
        TrainConfig.from_recipe("small-data", parallel="fsdp")
    assert TrainConfig.from_recipe("small-data", parallel="fsdp", optimizer="adamw")


def test_two_rules_for_the_images_of_an_epoch_are_rejected() -> None:
    for name, value in (("streams", 2), ("sampling", "balanced")):
        with pytest.raises(UserError, match=f"^repeats=3 and {name}={value} decide which images"):
            TrainConfig(repeats=3, **{name: value})


def test_every_option_has_a_unique_name_and_one_group() -> None:
    config = TrainConfig()
    groups = [getattr(config, group) for group in set(GROUP_OF.values()) - {None}]
    names = [field.name for part in (config, *groups) for field in dataclasses.fields(part)]
    assert sorted(names) == sorted([*GROUP_OF, *set(GROUP_OF.values()) - {None}])
    assert len(set(GROUP_OF)) == len(GROUP_OF)


def test_unknown_names_are_rejected_with_the_nearest() -> None:
    with pytest.raises(UserError, match="nearest: small-data"):
        TrainConfig.from_recipe("smal-data")
    with pytest.raises(UserError, match="unknown training option 'weight_decy'; nearest: weight_decay"):
        TrainConfig.from_dict({"weight_decy": 1.0})


OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    **{"epochs": (0,), "batch_size": (0,), "lr": (-1.0, 0.0, 1e9, float("nan")), "rotate": (-10.0,)},
    **{"weight_decay": (1000.0, -0.1), "label_smoothing": (1.0,), "layer_decay": (0.0,), "erase": (1.5,)},
    **{"magnitude": (11.0,), "accumulate": (0,), "temperature": (0.0,), "distill_weight": (2.0,)},
    **{"corrupt": (1.0,), "decoder_dim": (0, 100), "decoder_depth": (0,), "keep_checkpoints": (0,)},
    **{"ema": (1.0,), "crop_scale": (0.0,), "flip": (1.5,), "keep": ("worst",), "precision": ("fp8",)},
    **{"workers": (-1,), "patience": (-1,), "class_weights": ("inverse",), "sampling": ("sqrt",)},
    **{"seed": (-1, 2**63), "image_size": (0, 3_000_000_000, (16, 0), (16, 3_000_000_000))},
    **{"levels": ((5, 5), (9, 5), (0, float("inf")), (1,), 4095, ("a", "b"))},
}


def test_out_of_range_numbers_are_rejected_by_name() -> None:
    for option, values in OUT_OF_RANGE.items():
        for value in values:
            with pytest.raises(UserError, match=option):
                TrainConfig.from_dict({option: value})


def test_file_that_is_no_configuration_is_rejected_in_one_line(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    for text, message in {
        "epochs: three": ": epochs must be a whole number or null, not 'three'",
        "depth: 2.5": ": depth must be a whole number or null, not 2.5",
        "lr: '1e-3'": ": lr must be a number, not '1e-3'",
        "model_options: 3": ": model_options must be values by name, not 3",
        "model_options: [3]": ": model_options must be values by name, not [3]",
        "a: [1\nb: 2\n": ": not readable as YAML: ",
        "epochs: 3\noptimizer: lion\n": ": unknown optimizer 'lion'",
        "epocs: 4": ": unknown training option 'epocs'; nearest: epochs; a newer version of vitascope than",
        "[1, 2]": " must be values by name, not [1, 2]",
    }.items():
        path.write_text(text)
        with pytest.raises(UserError, match=f"^{re.escape(f'{path}{message}')}") as rejected:
            TrainConfig.from_yaml(path)
        assert "\n" not in str(rejected.value)


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


def test_malformed_model_options_are_rejected() -> None:
    for texts, reason in (
        (["positions"], "NAME=VALUE"),
        (["position=rotary"], "nearest: positions"),
        (["positions=rotary", "positions=none"], "positions is given twice"),
        (["depth=1"], "leave it out"),
        (["num_classes=1"], "leave it out"),
        (["head=none"], "a classifier needs a head"),
    ):
        with pytest.raises(UserError, match=reason):
            TrainConfig(model_options=texts)


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
    path.write_text(config.to_yaml() + "shard_size: null\n", encoding="utf-8")  # as version 0.2.0 wrote it
    assert TrainConfig.from_yaml(path) == config
    path.write_text("shard_size: 4\n")
    with pytest.raises(UserError, match="unknown training option 'shard_size'"):
        TrainConfig.from_yaml(path)


def test_edited_lengths_are_checked_like_every_option(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    for lengths in ("[[0]]", "[[0, x]]", "5"):
        path.write_text(f"lengths: {lengths}\n")
        with pytest.raises(UserError, match=rf"{path}: lengths must be .*pairs of .*, not "):
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


PAPERS = """
# Dosovitskiy et al. 2021, appendix B.1 and table 3; the crop is that of vit_jax/input_pipeline.py.
paper-pretrain: &paper
  {model: vit_b16, optimizer: adamw, batch_size: 4096, warmup_steps: 10_000, model_options: {head: mlp},
  label_smoothing: 0.0, crop_scale: 0.05, color_jitter: 0.0, ema: 0.0, epochs: 90, lr: 0.001,
  schedule: linear, weight_decay: 0.03, dropout: 0.1, clip_grad: 0.0}
paper-pretrain-jft: {<<: *paper, epochs: 7, lr: 0.0008, weight_decay: 0.1, dropout: 0.0}
paper-pretrain-imagenet:
  {<<: *paper, epochs: 300, lr: 0.003, schedule: cosine, weight_decay: 0.3, clip_grad: 1.0}
paper-finetune:
  {optimizer: sgd, batch_size: 512, schedule: cosine, weight_decay: 0.0, clip_grad: 1.0, ema: 0.9999,
  model_options: {head_init: zero}, label_smoothing: 0.0, keep: last}
# Touvron et al. 2021, table 9
deit:
  {model: vit_s16, optimizer: adamw, lr: 0.0005, lr_batch: 512, batch_size: 1024, weight_decay: 0.05,
  epochs: 300, warmup_epochs: 5.0, warmup_steps: null, schedule: cosine, mixup: 0.8, cutmix: 1.0,
  label_smoothing: 0.1, drop_path: 0.1, dropout: 0.0, erase: 0.25, randaugment: 2, magnitude: 9.0,
  operation_probability: 0.5, repeats: 3, loss: cross_entropy, ema: 0.99996, clip_grad: 0.0}
# Touvron et al. 2022, the authors' command for ViT-S, but for the optimizer and its rate (LAMB, 4e-3)
deit3:
  {model: vit_s16, batch_size: 2048, weight_decay: 0.05, epochs: 800, warmup_epochs: 5.0, schedule: cosine,
  loss: bce, mixup: 0.8, cutmix: 1.0, label_smoothing: 0.0, drop_path: 0.05, dropout: 0.0, erase: 0.0,
  randaugment: 0, three_augment: true, color_jitter: 0.3, crop_scale: 0.08, repeats: 3, ema: 0.0}
# Beyer et al. 2022; torch multiplies the decay of 1e-4 by the rate of 1e-3.
plain:
  {model: vit_s16, optimizer: adamw, batch_size: 1024, lr: 0.001, weight_decay: 0.1, warmup_steps: 10_000,
  schedule: cosine, randaugment: 2, magnitude: 10.0, operation_probability: 1.0, mixup: 0.2, cutmix: 0.0,
  clip_grad: 1.0, model_options: {positions: sincos_2d_big_vision}, pool: mean, label_smoothing: 0.0,
  epochs: 90}
# Dosovitskiy et al. 2021, appendix B.1.2; the rest is for a user's own photos.
masked: {task: masked, corrupt: null, target: mean_color, schedule: cosine}
"""


@pytest.mark.parametrize(("recipe", "published"), yaml.safe_load(PAPERS).items())
def test_a_published_recipe_has_the_published_numbers(recipe: str, published: dict[str, Any]) -> None:
    assert {name: RECIPES[recipe].option(name) for name in published} == published
    assert SGD_MOMENTUM == 0.9


def test_deit3_builds_the_model_of_its_published_weights() -> None:
    """timm's deit3_small_patch16_224: a scale per channel, and positions of the patches alone."""
    model = named_config("vit_s16", **RECIPES["deit3"].architecture.model_options)
    assert isinstance(model, ViTConfig)
    assert model.block.layer_scale == 1e-4
    assert not model.embedding.position_prefix
