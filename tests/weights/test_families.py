"""Every family beside every other: a model goes through any two of them and comes back bitwise the same."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.model import random_images, small_config, small_model
from vitascope.data.preprocess import Preprocess
from vitascope.model.config import ViTConfig
from vitascope.weights.files import CheckpointError
from vitascope.weights.identification import FAMILIES, identify
from vitascope.weights.loading import from_pretrained
from vitascope.weights.mapping import check_holds, to_family
from vitascope.weights.preprocess import default_preprocess

MODELS = {
    "ViT": {"embed_dim": 128, "num_heads": 2},
    "ViT of JAX": {"embed_dim": 128, "num_heads": 2, "mlp": "gelu_tanh"},
    "ViT with pre-logits": {"embed_dim": 128, "num_heads": 2, "head": "mlp"},
    "ViT without a head": {"embed_dim": 128, "num_heads": 2, "head": "none"},
    "DeiT distilled": {"embed_dim": 128, "num_heads": 2, "distillation_token": True},
    "DeiT-III": {"embed_dim": 128, "num_heads": 2, "layer_scale": 1e-5, "position_prefix": False},
    "DINOv2": {"embed_dim": 128, "num_heads": 2, "layer_scale": 1e-5, "head": "none"},
    "DINOv2 with registers": {
        "embed_dim": 128,
        "num_heads": 2,
        "layer_scale": 1e-5,
        "head": "none",
        "num_registers": 4,
        "position_prefix": False,
    },
    "DINOv2 giant": {
        "embed_dim": 128,
        "num_heads": 2,
        "layer_scale": 1e-5,
        "head": "none",
        "mlp": "swiglu",
        "mlp_ratio": 2.5,
    },
    "DINOv3": {
        "embed_dim": 128,
        "num_heads": 2,
        "positions": "rotary",
        "num_registers": 4,
        "norm_eps": 1e-5,
        "qkv_bias": "no_key",
        "layer_scale": 1e-5,
        "head": "none",
    },
    "attention pooling": {"embed_dim": 128, "num_heads": 2, "pool": "map", "mlp": "gelu_tanh"},
    "mean pooling": {"embed_dim": 128, "num_heads": 2, "pool": "mean", "mlp": "gelu_tanh"},
}


def config_of(name: str) -> ViTConfig:
    return small_config(**MODELS[name])


def holders(config: ViTConfig) -> list[str]:
    """The families that can hold a model."""
    found = []
    for name, family in FAMILIES.items():
        try:
            check_holds(family, family.settled(config))
        except CheckpointError:
            continue
        found.append(name)
    return found


PAIRS = [
    (model, first, second)
    for model in MODELS
    for first, second in itertools.permutations(holders(config_of(model)), 2)
]


@pytest.mark.parametrize(("name", "first", "second"), PAIRS)
def test_a_round_trip_through_two_families_is_bitwise(
    tmp_path: Path, name: str, first: str, second: str
) -> None:
    model = small_model(**MODELS[name])
    expected = model.state_dict()
    for family in (first, second):
        to_family(FAMILIES[family], model, default_preprocess(model.config), tmp_path / family)
        model = from_pretrained(tmp_path / family, family=family)
    assert list(model.state_dict()) == list(expected)
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", MODELS)
def test_every_family_that_holds_a_model_gives_its_answers(tmp_path: Path, name: str) -> None:
    config = config_of(name)
    model = small_model(**MODELS[name])
    images = random_images(2, config.in_channels, *config.image_hw)
    expected = model(images)
    families = holders(config)
    assert families[0] == "vitascope"
    assert len(families) > 1
    for family in families:
        to_family(FAMILIES[family], model, default_preprocess(config), tmp_path / family)
        loaded = from_pretrained(tmp_path / family, family=family)
        loaded.config = loaded.config.replace(norm_eps=config.block.norm_eps)
        if FAMILIES[family].settled(config) == config:
            assert torch.equal(loaded(images), expected), family
        else:  # an epsilon that the other library decides
            torch.testing.assert_close(loaded(images), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_tells_its_family(tmp_path: Path, name: str) -> None:
    """Written by one family, and not named: it is found to be that one's, or refused as ambiguous."""
    config = config_of(name)
    preprocess = Preprocess(image_size=config.image_hw)
    for family in holders(config):
        to_family(FAMILIES[family], small_model(**MODELS[name]), preprocess, tmp_path / family)
        try:
            found = identify(tmp_path / family)[1].name
        except CheckpointError as error:
            assert f"deit:{tmp_path / family}" in str(error)  # noqa: PT017 - it may load, too
            continue
        assert found == family
