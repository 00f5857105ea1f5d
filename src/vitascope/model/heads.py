"""From the encoder's tokens to logits: pooling and heads (paper, equation 4 and section 3.1)."""

from __future__ import annotations

from torch import Tensor, nn

from vitascope.model.config import ViTConfig


class ClassTokenPool(nn.Module):
    """y = z_L^0: the class token's state represents the image."""

    read = slice(0, 1)
    """The tokens of the sequence that pooling reads."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T, D) -> (B, D)."""
        return tokens[:, 0]


class MeanPool(nn.Module):
    """The mean of all patch tokens (paper, appendix D.3: as good as the class token, at another rate)."""

    read = slice(None)
    """The tokens of the sequence that pooling reads."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T, D) -> (B, D)."""
        return tokens.mean(dim=1)


class MLPHead(nn.Module):
    """The pre-training head: one hidden tanh layer (vit_jax calls it `pre_logits`), then the classes."""

    def __init__(self, embed_dim: int, num_classes: int) -> None:
        super().__init__()
        self.pre_logits = nn.Linear(embed_dim, embed_dim)
        self.linear = nn.Linear(embed_dim, num_classes)

    def forward(self, pooled: Tensor) -> Tensor:
        """(B, D) -> (B, K)."""
        return self.linear(self.pre_logits(pooled).tanh())


def pooling(config: ViTConfig) -> ClassTokenPool | MeanPool:
    """The pooling that `config.pool` names."""
    return ClassTokenPool() if config.pool == "cls" else MeanPool()


def classification_head(config: ViTConfig) -> nn.Module:
    """The head that `config.head` names."""
    if config.head == "none":
        return nn.Identity()
    if config.head == "mlp":
        return MLPHead(config.embed_dim, config.num_classes)
    return nn.Linear(config.embed_dim, config.num_classes)
