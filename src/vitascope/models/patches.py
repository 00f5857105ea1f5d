"""The stems: from an image to patch embeddings, x_p E (paper, section 3.1 and equation 1)."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.models.config import ViTConfig
from vitascope.models.norms import norm_of
from vitascope.models.resnet import ResNetFeatures


def patchify(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Cut images into flat patches, row by row, and leave out the rest: (B, C, H, W) -> (B, N, C*ph*pw).

    A patch is ordered by channel, row, column, as a kernel: the patch embedding is a matrix product of these.
    """
    (B, C, H, W), (ph, pw) = images.shape, patch
    gh, gw = H // ph, W // pw
    tiles = images[:, :, : gh * ph, : gw * pw].reshape(B, C, gh, ph, gw, pw)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(B, gh * gw, C * ph * pw)


def unpatchify(patches: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """The inverse of `patchify`: (B, N, C*ph*pw) -> (B, C, H, W) for a grid of (rows, columns)."""
    (B, _, size), (gh, gw), (ph, pw) = patches.shape, grid, patch
    C = size // (ph * pw)
    tiles = patches.reshape(B, gh, gw, C, ph, pw)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(B, C, gh * ph, gw * pw)


def take(tokens: Tensor, places: Tensor) -> Tensor:
    """Select tokens of each image: (B, Q, D), (B, n) -> (B, n, D)."""
    B, Q, D = tokens.shape
    rows = places + Q * torch.arange(B, device=tokens.device)[:, None]
    # One index for whole rows is several times as fast on a CPU as `gather` or two indices.
    return tokens.reshape(B * Q, D).index_select(0, rows.flatten()).view(B, places.shape[1], D)


def put(tokens: Tensor, places: Tensor, others: Tensor) -> Tensor:
    """Replace tokens of each image by others: (B, Q, D), (B, n), (B, n, D) -> (B, Q, D)."""
    return tokens.scatter(1, places[:, :, None].expand(-1, -1, tokens.shape[2]), others)


class ConvPatches(nn.Conv2d):
    """Patch embedding as a convolution, for "overlap" of smaller stride: (B, C, H, W) -> (B, N, D).

    With `patch_norm`, a norm of each patch follows.
    """

    def __init__(self, config: ViTConfig) -> None:
        step, bias = config.patch_stride, config.embedding.patch_bias
        super().__init__(config.in_channels, config.embed_dim, config.patch_hw, stride=step, bias=bias)
        self.norm = norm_of(config, config.embed_dim) if config.embedding.patch_norm else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(super().forward(images).flatten(2).transpose(1, 2))  # (B, D, gh, gw) -> (B, N, D)


class HybridPatches(nn.Module):
    """Patches of a ResNet's feature map (paper, section 3.1, "Hybrid Architecture").

    `patch_size` counts pixels: R26+S/32 has a ResNet of stride 32, so a patch is one place of its map.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        resnet = config.stem_resnet
        self.resnet = ResNetFeatures(resnet, config.embedding.resnet_dialect)
        patch = (config.patch_hw[0] // resnet.stride, config.patch_hw[1] // resnet.stride)
        bias = config.embedding.patch_bias
        self.projection = nn.Conv2d(resnet.embed_dim, config.embed_dim, patch, stride=patch, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(self.resnet(images)).flatten(2).transpose(1, 2)  # (B, N, D)


class TokenizerLayer(nn.Module):
    """3x3 convolution, perhaps 3x3 max pooling of stride 2, and an activation.

    (B, I, H, W) -> (B, O, H', W').
    """

    def __init__(self, in_channels: int, out_channels: int, config: ViTConfig, *, pools: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=config.embedding.patch_bias)
        self.norm: nn.Module = nn.Identity()  # in training perhaps `TokenizerNorm`
        self.activation = {"relu": nn.ReLU(), "gelu": nn.GELU()}[config.tokenizer.tokenizer_activation]
        self.pools = pools

    def forward(self, maps: Tensor) -> Tensor:
        maps = self.conv(maps)
        if self.pools:
            # The paper's order is ReLU, then pooling: the same function, of four times as many numbers. Of a
            # GELU, which falls below 0, it is another one.
            maps = F.max_pool2d(maps, 3, stride=2, padding=1)
        return self.activation(self.norm(maps))


class ConvTokenizer(nn.Sequential):
    """The tokenizer of CCT (Hassani et al. 2021, section 3.3): (B, C, H, W) -> (B, N, D).

    In the paper every layer pools. Here those do that the patch size needs.
    """

    def __init__(self, config: ViTConfig) -> None:
        widths = itertools.pairwise(config.tokenizer_channels)
        super().__init__(
            *(
                TokenizerLayer(*channels, config, pools=pools)
                for channels, pools in zip(widths, config.tokenizer_pools, strict=True)
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        # Channels last: a third less time on a CPU, and the tokens need no copy.
        maps = images.contiguous(memory_format=torch.channels_last)
        for layer in self:
            maps = layer(maps)
        return maps.flatten(2).transpose(1, 2)  # (B, D, gh, gw) -> (B, N, D)


def patch_embedding(config: ViTConfig) -> ConvPatches | HybridPatches | ConvTokenizer:
    """Create the stem `config.embedding.stem`."""
    if config.embedding.stem == "tokenizer":
        return ConvTokenizer(config)
    if config.embedding.stem == "resnet":
        return HybridPatches(config)
    return ConvPatches(config)
