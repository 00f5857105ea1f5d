"""`VisionModel`: a Vision Transformer, the ResNet that it is compared with, or several; evaluation mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import overload

from torch import nn

from vitascope.models.config import ViTConfig
from vitascope.models.ensemble import Ensemble
from vitascope.models.resnet import ResNet
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.sizes import ModelConfig
from vitascope.models.vit import VisionTransformer

VisionModel = VisionTransformer | ResNet | Ensemble


@overload
def build(config: ViTConfig) -> VisionTransformer: ...  # with one member, as every configuration by default
@overload
def build(config: ResNetConfig) -> ResNet: ...
@overload
def build(config: ModelConfig) -> VisionModel: ...
def build(config: ModelConfig) -> VisionModel:
    """Create the model of a configuration, with random weights; an `Ensemble` if it has several members."""
    if config.members > 1:
        return Ensemble(config, [build(config.replace(members=1)) for _ in range(config.members)])
    return ResNet(config) if isinstance(config, ResNetConfig) else VisionTransformer(config)


def kind_of(config: ModelConfig) -> str:
    """The kind of a configuration's model, in words, for messages."""
    if config.members > 1:
        return f"an ensemble of {config.members} models"
    return "a ResNet" if isinstance(config, ResNetConfig) else "a Vision Transformer"


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and afterwards restore the mode of every module."""
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@contextmanager
def left_as_it_was(model: object) -> Iterator[None]:
    """Restore the mode, the device and the dtype of a model of the caller's; others are left alone."""
    if not isinstance(model, nn.Module):
        yield
        return
    weights = next(model.parameters())
    device, dtype = weights.device, weights.dtype
    with evaluation_mode(model):
        try:
            yield
        finally:
            model.to(device, dtype)
