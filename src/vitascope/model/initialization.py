"""Two published initializations of a ViT."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitascope.model.attention import SelfAttention
from vitascope.model.encoder import MLP
from vitascope.model.heads import MLPHead
from vitascope.model.patches import ConvPatches

if TYPE_CHECKING:
    from vitascope.model.vit import VisionTransformer


def lecun_normal_(weight: Tensor) -> None:
    """Truncated normal with variance 1 / fan-in, as flax draws it."""
    fan_in = weight[0].numel()
    std = math.sqrt(1 / fan_in) / 0.87962566103423978  # that of a normal cut at 2 standard deviations
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


@torch.no_grad()
def initialize_paper(model: VisionTransformer) -> None:
    """As google-research/vision_transformer starts: Xavier in the blocks, LeCun in the stem, a zero head.

    The zero head makes the first prediction uniform, so that a pre-trained body is not shaken by a random
    head (paper, section 4.1).
    """
    for module in model.modules():
        if isinstance(module, ConvPatches):
            lecun_normal_(module.weight)
            nn.init.zeros_(module.bias) if module.bias is not None else None
        elif isinstance(module, SelfAttention):
            for part in module.qkv.weight.chunk(3):  # each is its own layer in the paper
                nn.init.xavier_uniform_(part)
            nn.init.zeros_(module.qkv.bias)
            nn.init.xavier_uniform_(module.proj.weight)
            nn.init.zeros_(module.proj.bias)
        elif isinstance(module, MLP):
            for layer in (module.fc1, module.fc2):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.normal_(layer.bias, std=1e-6)
        elif isinstance(module, MLPHead):
            lecun_normal_(module.pre_logits.weight)
            nn.init.zeros_(module.pre_logits.bias)
    output = model.head.linear if isinstance(model.head, MLPHead) else model.head
    if isinstance(output, nn.Linear):
        nn.init.zeros_(output.weight)
        nn.init.zeros_(output.bias)
    nn.init.normal_(model.positions.weight, std=0.02)


@torch.no_grad()
def initialize_timm(model: VisionTransformer) -> None:
    """As timm's `vit_*` models start: normals of standard deviation 0.02, cut; PyTorch's default stem."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(model.positions.weight, std=0.02)
    if model.class_token is not None:
        nn.init.normal_(model.class_token, std=1e-6)
