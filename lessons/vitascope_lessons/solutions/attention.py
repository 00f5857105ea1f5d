"""Exercise 3, self-attention: A = softmax(q k^T / sqrt(D_h)), SA(z) = A v, equations 6 and 7.

Compare each query with all keys: the scores are dot products, divided by the root of the width D_h. Softmax
over the keys turns the scores of one query into weights that sum to 1. The result is the sum of the values
under these weights. Do this for all images and heads at once.

Tools: `k.mT` swaps the last two axes, `softmax(dim=...)`, `@` multiplies the last two axes.
"""

from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries (B, heads, Q, D_h), keys and values (B, heads, T, D_h) to results (B, heads, Q, D_h)."""
    A = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)  # (B, heads, Q, T)
    return A @ v
