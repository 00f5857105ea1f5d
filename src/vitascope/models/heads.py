"""Pooling and heads: from the encoder's tokens to logits (paper, equation 4 and section 3.1)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.models.attention import fused_attention, join_heads
from vitascope.models.config import ViTConfig
from vitascope.models.encoder import MLP, SwiGLU
from vitascope.models.norms import norm_of
from vitascope.models.options import Outputs


class ClassTokenPool(nn.Module):
    """y = z_L^0, the class token's state; with a distillation token both states: (B, T, D) -> (B, 2D)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.queries = slice(0, config.readout.num_pooled)  # the tokens that pooling reads

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, self.queries].flatten(1)


class MeanPool(nn.Module):
    """The mean of the patches (paper, appendix D.3: as good as the class token, at another learning rate)."""

    queries = slice(None)

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_prefix_tokens = config.num_prefix_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, self.num_prefix_tokens :].mean(dim=1)


class ClassMeanPool(MeanPool):
    """The class token and the mean of the patches, as in DINOv2's classifiers: (B, T, D) -> (B, 2D)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.cat([tokens[:, 0], super().forward(tokens)], dim=1)


class SequencePool(MeanPool):
    """The patches' sum under the softmax of one score each (Hassani et al. 2021, section 3.2, "SeqPool")."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.embed_dim, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        patches = tokens[:, self.num_prefix_tokens :]  # (B, N, D)
        weights = self.score(patches).softmax(dim=1)  # (B, N, 1)
        return (weights.mT.to(patches.dtype) @ patches)[:, 0]


class AttentionPool(MeanPool):
    """Multi-head attention pooling: one learned query attends to the patches (Zhai et al. 2022, MAP).

    With `pool_prefix` it attends to all tokens, as in Perception Encoder.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        D, readout = config.embed_dim, config.readout
        self.first = 0 if readout.pool_prefix else config.num_prefix_tokens
        self.num_heads = readout.pool_heads or D // config.head_dim  # those of the blocks may be pruned
        self.query = nn.Parameter(torch.zeros(1, 1, D))
        self.q = nn.Linear(D, D)
        self.kv = nn.Linear(D, 2 * D)
        self.proj = nn.Linear(D, D)
        self.norm = norm_of(config, D)
        wide = config if readout.pool_mlp_ratio is None else config.replace(mlp_ratio=readout.pool_mlp_ratio)
        self.mlp = SwiGLU(wide) if config.block.mlp == "swiglu" else MLP(wide)

    def forward(self, tokens: Tensor) -> Tensor:
        attended = tokens[:, self.first :]  # (B, N, D)
        query = self.query.to(tokens.dtype).expand(tokens.shape[0], -1, -1)
        q = self.q(query).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, 1, hd)
        kv = self.kv(attended).unflatten(-1, (2, self.num_heads, -1))  # (B, N, 2, heads, hd)
        k, v = kv.permute(2, 0, 3, 1, 4)  # (B, heads, N, hd)
        pooled = self.proj(join_heads(fused_attention(q, k, v)))  # (B, 1, D)
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]


class PreLogits(nn.Module):
    """The hidden tanh layer of the pre-training head (`pre_logits` in vit_jax, the pooler elsewhere)."""

    def __init__(self, inputs: int, embed_dim: int) -> None:
        super().__init__()
        self.pre_logits = nn.Linear(inputs, embed_dim)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.pre_logits(pooled).tanh()


class MLPHead(PreLogits):
    """The pre-training head: a hidden tanh layer, then the classes."""

    def __init__(self, inputs: int, embed_dim: int, num_classes: int) -> None:
        super().__init__(inputs, embed_dim)
        self.linear = nn.Linear(embed_dim, num_classes)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.linear(super().forward(pooled))


class DistilledHead(nn.Module):
    """A classifier for the class token and one for the distillation token (Touvron et al. 2021, DeiT).

    Returns the mean of both (section 4): (B, 2D) -> (B, K).
    """

    def __init__(self, embed_dim: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(embed_dim, num_classes)
        self.distillation = nn.Linear(embed_dim, num_classes)

    def both(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 2D) -> the logits (B, K) of the class token and of the distillation token."""
        class_token, distillation_token = pooled.chunk(2, dim=1)
        return self.linear(class_token), self.distillation(distillation_token)

    def forward(self, pooled: Tensor) -> Tensor:
        by_label, by_teacher = self.both(pooled)
        return (by_label + by_teacher) / 2


