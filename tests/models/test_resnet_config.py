import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.models import count_parameters, law, law_of_models, on_meta
from vitascope.errors import UserError
from vitascope.models.resnet_config import ResNetConfig


@st.composite
def resnet_configs(draw: st.DrawFn) -> ResNetConfig:
    """Small configurations of up to four stages, each of up to two units."""
    side, num_classes = st.integers(1, 70), draw(st.integers(1, 7))
    names = tuple(f"class {number}" for number in range(num_classes))
    return ResNetConfig(
        image_size=(draw(side), draw(side)),
        in_channels=draw(st.integers(1, 4)),
        num_classes=num_classes,
        class_names=draw(st.sampled_from([(), names])),
        layers=tuple(draw(st.lists(st.integers(1, 2), max_size=4))),
        width=draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64])),
        root=draw(st.sampled_from(["imagenet", "cifar"])),
    )


@law_of_models
@given(resnet_configs())
def test_cost_and_shapes_are_those_of_the_built_model(config: ResNetConfig) -> None:
    model = on_meta(config)
    assert config.num_parameters == count_parameters(model)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, config.in_channels, *config.image_hw, device="meta"))
    assert config.flops == counter.get_total_flops()
    maps = model.features(torch.empty(2, config.in_channels, *config.image_hw, device="meta"))
    assert maps.shape == (2, config.embed_dim, *config.grid)
    assert config.num_tokens == maps[0, 0].numel()


@law
@given(resnet_configs())
def test_json_restores_the_configuration(config: ResNetConfig) -> None:
    values = json.loads(json.dumps(config.to_dict()))
    assert ResNetConfig.from_dict(values) == config
    assert set(values) == set(ResNetConfig.groups())
    assert all(config.option(name) == getattr(config, name) for name in ResNetConfig.groups())


def test_replace_changes_only_the_named_options() -> None:
    config = ResNetConfig(class_names=("a", "b"), num_classes=2)
    changed = config.replace(image_size=32, root="cifar")
    assert (changed.image_hw, changed.root) == ((32, 32), "cifar")
    assert changed.replace(image_size=224, root="imagenet") == config


def test_the_summary_has_units_width_and_pixels() -> None:
    expected = "ResNet of 3, 4, 6, 3 units, width 64, 224x224 pixels"
    assert ResNetConfig().summary == expected
    assert ResNetConfig(image_size=(32, 48)).summary.endswith("32x48 pixels")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": (1,)}, "unknown option of a ResNet 'layer'; nearest: layers"),
        *(({"image_size": value}, "image_size must be") for value in (0, (32, 32, 3))),
        *(({"num_classes": value}, "num_classes must be") for value in (0, True)),
        ({"num_classes": 3, "class_names": ("a", "b")}, "2 class_names for num_classes 3"),
        ({"class_names": "abc"}, "class_names must be a list of names, not 'abc'"),
        ({"layers": 3}, "layers must be a list of whole numbers, not 3"),
        ({"layers": (1, 0)}, r"layers must be at least 1, not \(1, 0\)"),
        ({"layers": [1] * 1_000}, "at most 8 stages, not 1000"),
        ({"width": 48}, "48 channels are not 32 equal groups"),
        ({"width": 8.0}, "width must be a whole number, not 8.0"),
        ({"root": "cifar10"}, "unknown root 'cifar10'; nearest: cifar"),
        ({"in_channels": 0}, "in_channels must be at least 1, not 0"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ResNetConfig.from_dict(options)
