"""Masked autoencoder (He et al. 2022, "Masked Autoencoders Are Scalable Vision Learners").

The encoder gets the visible patches only, a quarter of them by default. A small decoder gets their states and
a mask token in place of each hidden patch, and predicts the normalized pixels of the hidden patches.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.model.encoder import Encoder
from vitascope.model.norms import LayerNorm
from vitascope.model.positions import Layout, sincos_table
from vitascope.model.vit import VisionTransformer
from vitascope.options.groups import DECODER_HEAD, Masking
from vitascope.training.tasks.masked import UNMIXED, Masked, RandomMask, check_body, random_mask
from vitascope.training.tasks.patch_targets import NormalizedPixelTarget, Target

CONVOLUTIONAL = ("resnet", "tokenizer")
"""The stems that would see pixels of hidden patches: these are erased."""


class MaskedAutoencoder(nn.Module):
    """The encoder to pre-train, and a plain ViT's blocks as its decoder (section 3).

    Initialized as in the authors' code: Xavier in linear layers, deviation 0.02 for the mask token. Names of
    parameters beside `body` differ from those of the body.
    """

    def __init__(self, body: VisionTransformer, outputs: int, masking: Masking) -> None:
        super().__init__()
        check_body(body, (*UNMIXED, *CONVOLUTIONAL))
        check_encoder(body.config)
        d = masking.decoder_dim
        config = ViTConfig(
            image_size=body.config.image_size,
            patch_size=body.config.patch_size,
            remainder=body.config.remainder,
            embed_dim=d,
            depth=masking.decoder_depth,
            num_heads=d // DECODER_HEAD,
            norm_eps=body.config.norms.norm_eps,
        )
        self.body = body
        self.decoder_embedding = nn.Linear(body.config.embed_dim, d)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, d))
        self.decoder = Encoder(config)
        self.decoder.checkpointing = body.encoder.checkpointing
        self.decoder_norm = LayerNorm(d, eps=config.norms.norm_eps)
        self.head = nn.Linear(d, outputs)
        nn.init.normal_(self.mask_token, std=0.02)
        for part in (self.decoder_embedding, self.decoder, self.head):
            for layer in part.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)
                    nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor, places: Tensor, visible: Tensor) -> Tensor:
        """Normalized images (B, C, H, W) and a `RandomMask`'s fields -> (B, n, outputs) for `places`."""
        body, grid = self.body, self.body.grid_of(images)
        P, n = body.config.num_prefix_tokens, places.shape[1]
        if body.config.embedding.stem in CONVOLUTIONAL:
            images = erased(images, places, grid)
        zL = body.norm(body.encode(body.prepare_tokens(images), grid, visible=visible))  # (B, P + N - n, D)
        seen = self.decoder_embedding(zL)  # (B, P + N - n, d)
        E_pos = sincos_table("sincos_2d", grid, seen.shape[2], seen.device, seen.dtype)[0]  # (N, d)
        hidden = self.mask_token.to(seen.dtype) + E_pos[places]  # (B, n, d)
        # The order of tokens does not matter to attention: hidden patches are last.
        tokens = torch.cat([seen[:, :P], seen[:, P:] + E_pos[visible], hidden], dim=1)  # (B, P + N, d)
        decoded = self.decoder(tokens, Layout(grid, P))
        return self.head(self.decoder_norm(decoded[:, -n:]))


def erased(images: Tensor, places: Tensor, grid: tuple[int, int]) -> Tensor:
    """Normalized images (B, C, H, W) with the pixels of some patches, (B, n), at zero, the mean colour."""
    (H, W), (gh, gw) = images.shape[2:], grid
    kept = images.new_ones(len(images), gh * gw).scatter_(1, places, 0.0).view(-1, 1, gh, gw)
    return images * kept.repeat_interleave(H // gh, dim=2).repeat_interleave(W // gw, dim=3)


def check_encoder(config: ViTConfig) -> None:
    """Reject an encoder that needs the whole grid of patches, or has patches without a variance."""
    if config.in_channels * math.prod(config.patch_hw) == 1:
        raise UserError(
            "patch_size 1: a patch of one grey pixel has no variance, and a masked autoencoder normalizes "
            "each patch by its own; set patch_size to 2 or more, or choose another target"
        )
    positions, attention = config.embedding.positions, config.block.attention
    reason = f"{attention} attention" if attention != "global" else f"{positions} positions"
    if attention != "global" or config.embedding.relative:
        raise UserError(
            f"with {reason}, the encoder needs every patch, and a masked autoencoder leaves out most of "
            "them: use global attention and other positions, or another target"
        )


class MaskedAutoencoding(Masked):
    """A masked autoencoder as a `Task`."""

    @functools.cached_property
    def target(self) -> Target:
        """The pixels of a hidden patch, normalized by its own mean and variance."""
        return NormalizedPixelTarget(patch=self.config.patch_hw, preprocess=self.preprocess)

    def module(self, model: VisionTransformer) -> nn.Module:
        """The encoder with a new decoder."""
        return MaskedAutoencoder(model, self.target.outputs, self.masking)

    def hidden(self, seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> RandomMask:
        """The hidden and the visible patches of each image."""
        return random_mask(seed, epoch, indices, math.prod(self.config.grid), self.masking.share)
