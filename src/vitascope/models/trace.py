"""`Trace`: the named intermediates of a forward pass."""

from collections.abc import Collection

from torch import Tensor

from vitascope.errors import UserError


class Trace:
    """Named intermediates of one forward pass.

    The model's parts hand their intermediates to a trace if there is one; otherwise nothing is kept and the
    fused kernels run. Gradients flow through the kept tensors. With `names`, only these values are kept.

    Attributes:
        values: by name, in the order of the pass: `patch_embeddings` (B, N, D); `embeddings`, z_0 of
            equation 1 (B, T, D); `block0`, `block1`, ...: z_1, z_2, ... of equation 3 (B, T, D); `features`,
            after the final norm (B, T, D); `pooled`, the result of `VisionTransformer.embed`, (B, D) or
            (B, 2D); `logits` (B, K), or the head's features.
        attended: (B, T, D) per block: the tokens that its attention reads, normalized in a pre-norm block.
        attention: if requested, (B, heads, T, T) per block: the softmax weights before dropout. Each row is
            one query token and sums to 1.
    """

    def __init__(self, *, attention: bool = False, names: Collection[str] | None = None) -> None:
        self._names = names
        self.values: dict[str, Tensor] = {}
        self.attended: list[Tensor] = []
        self.keeps_attention = attention
        self._attention: list[Tensor] = []

    @property
    def attention(self) -> list[Tensor]:
        """The attention weights of each block; UserError if they were not requested."""
        if not self.keeps_attention:
            raise UserError(
                "this trace has no attention weights: request them, model.trace(images, attention=True)"
            )
        return self._attention

    def keep(self, name: str, value: Tensor) -> None:
        """Record an intermediate."""
        if self._names is None or name in self._names:
            self.values[name] = value

    def keep_attended(self, tokens: Tensor) -> None:
        """Record the tokens that the next block's attention reads."""
        if self._names is None:
            self.attended.append(tokens)

    def keep_attention(self, weights: Tensor) -> None:
        """Record the next block's attention weights, if requested."""
        if self.keeps_attention:
            self._attention.append(weights)

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self.values.items())
        return f"Trace({shapes})"


def keep(trace: Trace | None, **intermediates: Tensor) -> None:
    """Record intermediates by name, if there is a trace."""
    if trace is not None:
        for name, value in intermediates.items():
            trace.keep(name, value)


def check_no_attention(model: object, attention: bool) -> None:
    """Reject a request for attention weights of a model without them."""
    if attention:
        raise UserError(
            f"a model of the kind {type(model).__name__} has no attention of its own: leave it out, or trace "
            "a member of an ensemble"
        )
