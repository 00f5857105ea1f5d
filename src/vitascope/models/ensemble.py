"""`Ensemble`: several models of one architecture, whose probabilities are averaged."""

import math
from collections.abc import Sequence
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.resnet import ResNet
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.trace import Trace, check_no_attention, keep
from vitascope.models.trust import Trust
from vitascope.models.vit import VisionTransformer


class Ensemble(nn.Module):
    """The mean of the members' probabilities (Lakshminarayanan et al. 2017, section 2.4), as logits: images
    (B, C, H, W) -> (B, K).

    The features are those of the M members, side by side: (B, M D).
    """

    preprocess: Any = None
    """The `vitascope.Preprocess` that all members were trained with."""
    trust: Trust | None = None
    """What it knows about its answers; None if it was not calibrated."""
    members: Sequence[VisionTransformer | ResNet]
    sharpness: Tensor
    """By which the logits of the mean are multiplied, (K,): 1 unless it is calibrated."""

    def __init__(
        self, config: ViTConfig | ResNetConfig, members: Sequence[VisionTransformer | ResNet]
    ) -> None:
        super().__init__()
        if not config.gives_classes:
            raise UserError("an ensemble averages the probabilities of classes, and this model has none")
        self.config = config
        self.members = cast("Any", nn.ModuleList(members))
        self.register_buffer("sharpness", torch.ones(config.num_classes))

    @classmethod
    def of(cls, models: Sequence[VisionTransformer | ResNet]) -> Self:
        """The ensemble of trained models, which keep what they are.

        Raises:
            UserError: models of different architectures or classes, or that see pictures differently.
        """
        first = models[0]
        config = first.config.replace(thresholds=())
        for model in models:
            if model.config.replace(thresholds=()) != config or model.preprocess != first.preprocess:
                raise UserError(
                    "the models of an ensemble have one architecture, the same classes and the same "
                    "preprocessing, and these differ"
                )
        result = cls(config.replace(members=len(models)), models)
        result.preprocess = first.preprocess
        return result

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K) of images (B, C, H, W), normalized floats."""
        return self.head(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        """The members' pooled representations side by side: (B, C, H, W) -> (B, M D)."""
        return torch.cat([member.embed(images) for member in self.members], dim=1)

    def head(self, features: Tensor) -> Tensor:
        """The logits of the mean probability: (B, M D) -> (B, K), in float32."""
        parts = features.chunk(len(self.members), dim=1)
        logits = torch.stack(
            [member.head(part).float() for member, part in zip(self.members, parts, strict=True)]
        )  # (M, B, K)
        if self.config.outputs == "exclusive":
            return self.sharpness * _log_mean(logits.log_softmax(dim=2))
        return self.sharpness * (_log_mean(F.logsigmoid(logits)) - _log_mean(F.logsigmoid(-logits)))

    def trace(self, images: Tensor, attention: bool = False) -> Trace:
        """The features of all members, `pooled` (B, M D), and the `logits` (B, K); `attention`, which members
        have, is a UserError."""
        check_no_attention(self, attention)
        trace, pooled = Trace(), self.embed(images)
        keep(trace, pooled=pooled, logits=self.head(pooled))
        return trace


def _log_mean(logs: Tensor) -> Tensor:
    """The logarithm of the mean of what these are the logarithms of: (M, B, K) -> (B, K)."""
    return logs.logsumexp(dim=0) - math.log(len(logs))
