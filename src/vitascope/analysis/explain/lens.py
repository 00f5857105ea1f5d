"""The logit lens: the class that the model's own last steps read from the tokens of every layer."""

import dataclasses

import torch
from torch import Tensor

from vitascope.analysis.explain.attention import attending
from vitascope.analysis.explain.heatmaps import not_finite
from vitascope.analysis.explain.inputs import Images, as_images, call_hook
from vitascope.analysis.explain.targets import TargetLike, as_classes
from vitascope.arguments import checked
from vitascope.models.trace import Trace
from vitascope.models.vision_model import VisionModel, evaluation_mode
from vitascope.models.vit import VisionTransformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lens:
    """The classes after 0 to L layers; the first entry is of z_0, before any layer."""

    logits: Tensor
    """float32 (L + 1, B, K): of the image; the last are the model's own."""
    patches: Tensor
    """float32 (L + 1, B, grid_h, grid_w, K): of each patch alone; with a target its class only, K = 1."""


@torch.no_grad()
@checked
def lens(model: VisionModel, images: Images, target: TargetLike = None) -> Lens:
    """Read the classes from every layer's tokens by the final norm, the pooling and the head.

    nostalgebraist 2020, "interpreting GPT: the logit lens"; Vilas et al. 2023, "Analyzing Vision Transformers
    for Image Classification in Class Embedding Space". A patch is read as a sequence of nothing
    but this patch, so that it stands for every token that the pooling reads: the class token, both tokens of
    a distilled model, or the mean. With mean pooling and a linear head, the last map is the class activation
    map of Zhou et al. 2016.

    Args:
        target: the class of `patches`, by number or name, or one per image; None is all K classes.

    Raises:
        UserError: a ResNet, an ensemble, a model without classes, an unknown class.
    """
    model, images = attending(model), as_images(model, images)
    score = as_classes(0 if target is None else target, model.config, images)
    classes = None if target is None else score.classes
    names = ["embeddings", *(f"block{index}" for index in range(model.config.depth))]
    trace = Trace(names=names)
    call_hook()
    with evaluation_mode(model):
        model.forward_features(images, trace)
        states = [model.norm(trace[name]) for name in names]
        logits = torch.stack([model.forward_head(tokens).float() for tokens in states])  # (L + 1, B, K)
        patches = torch.stack([read_patches(model, tokens, classes) for tokens in states])
    if not (logits.isfinite().all() and patches.isfinite().all()):
        raise not_finite("the lens reads numbers that are not finite")
    return Lens(logits=logits, patches=patches.unflatten(2, model.grid_of(images)))


def read_patches(model: VisionTransformer, tokens: Tensor, classes: Tensor | None = None) -> Tensor:
    """The logits of every patch of normalized tokens (B, T, D): (B, N, K), or (B, N, 1) of classes (B,)."""
    P = model.config.num_prefix_tokens
    patches = tokens[:, P:]  # (B, N, D)
    alone = patches.flatten(0, 1)[:, None].expand(-1, P + 1, -1)  # (B N, P + 1, D)
    logits = model.forward_head(alone).float().unflatten(0, patches.shape[:2])  # (B, N, K)
    if classes is None:
        return logits
    return logits.gather(2, classes.to(logits.device).view(-1, 1, 1).expand(*patches.shape[:2], 1))
