"""A stem "tokenizer" in training: its first convolution whitens the images, the others have BatchNorm.

The saved model computes the same without BatchNorm (Ioffe and Szegedy 2015): the norms are folded into the
convolutions. The whitening filters are the principal directions of small patches, each scaled to a variance
of 1, and their negatives; they are not trained (Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single
GPU").
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet
from vitascope.models.patches import ConvTokenizer, TokenizerLayer
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.training import distributed

MOMENTUM = 0.05
EPS = 1e-5
_BIAS, _MEAN, _VAR = ".norm.bias", ".norm.running_mean", ".norm.running_var"


class TokenizerNorm(nn.Module):
    """BatchNorm without a scale: (B, C, H, W) -> (B, C, H, W)."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def reset(self) -> None:
        """Forget the statistics."""
        self.running_mean.zero_()
        self.running_var.fill_(1)

    def forward(self, maps: Tensor) -> Tensor:
        """As the class."""
        # A sharded bias may be bf16, which the kernels do not take beside float32 statistics.
        bias = self.bias.float()
        scale = torch.ones_like(bias)
        running = self.running_mean, self.running_var
        return F.batch_norm(maps, *running, scale, bias, self.training, MOMENTUM, EPS)


def add_norms(tokenizer: ConvTokenizer) -> None:
    """Give every layer but the first a norm, whose bias takes the place of the convolution's."""
    for layer in list(tokenizer.children())[1:]:
        assert isinstance(layer, TokenizerLayer)
        assert layer.conv.bias is not None
        layer.norm = TokenizerNorm(layer.conv.out_channels)
        layer.conv.bias.requires_grad_(False).zero_()


@torch.no_grad()
def without_norms(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of the plain model that computes the same: the norms are folded into the convolutions.

    Max pooling, which comes between, keeps the order of numbers, and so does a norm.
    """
    plain = dict(state)
    for name in state:
        if name.endswith(_MEAN):
            layer = name.removesuffix(_MEAN)
            mean, var, bias = (plain.pop(layer + part) for part in (_MEAN, _VAR, _BIAS))
            scale = (var + EPS).rsqrt()
            plain[f"{layer}.conv.weight"] = plain[f"{layer}.conv.weight"] * scale[:, None, None, None]
            plain[f"{layer}.conv.bias"] = bias - mean * scale
    return plain


SIDE = 2
"""Side of a patch that is whitened, pixels."""
IMAGES = 500
"""Training images at most that patches are taken of."""
LEAST_VARIANCE = 5e-4
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
    filters = (directions / (variances + LEAST_VARIANCE).sqrt()).mT.flip(0)
    filters = filters.view(-1, *patches.shape[1:2], SIDE, SIDE).to(images.dtype)
    return torch.cat([filters, -filters])
