"""Features: what is read of a model's body, the pooled representation or the pooled tokens of a layer."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from vitascope.errors import UserError, check_choice
from vitascope.models.attention import EVERY_TOKEN
from vitascope.models.config import ViTConfig, check_layer
from vitascope.models.sizes import ModelConfig
from vitascope.models.trace import Trace
from vitascope.models.vision_model import VisionModel, kind_of
from vitascope.models.vit import VisionTransformer

FeaturePool: TypeAlias = Literal["cls", "mean", "cls_mean"]
POOLS = ("cls", "mean", "cls_mean")


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """A representation of an image.

    Without layer and pool it is `model.embed`: the last layer under the model's own pooling, (B, D), or
    (B, 2D) where that joins two tokens. Otherwise it is read from the tokens after a block, under the model's
    final norm, which stands before or after the pooling as in the model.
    """

    layer: int | None = None
    """In 0 to depth - 1; negative counts from the last. None with a pool: the last."""
    pool: FeaturePool | None = None
    """`cls`: the class token, (B, D); `mean`: the mean of the patches, (B, D); `cls_mean`: both, (B, 2D).
    None with a layer: the model's own where it is one of these, else `mean`."""

    @property
    def is_own(self) -> bool:
        """Whether this is `model.embed`."""
        return self == FeatureSpec()

    def resolved(self, config: ModelConfig) -> "FeatureSpec":
        """The same representation for one model: a layer from 0 and a pool, or neither.

        Raises:
            UserError: no such layer or pool, no class token, a layer or pool of a ResNet.
        """
        if self.is_own:
            return self
        if not isinstance(config, ViTConfig) or config.members > 1:
            raise UserError(
                f"{kind_of(config)} has no layers of tokens: leave out layer and pool, for its features"
            )
        own = config.readout.pool
        pool = self.pool or cast("FeaturePool", own if own in POOLS else "mean")
        check_choice("pool", pool, POOLS)
        if pool != "mean" and not config.readout.has_class_token:
            raise UserError(f"this model has no class token for the pool {pool!r}: its patches have 'mean'")
        return FeatureSpec(check_layer(config, -1 if self.layer is None else self.layer), pool)

    def __str__(self) -> str:
        return "the model's own pooling" if self.is_own else f"layer {self.layer}, pool {self.pool}"


OWN = FeatureSpec()
"""`model.embed`."""


def features_of(model: VisionModel, images: Tensor, specs: Sequence[FeatureSpec]) -> list[Tensor]:
    """The representations `specs` of normalized images (B, C, H, W), from one forward pass: (B, D) each.

    Blocks after the last layer that is asked for are not run. Beside the tokens of the last layer,
    `model.embed` is the same up to rounding, and otherwise bitwise.
    """
    specs = [spec.resolved(model.config) for spec in specs]
    if all(spec.is_own for spec in specs):
        return [model.embed(images)] * len(specs)
    assert isinstance(model, VisionTransformer)
    layers = sorted({spec.layer for spec in specs if spec.layer is not None})
    if any(spec.is_own for spec in specs):
        last = model.config.depth - 1
        trace = Trace(names=[f"block{layer}" for layer in layers])
        queries = EVERY_TOKEN if last in layers else model.pool.queries
        own = model.pool_features(model.forward_features(images, trace, queries))
        tokens = {layer: model.norm(trace[f"block{layer}"]) for layer in layers}
    else:
        tokens = dict(zip(layers, model.forward_intermediates(images, layers), strict=True))
    return [
        own if spec.layer is None else _pooled(model, tokens[spec.layer], spec.pool or "mean")
        for spec in specs
    ]


def _pooled(model: VisionTransformer, tokens: Tensor, pool: FeaturePool) -> Tensor:
    """Tokens (B, T, D) under the final norm to (B, D), or (B, 2D) for `cls_mean`."""
    mean = tokens[:, model.config.num_prefix_tokens :].mean(dim=1)
    parts = {"cls": [tokens[:, 0]], "mean": [mean], "cls_mean": [tokens[:, 0], mean]}[pool]
    return torch.cat([model.pool_norm(part) for part in parts], dim=1)
