"""The norm of a model: every one in its embedding, blocks and readout is of one kind."""

from __future__ import annotations

from torch import nn

from vitascope.model.config import ViTConfig


def norm_of(config: ViTConfig, width: int) -> nn.Module:
    """A norm over the last dimension, (..., width) -> (..., width).

    LayerNorm (Ba et al. 2016), or RMSNorm, which subtracts no mean and has no bias (Zhang and Sennrich 2019).
    """
    kind = nn.RMSNorm if config.norms.norm_type == "rms" else nn.LayerNorm
    return kind(width, eps=config.norms.norm_eps)
