"""The preprocessing of a model: the one that it carries, or the default."""

from __future__ import annotations

from typing import cast

from vitascope.data.preprocess import Preprocess
from vitascope.model.classifier import Classifier
from vitascope.model.sizes import ModelConfig


def preprocess_of(model: Classifier) -> Preprocess:
    """The preprocessing that a model carries; for a bare `VisionTransformer(config)`, the default."""
    if model.preprocess is None:
        return default_preprocess(model.config)
    return cast("Preprocess", model.preprocess)


def default_preprocess(config: ModelConfig) -> Preprocess:
    """Centre crop at the model's size and pixels in [-1, 1], as the original ViT code scales them."""
    half = (0.5,) * config.in_channels
    return Preprocess(image_size=config.image_hw, channels=config.in_channels, mean=half, std=half)
