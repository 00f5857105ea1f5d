"""The text model of CLIP (Radford et al. 2021, section 2.4) and of SigLIP (Zhai et al. 2023)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor, nn

from vitascope.model.config import ViTConfig
from vitascope.model.encoder import Encoder
from vitascope.model.positions import Layout

Readout = Literal["eos", "largest", "first", "last"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The options that determine a `TextTower`."""

    blocks: ViTConfig
    """Width, depth, heads and the options of the blocks; those of images are not used."""
    vocabulary: int
    """V, the number of different tokens."""
    context: int
    """The largest number of tokens."""
    embed_dim: int
    """P, the width of the space that images and texts share."""
    causal: bool
    """Whether a token attends only to itself and the tokens before it."""
    readout: Readout
    """The token whose state is the text's: the first `eos_id`, the one with the largest id, the first one or
    the last one."""
    eos_id: int | None = None
    """The id of the token that ends a text, for the readout "eos"."""
    projection_bias: bool
    """Whether the projection has a bias."""
    independent: bool
    """Whether a pair has a sigmoid of its own (SigLIP), with a learned bias, instead of a softmax (CLIP)."""


class TextTower(nn.Module):
    """Tokens (B, T) to vectors (B, P), whose cosine with the vectors of images means similarity.

    B texts, T tokens, D the width of a token's state, P `embed_dim`.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        D, eps = config.blocks.embed_dim, config.blocks.norms.norm_eps
        self.token_embedding = nn.Embedding(config.vocabulary, D)
        self.positions = nn.Parameter(torch.zeros(config.context, D))
        self.encoder = Encoder(config.blocks)
        self.norm = nn.LayerNorm(D, eps=eps)
        self.projection = nn.Linear(D, config.embed_dim, bias=config.projection_bias)
        # Of a pair's logit: exp(scale) cos + bias.
        self.scale = nn.Parameter(torch.zeros(1))
        self.bias = nn.Parameter(torch.zeros(1)) if config.independent else None

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (B, T) -> (B, P)."""
        T = tokens.shape[1]
        z = self.token_embedding(tokens) + self.positions[:T]  # (B, T, D)
        z = self.norm(self.encoder(z, self.layout(T, z)))
        return self.projection(z[torch.arange(len(z)), self.places(tokens)])

    def layout(self, length: int, like: Tensor) -> Layout:
        """T tokens in a row; -inf hides those that come later."""
        grid = (1, length)
        if not self.config.causal:
            return Layout(grid, 0)
        mask = torch.full((length, length), -torch.inf, dtype=like.dtype, device=like.device).triu(1)
        return Layout(grid, 0, biases={grid: mask[None, None]})

    def places(self, tokens: Tensor) -> Tensor:
        """The place of the token that is read: (B, T) -> (B,)."""
        readout = self.config.readout
        if readout == "eos":
            return tokens.eq(self.config.eos_id or 0).int().argmax(dim=1)
        if readout == "largest":
            return tokens.argmax(dim=1)
        return torch.full((len(tokens),), 0 if readout == "first" else tokens.shape[1] - 1)
