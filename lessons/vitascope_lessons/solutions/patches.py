"""Exercise 1, patch embedding: x_p E, the first part of equation 1.

Cut each image into patches of P by P pixels. Number them row by row, from the top left. Write the pixels of
a patch in one row: first all of channel 0, then all of channel 1, and so on; within a channel row by row.
Then one matrix, the same for all patches, maps each row of C P^2 numbers to D numbers.

Tools: `reshape` splits an axis or joins neighbours, `permute` changes the order of axes, `@` multiplies.
"""

from torch import Tensor


def patches(images: Tensor, E: Tensor, P: int) -> Tensor:
    """Images (B, C, H, W) and E (C * P * P, D) to patch embeddings (B, N, D), with N = H/P * W/P."""
    B, C, H, W = images.shape
    tiles = images.reshape(B, C, H // P, P, W // P, P)
    x_p = tiles.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * P * P)  # (B, N, C * P * P)
    return x_p @ E
