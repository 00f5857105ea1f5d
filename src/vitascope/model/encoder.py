"""The Transformer encoder: MLP, pre-norm block, and the stack of blocks (paper, equations 2 and 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitascope.model.attention import SelfAttention
from vitascope.model.config import ViTConfig
from vitascope.model.trace import Trace


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, leave out a residual branch for whole images."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """Zero a share `rate` of the images of (B, T, D) and scale the others so that the mean stays."""
        if not self.training or self.rate == 0:
            return branch
        keep = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.rate
        return branch * (keep / (1 - self.rate)).to(branch.dtype)


class MLP(nn.Module):
    """Two linear layers with a GELU between, applied to each token by itself."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.embed_dim, config.mlp_dim)
        self.activation = nn.GELU()
        self.fc2 = nn.Linear(config.mlp_dim, config.embed_dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.dropout(self.fc2(self.dropout(self.activation(self.fc1(tokens)))))


class Block(nn.Module):
    """One pre-norm encoder block: two residual lines."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.attention = SelfAttention(config)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor, trace: Trace | None = None, read: slice = slice(None)) -> Tensor:
        """(B, T, D) -> (B, Q, D): the tokens that `read` selects, each having looked at all T."""
        tokens = tokens[:, read] + self.drop_path(self.attention(self.norm1(tokens), trace, read))  # eq. 2
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))  # eq. 3


class Encoder(nn.Module):
    """L blocks, one after another."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        last = max(1, config.depth - 1)
        rates = [config.drop_path * index / last for index in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)

    def forward(self, tokens: Tensor, trace: Trace | None = None, read: slice = slice(None)) -> Tensor:
        """z_0 -> z_L: (B, T, D) -> (B, Q, D).

        `read` says which tokens of z_L will be read. The last block computes only those: with a class
        token, one instead of T, which saves most of that block and changes no number.
        """
        last = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            tokens = block(tokens, trace, read if index == last else slice(None))
            if trace is not None:
                trace.keep(f"block{index}", tokens)
        return tokens
