"""The ResNet of the hybrid ViTs: their stem, a CNN to compare with, a teacher to distil from.

He et al. 2016, "Deep Residual Learning for Image Recognition", with the two changes of Kolesnikov et al.
2020, "Big Transfer" (BiT), section 3.1: GroupNorm for BatchNorm, and standardized weights (Qiao et al. 2019,
"Weight Standardization"), so that no image depends on its batch. As in vit_jax, and unlike BiT, the relu
comes after the sum. All padding is TensorFlow's "SAME".
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.arguments import checked
from vitascope.models.inputs import check_images
from vitascope.models.resnet_config import ROOTS, ResNetConfig, Unit, norm_groups
from vitascope.models.trace import Trace, check_no_attention, keep
from vitascope.models.trust import Trust


def divide_by_std(weight: Tensor) -> Tensor:
    """(w - mean) / (std + 1e-5) for each filter of (O, I, kh, kw), as in vit_jax."""
    centered = weight - weight.mean((1, 2, 3), keepdim=True)
    # (O, 1, 1, 1); for a constant filter the gradient of this norm is 0, that of a square root infinite
    norm = torch.linalg.vector_norm(centered, dim=(1, 2, 3), keepdim=True)
    return centered * (norm / weight[0].numel() ** 0.5 + 1e-5).reciprocal()


def divide_by_root_of_variance(weight: Tensor) -> Tensor:
    """(w - mean) / sqrt(var + 1e-8) for each filter of (O, I, kh, kw), as in timm's hybrids."""
    return F.layer_norm(weight, weight.shape[1:], eps=1e-8)  # the same equation, in one kernel


class Dialect(NamedTuple):
    """The numerics in which published implementations of this network differ."""

    norm_eps: float
    """Epsilon of every GroupNorm."""
    standardize: Callable[[Tensor], Tensor]
    """Gives each filter of (O, I, kh, kw) mean 0 and (population) variance 1."""


JAX = Dialect(norm_eps=1e-6, standardize=divide_by_std)
"""google-research/vision_transformer, where the weights were trained; flax's GroupNorm has this epsilon."""
# timm's `vision_transformer_hybrid._resnetv2` runs these weights with its own epsilons.
DIALECTS = {"jax": JAX, "timm": Dialect(norm_eps=1e-5, standardize=divide_by_root_of_variance)}


