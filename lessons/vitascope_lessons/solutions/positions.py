"""Exercise 2, class token and positions: z_0 = [x_class; x_p E] + E_pos, equation 1.

Put the class token before the patches of each image. It is one learned vector, the same for all images. Then
add the position embeddings: one learned vector per token, also for the class token.

Tools: `expand` repeats an axis of length 1, `torch.cat` joins tensors along an axis.
"""

import torch
from torch import Tensor


def positions(embedded: Tensor, x_class: Tensor, E_pos: Tensor) -> Tensor:
    """x_p E (B, N, D), x_class (1, 1, D) and E_pos (1, N + 1, D) to the tokens z_0 (B, N + 1, D)."""
    B = embedded.shape[0]
    return torch.cat([x_class.expand(B, -1, -1), embedded], dim=1) + E_pos
