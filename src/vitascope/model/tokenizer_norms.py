"""BatchNorm in the stem "tokenizer" (Ioffe and Szegedy 2015): a model has it while it is trained.

The saved model computes the same without: the norms are part of its convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.model.patches import ConvTokenizer, TokenizerLayer

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
