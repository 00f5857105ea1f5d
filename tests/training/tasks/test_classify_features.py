"""A head on features: the parts and the outputs of the whole model."""

from typing import Any

import pytest
import torch

from tests.model import small_model
from vitascope.model.resnet import ResNet
from vitascope.model.resnet_config import ResNetConfig
from vitascope.training.tasks.classify_features import HeadAlone

OPTIONS: list[dict[str, Any]] = [
    {},
    {"pool": "mean", "num_registers": 2},
    {"pool": "cls_mean", "head": "mlp"},
    {"pool": "map"},
    {"pool": "mean", "pool_norm": "after"},
    {"pool": "cls", "distillation_token": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_head_alone_has_the_names_and_the_logits_of_the_model(options: dict[str, Any]) -> None:
    model = small_model(**options).eval()
    module, size = HeadAlone(model).eval(), model.config.image_hw
    assert list(module.state_dict()) == list(model.state_dict())
    assert all(mine is theirs for mine, theirs in zip(module.parameters(), model.parameters(), strict=True))
    images = torch.rand(3, model.config.in_channels, *size)
    with torch.no_grad():
        torch.testing.assert_close(module(model.embed(images)), model(images))


def test_head_alone_has_the_names_and_the_logits_of_a_resnet() -> None:
    model = ResNet(ResNetConfig(image_size=16, layers=(1, 1), width=8, num_classes=3)).eval()
    torch.nn.init.normal_(model.head.weight)
    module, images = HeadAlone(model), torch.rand(2, 3, 16, 16)
    assert list(module.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(module(model.embed(images)), model(images))
