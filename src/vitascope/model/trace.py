"""`Trace`: what a forward pass keeps for whoever wants to look inside."""

from __future__ import annotations

from torch import Tensor


class Trace:
    """Named intermediates of one forward pass, kept only because they were asked for.

    The model's parts hand their intermediates to a trace where there is one; without one nothing is kept
    and the fused kernels run. Gradients flow through what it keeps.

    Attributes:
        values: by name, in the order of the pass: `patch_embeddings` (B, N, D); `embeddings`, z_0 of
            equation 1 (B, T, D); `block0`, `block1`, ...: z_1, z_2, ... of equation 3 (B, T, D); `features`,
            after the final norm (B, T, D); `pooled`, as `VisionTransformer.embed` gives it, (B, D) or
            (B, 2D); `logits` (B, K), or what the head gives in their place.
        attended: one (B, T, D) a block: the tokens that its attention reads, normalized in a pre-norm block.
        attention: if asked for, one (B, heads, T, T) a block: the softmax weights, before dropout; each
            row is one query token and sums to 1.
    """

    def __init__(self, *, attention: bool = False) -> None:
        self.values: dict[str, Tensor] = {}
        self.attended: list[Tensor] = []
        self.attention: list[Tensor] | None = [] if attention else None

    def keep(self, name: str, value: Tensor) -> None:
        """Record an intermediate."""
        self.values[name] = value

    def keep_attended(self, tokens: Tensor) -> None:
        """Record what the attention of the next block reads."""
        self.attended.append(tokens)

    def keep_attention(self, weights: Tensor) -> None:
        """Record the attention weights of the next block, if they were asked for."""
        if self.attention is not None:
            self.attention.append(weights)

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self.values.items())
        return f"Trace({shapes})"