class CosineHead(nn.Module):
    """exp(scale) cos(P y, t_k) + bias: features against one vector per class, as CLIP compares an image with
    texts (Radford et al. 2021, figure 3): (B, D) -> (B, K).

    Args:
        inputs: D.
        projection: the width of P y and of t_k; None compares y itself.
        num_classes: K.
    """

    def __init__(self, inputs: int, projection: int | None, num_classes: int) -> None:
        super().__init__()
        self.projection = nn.Linear(inputs, projection) if projection else nn.Identity()  # P
        self.classes = nn.Parameter(torch.randn(num_classes, projection or inputs))  # t_k, of any length
        self.scale = nn.Parameter(torch.zeros(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, pooled: Tensor) -> Tensor:
        features, classes = self.projection(pooled), self.classes.to(pooled.dtype)
        cosines = F.linear(F.normalize(features, dim=-1), F.normalize(classes, dim=-1))  # (B, K)
        return self.scale.exp() * cosines + self.bias


Pool = ClassTokenPool | MeanPool


def pooling(config: ViTConfig) -> Pool:
    """Create the pooling `config.readout.pool`."""
    if config.readout.pool == "cls":
        return ClassTokenPool(config)
    kinds = {"mean": MeanPool, "cls_mean": ClassMeanPool, "map": AttentionPool, "sequence": SequencePool}
    return kinds[config.readout.pool](config)


def classification_head(config: ViTConfig) -> nn.Module:
    """Create the head `config.readout.head`."""
    D, K, head = config.embed_dim, config.num_classes, config.readout.head
    inputs = D * config.readout.num_pooled
    if head == "none":
        return nn.Identity()
    if config.readout.distillation_token:
        return DistilledHead(D, K)
    if head == "mlp":
        return MLPHead(inputs, D, K)
    if head == "pre_logits":
        return PreLogits(inputs, D)
    if head == "cosine":
        return CosineHead(inputs, config.readout.projection, K)
    return nn.Linear(inputs, K)


def scores(logits: Tensor, outputs: Outputs) -> Tensor:
    """The probability of each class, (..., K), from logits (..., K): one of the classes applies, or any may.

    Raises:
        UserError: an embedding.
    """
    if outputs == "embedding":
        raise UserError("this model returns an embedding (`model(images)`), which has no probabilities")
    return logits.softmax(dim=-1) if outputs == "exclusive" else logits.sigmoid()


def predicted(outputs: Tensor) -> Tensor:
    """The predicted class of each image, int64 (B,), from logits or probabilities (B, K)."""
    return outputs.argmax(dim=1)


def output_layers(head: object) -> list[nn.Linear]:
    """The linear layers of a head whose outputs are logits; none of a head of other layers."""
    if isinstance(head, DistilledHead):
        return [head.linear, head.distillation]
    if isinstance(head, MLPHead):
        return [head.linear]
    return [head] if isinstance(head, nn.Linear) else []


@torch.no_grad()
def scale_logits(head: nn.Module, factors: Tensor) -> None:
    """Multiply the logits of a head by positive factors (K,), in its weights. The one scale of a `CosineHead`
    gets their mean."""
    if isinstance(head, CosineHead):
        factor = factors.mean().to(head.scale)
        head.scale.add_(factor.log())
        head.bias.mul_(factor)
    for layer in output_layers(head):
        layer.weight.mul_(factors[:, None].to(layer.weight))
        layer.bias.mul_(factors.to(layer.bias))
