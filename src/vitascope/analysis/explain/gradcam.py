"""Grad-CAM on tokens and its variants: the patches whose features raise the score."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from vitascope.analysis.explain.attention import attending
from vitascope.analysis.explain.heatmaps import to_unit
from vitascope.analysis.explain.inputs import Images, as_images
from vitascope.analysis.explain.targets import TargetLike, score_gradient
from vitascope.arguments import checked
from vitascope.errors import UserError
from vitascope.models.config import check_layer
from vitascope.models.resnet import ResNet
from vitascope.models.trace import Trace
from vitascope.models.vision_model import VisionModel, evaluation_mode
from vitascope.models.vit import VisionTransformer

Variant = Literal["grad-cam", "layer-cam"]
Layer = int | Literal["last"]


@checked
def grad_cam(
    model: VisionModel,
    images: Images,
    target: TargetLike = None,
    layer: Layer | None = None,
    variant: Variant = "grad-cam",
    *,
    scaled: bool = True,
) -> Tensor:
    """Activations weighted by the gradient of the score (Selvaraju et al. 2017, equations 1 and 2).

    Prefix tokens are dropped. Only the layers above the activations are differentiated.

    Args:
        layer: whose activations a: the input of this block's attention, in 0 to depth - 1, negative counting
            from the last; or "last", where patches are read for the last time: with pool "cls" the input of
            the last block's attention, with other pools the features after the final norm. None is "last" for
            grad-cam and 0 for layer-cam. A ResNet has only "last", its last feature map.
        variant: how gradients g become weights: "grad-cam", their mean over the patches; "layer-cam", g where
            it is positive (Jiang et al. 2021), which is most informative before attention mixes the places.

    Raises:
        UserError: no such layer or variant; a layer of a ResNet.
    """
    images = as_images(model, images)
    # The caller may be in inference mode, which has no gradients.
    with torch.inference_mode(False), torch.enable_grad(), evaluation_mode(model):
        if isinstance(model, ResNet):
            activations, gradients, grid = _of_feature_map(model, images, target, layer)
        else:
            chosen = _DEFAULT_LAYER[variant] if layer is None else layer
            activations, gradients, grid = _of_tokens(attending(model), images, target, chosen)
    heat = _VARIANTS[variant](activations.float(), gradients.float())  # (B, N)
    return to_unit(heat.unflatten(1, grid), scaled)


Sensitivity = tuple[Tensor, Tensor, tuple[int, int]]
"""Activations (B, N, D) at the places of a grid, the score's gradients there, and the grid."""


def _of_tokens(model: VisionTransformer, images: Tensor, target: TargetLike, layer: Layer) -> Sensitivity:
    depth, grid = model.config.depth, model.grid_of(images)
    if layer == "last":
        first = depth - 1 if model.config.readout.pool == "cls" else depth
    else:
        first = check_layer(model.config, layer)
    with torch.no_grad():
        tokens = model.encode(model.prepare_tokens(images), grid, blocks=range(first))  # (B, T, D)
    trace = Trace()
    tokens.requires_grad_()
    features = model.norm(model.encode(tokens, grid, trace, model.pool.queries, blocks=range(first, depth)))
    activations = features if first == depth else trace.attended[0]
    gradients = score_gradient(model, activations, model.pool_features(features), target)
    P = model.config.num_prefix_tokens
    return activations.detach()[:, P:], gradients[:, P:], grid


def _of_feature_map(model: ResNet, images: Tensor, target: TargetLike, layer: Layer | None) -> Sensitivity:
    """The last feature map of a ResNet."""
    if layer not in (None, "last"):
        raise UserError(f"layer {layer}: a ResNet has only its last feature map; leave out layer")
    with torch.no_grad():
        maps = model.trace(images)["features"]  # (B, C, h, w)
    maps.requires_grad_()
    gradients = score_gradient(model, maps, maps.mean(dim=(2, 3)), target)
    activations = maps.detach().flatten(2).mT  # (B, N, C)
    return activations, gradients.flatten(2).mT, (maps.shape[2], maps.shape[3])


_VARIANTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grad-cam": lambda a, g: (a * g.mean(dim=1, keepdim=True)).sum(dim=2),
    "layer-cam": lambda a, g: (a * g.clamp_min(0)).sum(dim=2),
}
"""Activations and gradients (B, N, D) to evidence (B, N)."""
_DEFAULT_LAYER: dict[str, Layer] = {"grad-cam": "last", "layer-cam": 0}
"""The best layers by `benchmarks/faithfulness.py --layers`."""
