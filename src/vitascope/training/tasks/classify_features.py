"""Classification by features that are computed already: the head is all that is computed in a step."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from vitascope.training.tasks.classify import Classify, ModuleEngine
from vitascope.training.tasks.task import Examples


class HeadAlone(nn.Module):
    """The head of a model: features (B, D), those of `model.embed`, to logits (B, K).

    It has all parts of the model, under the same names: checkpoints, the moving average and saved models are
    those of a run that computes the body too.
    """

    head: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, part in model.named_children():
            self.add_module(name, part)
        assert self.state_dict().keys() == model.state_dict().keys()

    def forward(self, features: Tensor) -> Tensor:
        """The logits of features."""
        return self.head(features)


class FeatureEngine(ModuleEngine):
    """A module in training that takes features."""

    def inputs(self, pixels: Tensor) -> Tensor:
        """The features themselves, (B, D), which a loader has in place of pixels."""
        return pixels


@dataclasses.dataclass(frozen=True)
class ClassifyFeatures(Classify):
    """As `Classify`, of features in place of images; the finished model is tested on images."""

    engine: ClassVar[type[ModuleEngine]] = FeatureEngine

    def module(self, model: nn.Module) -> nn.Module:
        """The head of the model."""
        return HeadAlone(model)

    def inputs(self, examples: Examples) -> Tensor:
        """The features, (B, D)."""
        return examples.images
