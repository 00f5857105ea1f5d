"""The norm of a model: every one in its embedding, blocks and readout is of one kind."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.models.config import ViTConfig


class LayerNorm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) in the dtype of its input, also under autocast: (..., D) -> (..., D).

    Its kernel computes in float32 inside; CUDA's autocast would convert the tokens before and after it too.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        if not widened(tokens):
            return super().forward(tokens)
        with torch.autocast("cuda", enabled=False):
            weight, bias = self.weight.to(tokens.dtype), self.bias.to(tokens.dtype)
            return F.layer_norm(tokens, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm, which subtracts no mean and has no bias (Zhang and Sennrich 2019); else as `LayerNorm`.

    On a CPU, a float32 weight with bf16 tokens would keep torch from its fused kernel, and make it warn.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False) if widened(tokens) else nullcontext():
            return F.rms_norm(tokens, self.normalized_shape, self.weight.to(tokens.dtype), self.eps)


def widened(tokens: Tensor) -> bool:
    """Whether autocast would compute a norm of these tokens in float32."""
    return tokens.is_cuda and torch.is_autocast_enabled("cuda")


def norm_of(config: ViTConfig, width: int) -> nn.Module:
    """A norm over the last dimension, (..., width) -> (..., width)."""
    kind = RMSNorm if config.norms.norm_type == "rms" else LayerNorm
    return kind(width, eps=config.norms.norm_eps)
