"""Exercise 5, MLP: MLP(z) = GELU(z W_1) W_2, a part of equation 3.

Two matrices with the exact GELU between them, for each token by itself. Add nothing to the result: the
residual connection is in exercise 6.

Tools: `torch.nn.functional.gelu`.
"""

import torch.nn.functional as F
from torch import Tensor


def mlp(z: Tensor, W_1: Tensor, W_2: Tensor) -> Tensor:
    """Tokens (B, T, D), W_1 (D, M) and W_2 (M, D) to (B, T, D)."""
    return F.gelu(z @ W_1) @ W_2
