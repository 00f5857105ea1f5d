"""The stems: from an image to patch embeddings, x_p E (paper, section 3.1 and equation 1)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.model.config import ViTConfig
from vitascope.model.resnet import ResNetFeatures


def patchify(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Cut images into flat patches, row by row: (B, C, H, W) -> (B, N, C*ph*pw).

    Inside a patch the order is channel, row, column: that of a convolution's kernel, so that both ways
    of embedding share one weight.
    """
    B, C, H, W = images.shape
    ph, pw = patch
    tiles = images.reshape(B, C, H // ph, ph, W // pw, pw)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(B, (H // ph) * (W // pw), C * ph * pw)


def unpatchify(patches: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """The inverse of `patchify`: (B, N, C*ph*pw) -> (B, C, H, W) for a grid of (rows, columns)."""
    B, _, size = patches.shape
    (gh, gw), (ph, pw) = grid, patch
    C = size // (ph * pw)
    tiles = patches.reshape(B, gh, gw, C, ph, pw)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(B, C, gh * ph, gw * pw)


class ConvPatches(nn.Conv2d):
    """Patch embedding as a convolution: (B, C, H, W) -> (B, N, D).

    Its stride is its kernel; with the stem "overlap" it is less, and neighbouring patches share pixels.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(
            config.in_channels,
            config.embed_dim,
            config.patch_hw,
            stride=config.patch_stride,
            bias=config.embedding.patch_bias,
        )

    def forward(self, images: Tensor) -> Tensor:
        """Embed each patch."""
        return super().forward(images).flatten(2).transpose(1, 2)  # (B, D, gh, gw) -> (B, N, D)


class LinearPatches(ConvPatches):
    """Patch embedding as reshape and matrix product, as the paper writes it: the same weight, reshaped."""

    def forward(self, images: Tensor) -> Tensor:
        """Embed each patch."""
        patches = patchify(images, (self.kernel_size[0], self.kernel_size[1]))  # (B, N, C*ph*pw)
        return F.linear(patches, self.weight.flatten(1), self.bias)  # (B, N, D)


class HybridPatches(nn.Module):
    """Patches of a ResNet's feature map (paper, section 3.1, "Hybrid Architecture").

    (B, C, H, W) -> (B, N, D). `patch_size` counts pixels: R26+S/32 has a ResNet of stride 32, so each place
    of its map is a patch.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        options = config.embedding
        self.resnet = ResNetFeatures(
            config.in_channels, options.resnet_layers, options.resnet_width, options.resnet_dialect
        )
        patch = (config.patch_hw[0] // self.resnet.stride, config.patch_hw[1] // self.resnet.stride)
        self.projection = nn.Conv2d(
            self.resnet.channels, config.embed_dim, patch, stride=patch, bias=options.patch_bias
        )

    def forward(self, images: Tensor) -> Tensor:
        """Embed each patch."""
        return self.projection(self.resnet(images)).flatten(2).transpose(1, 2)  # (B, N, D)


def patch_embedding(config: ViTConfig) -> ConvPatches | HybridPatches:
    """The embedding that `config.embedding.stem` names."""
    stems: dict[str, type[ConvPatches | HybridPatches]] = {
        "conv": ConvPatches,
        "linear": LinearPatches,
        "overlap": ConvPatches,
        "resnet": HybridPatches,
    }
    return stems[config.embedding.stem](config)