def same_padding(size: int, kernel: int, stride: int) -> int:
    """Pixels to add along a side for ceil(size / stride) outputs."""
    return max(0, (-(-size // stride) - 1) * stride + kernel - size)


def pad_odd_pixel(images: Tensor, kernel: int, stride: int) -> tuple[Tensor, tuple[int, int]]:
    """Pad (B, C, H, W) by the uneven pixel of "SAME"; return it and the even padding, (rows, columns)."""
    rows, columns = (same_padding(size, kernel, stride) for size in images.shape[-2:])
    if rows % 2 or columns % 2:
        images = F.pad(images, (0, columns % 2, 0, rows % 2))
    return images, (rows // 2, columns // 2)


def max_pool(maps: Tensor) -> Tensor:
    """3x3, stride 2, "SAME"; the odd pixel is 0, which after a relu equals minus infinity."""
    maps, padding = pad_odd_pixel(maps, kernel=3, stride=2)
    return F.max_pool2d(maps, 3, stride=2, padding=padding)


class StandardizedConv(nn.Conv2d):
    """A square convolution, "SAME": (B, I, H, W) -> (B, O, H/stride, W/stride), rounded up.

    Its filters are standardized in fp32 at least: the error of a bf16 mean would not average out.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, dialect: Dialect = JAX
    ) -> None:
        super().__init__(in_channels, out_channels, kernel, stride=stride, bias=False)
        self.dialect = dialect

    def reset_parameters(self) -> None:
        """He initialization by fan-in, for the same expected norm, and so the same pace, of every filter."""
        if not self.weight.is_meta:  # there is nothing to fill, and trying takes a second
            nn.init.kaiming_normal_(self.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        weight = self.dialect.standardize(weight).to(self.weight.dtype)
        images, padding = pad_odd_pixel(images, self.kernel_size[0], self.stride[0])
        return F.conv2d(images, weight, stride=self.stride, padding=padding)


class GroupNorm(nn.GroupNorm):
    """The norm of (B, channels, H, W), which also accepts one image of 1x1, unlike `F.group_norm`."""

    def __init__(self, channels: int, dialect: Dialect) -> None:
        super().__init__(norm_groups(channels), channels, eps=dialect.norm_eps)

    def forward(self, maps: Tensor) -> Tensor:
        return torch.group_norm(maps, self.num_groups, self.weight, self.bias, self.eps)


class ConvNorm(nn.Module):
    """Convolution and GroupNorm: (B, I, H, W) -> (B, O, H/stride, W/stride)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, dialect: Dialect
    ) -> None:
        super().__init__()
        self.conv = StandardizedConv(in_channels, out_channels, kernel, stride, dialect)
        self.norm = GroupNorm(out_channels, dialect)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.conv(images))


class Bottleneck(nn.Module):
    """y = relu(x + F(x)), F of 1x1, 3x3 and 1x1 convolutions (He et al. 2016, equation 1 and figure 5).

    The 3x3 convolution has the stride ("ResNet v1.5"). The last norm starts at zero, as `gn3` in vit_jax, so
    that each unit starts as its shortcut (Goyal et al. 2017, section 5.1).
    """

    def __init__(self, unit: Unit, dialect: Dialect = JAX) -> None:
        super().__init__()
        C = unit.channels
        self.conv1 = StandardizedConv(unit.in_channels, C, 1, dialect=dialect)
        self.norm1 = GroupNorm(C, dialect)
        self.conv2 = StandardizedConv(C, C, 3, unit.stride, dialect)
        self.norm2 = GroupNorm(C, dialect)
        self.conv3 = StandardizedConv(C, unit.out_channels, 1, dialect=dialect)
        self.norm3 = GroupNorm(unit.out_channels, dialect)
        self.shortcut: nn.Module = nn.Identity()
        if unit.has_projection:
            self.shortcut = ConvNorm(unit.in_channels, unit.out_channels, 1, unit.stride, dialect)
        nn.init.zeros_(self.norm3.weight)

    def forward(self, maps: Tensor) -> Tensor:
        residual = F.relu(self.norm1(self.conv1(maps)))  # (B, C, H, W)
        residual = F.relu(self.norm2(self.conv2(residual)))  # (B, C, H/stride, W/stride)
        residual = self.norm3(self.conv3(residual))  # (B, 4C, H/stride, W/stride)
        return F.relu(self.shortcut(maps) + residual)


class ResNetFeatures(nn.Module):
    """Root and stages: images (B, C, H, W) -> maps (B, D, H/stride, W/stride), rounded up, not negative.

    Without stages there is only the root, for ImageNet of stride 4: R+ViT-Ti/16, whose patches are 8x8, has a
    token per 32 pixels, in spite of its name; timm builds the same.
    """

    def __init__(self, config: ResNetConfig, dialect: Literal["jax", "timm"] = "jax") -> None:
        super().__init__()
        numerics, root = DIALECTS[dialect], ROOTS[config.root]
        self.pools = root.pools
        self.root = ConvNorm(config.in_channels, config.width, root.kernel, root.stride, numerics)
        self.stages = nn.Sequential(
            *(nn.Sequential(*(Bottleneck(unit, numerics) for unit in units)) for units in config.stages())
        )

    def forward(self, images: Tensor, trace: Trace | None = None) -> Tensor:
        maps = F.relu(self.root(images))
        if self.pools:
            maps = max_pool(maps)  # (B, width, H/4, W/4)
        keep(trace, root=maps)
        for index, stage in enumerate(self.stages):
            maps = stage(maps)
            keep(trace, **{f"stage{index}": maps})
        return maps


class ResNet(nn.Module):
    """A classifier: the features' mean over the image, then one linear layer. (B, C, H, W) -> logits (B, K).

    Any H and W are accepted. The head starts at zero, as in vit_jax, for uniform predictions.
    """

    preprocess: Any = None
    """The `vitascope.Preprocess` that it was trained with; None if it was built from a configuration."""
    trust: Trust | None = None
    """What it knows about its answers; None if it was not calibrated."""

    @checked
    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.features = ResNetFeatures(config)
        self.head = nn.Linear(config.embed_dim, config.num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K) of images (B, C, H, W), normalized floats.

        Raises:
            UserError: raw pixels, another number of dimensions or colours.
        """
        return self.head(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        """The features' mean over the image: (B, C, H, W) -> (B, D)."""
        check_images(images, self.config.in_channels)
        return self.features(images).mean(dim=(2, 3))

    def trace(self, images: Tensor, attention: bool = False) -> Trace:
        """The forward pass with every intermediate; `attention` is a UserError.

        `root`, after the pool; `stage0`, `stage1`, ...; `features`, the last of them, all (B, channels, rows,
        columns); `pooled`, the result of `embed`, (B, D); `logits` (B, K).
        """
        check_no_attention(self, attention)
        check_images(images, self.config.in_channels)
        trace = Trace()
        features = self.features(images, trace)
        pooled = features.mean(dim=(2, 3))
        keep(trace, features=features, pooled=pooled, logits=self.head(pooled))
        return trace
