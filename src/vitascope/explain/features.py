"""What the patches' features have in common, as colours."""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.explain.attention import attending, check_layer
from vitascope.explain.components import principal_components
from vitascope.model.classifier import Classifier
from vitascope.model.modes import evaluation_mode
from vitascope.model.vit import VisionTransformer

_REACH = 2.0
"""Standard deviations of a component from the middle of the scale to either end."""


@torch.no_grad()
def feature_colours(model: Classifier, images: Tensor, layer: int = -1) -> Tensor:
    """The first three principal components of the patches' features, as red, green and blue.

    Patches of one colour have like features (the picture that DINOv2 made popular: Oquab et al. 2024,
    figure 1; no patch is taken for background here). Components are of all patches of all images together,
    so a colour means the same in each image of the batch, and nothing across batches. The mean of all
    patches is 0.5; two standard deviations of a component below and above it are 0 and 1, as a few patches
    far out would otherwise leave one colour to all the others. A component's sign is fixed by the rule of
    `principal_components`.

    Args:
        model: any `VisionTransformer`; it is run as in evaluation.
        images: normalized floats (B, C, H, W), B at least 1.
        layer: the features are what this block gives, of `depth`, from 0, under the model's final norm;
            negative counts from the last, so that -1 is what `forward_features` gives.

    Returns:
        float32 (B, grid_h, grid_w, 3) in [0, 1]; a component that does not exist, because the features
        differ in fewer than three directions, is 0.5.

    Raises:
        UserError: no such layer, naming the range; a ResNet; no images; features that are not finite.
    """
    model = attending(model)
    if not len(images):
        raise UserError("colours are relations between the patches of images: give at least one")
    features = _patch_features(model, images, check_layer(model.config, layer)).flatten(0, 1)  # (B * N, D)
    components, _ = principal_components(features, count=3)  # (k, D)
    features = features.cpu().double()
    scores = (features - features.mean(dim=0)) @ components.T  # (B * N, k)
    colours = torch.full((len(features), 3), 0.5)
    reach = _REACH * scores.square().mean(dim=0).sqrt()  # never 0: what does not vary is no component
    colours[:, : len(components)] = (0.5 + 0.5 * scores / reach).clamp(0, 1).float()
    return colours.reshape(len(images), *model.grid_of(images), 3).to(images.device)


def _patch_features(model: VisionTransformer, images: Tensor, layer: int) -> Tensor:
    """The patches as a block gives them, under the final norm: (B, N, D). Later blocks are not run."""
    with evaluation_mode(model):
        z0, grid = model.embeddings(images), model.grid_of(images)
        tokens = model.norm(model.encode_tokens(z0, grid, blocks=range(layer + 1)))  # (B, T, D)
    return tokens[:, model.config.num_prefix_tokens :]
