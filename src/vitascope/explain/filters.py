"""What the patch embedding has learned: the principal components of its filters (paper, figure 7, left)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from vitascope.errors import UserError
from vitascope.explain.components import principal_components
from vitascope.model.classifier import Classifier
from vitascope.model.patches import ConvPatches
from vitascope.model.vit import VisionTransformer


@dataclasses.dataclass(frozen=True)
class PatchFilters:
    """Principal components of the filters of a patch embedding, strongest first."""

    components: Tensor
    """float32 (k, C, ph, pw), each of length 1; the entry of largest magnitude is positive."""
    shares: Tensor
    """float32 (k,): the share of the filters' variance that each explains."""


def patch_filters(model: Classifier, count: int = 28) -> PatchFilters:
    """The patterns of pixels that the patch embedding tells apart.

    Its D filters, a pattern of (C, ph, pw) for each channel of a token, as D points: the principal
    components of those (Dosovitskiy et al. 2021, section 4.5 and figure 7, left).

    Args:
        model: a `VisionTransformer` whose stem embeds pixels: "conv", "linear" or "overlap".
        count: components, at least 1; fewer where the filters have fewer.

    Raises:
        UserError: a count below 1; filters that are all the same; a ResNet, or a ResNet stem.
    """
    if count < 1:
        raise UserError(f"count is how many components to show, at least 1, not {count}")
    if not isinstance(model, VisionTransformer):
        raise UserError("a ResNet has no patch embedding: this is for Vision Transformers")
    if not isinstance(model.patch_embedding, ConvPatches):
        raise UserError(
            "this hybrid embeds patches of a ResNet's feature map, so its filters are no patterns of "
            'pixels; the stems "conv", "linear" and "overlap" have such filters'
        )
    weight = model.patch_embedding.weight  # (D, C, ph, pw)
    components, shares = principal_components(weight.flatten(1), count)
    if not len(components):
        raise UserError(
            f"the {len(weight)} filters of this patch embedding are all the same: nothing to show"
        )
    return PatchFilters(components.float().reshape(-1, *weight.shape[1:]), shares.float())
