"""A stem "tokenizer" whose first convolution whitens the training images, with BatchNorm in the others.

Its filters are the principal directions of small patches, each scaled to a variance of 1, and their
negatives; they are not trained (Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU").
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet
from vitascope.model.patches import ConvTokenizer
from vitascope.model.tokenizer_norms import add_norms
from vitascope.model.vit import VisionTransformer
from vitascope.training import distributed
from vitascope.weights.preprocess import preprocess_of

SIDE = 2
"""Side of a patch that is whitened, pixels."""
IMAGES = 500
"""Training images at most that patches are taken of."""
EPS = 5e-4
"""Added to a variance, so that noise is not enlarged."""


def whiten(model: VisionTransformer, images: ImageSet) -> None:
    """Set and freeze the first filters of a tokenizer, and give its other layers norms."""
    tokenizer = model.patch_embedding
    assert isinstance(tokenizer, ConvTokenizer)
    filters = distributed.by_first(lambda: whitening_filters(some_images(model, images)))
    weight = tokenizer.get_parameter("0.conv.weight").requires_grad_(False)
    with torch.no_grad():
        weight[: len(filters)] = 0
        weight[: len(filters), :, :SIDE, :SIDE] = filters
    add_norms(tokenizer)


def some_images(model: VisionTransformer, images: ImageSet) -> Tensor:
    """Some training images as the model gets them, (B, C, H, W)."""
    preprocess = preprocess_of(model)
    some = images.subset(images.name, np.array(images.spread(IMAGES)))
    loader = Loader(some, preprocess, IMAGES, workers=0)
    return preprocess.normalize(next(loader.epoch()).pixels)


def whitening_filters(images: Tensor) -> Tensor:
    """The filters (8 C, C, 2, 2) of images (B, C, H, W), the largest variance first, then the negatives."""
    patches = images.unfold(2, SIDE, 1).unfold(3, SIDE, 1)  # (B, C, H - 1, W - 1, 2, 2)
    rows = patches.permute(0, 2, 3, 1, 4, 5).flatten(0, 2).flatten(1).double()
    variances, directions = torch.linalg.eigh(rows.mT @ rows / len(rows))  # ascending
    filters = (directions / (variances + EPS).sqrt()).mT.flip(0)
    filters = filters.view(-1, *patches.shape[1:2], SIDE, SIDE).to(images.dtype)
    return torch.cat([filters, -filters])
