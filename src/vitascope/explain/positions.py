"""What position embeddings have learned: which places are like which (paper, figure 7, centre)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.errors import UserError
from vitascope.model.classifier import Classifier
from vitascope.model.vit import VisionTransformer

_WITHOUT_TABLE = {
    "none": "this model has no positions at all",
    "relative": "relative positions are a number for each offset that adds to the attention scores",
    "rotary": "rotary positions turn queries and keys",
}


@torch.no_grad()
def position_similarity(model: Classifier) -> Tensor:
    """Cosine similarity between the position embeddings of every two patches.

    Of the model's own grid, learned and fixed ones alike (Dosovitskiy et al. 2021, section 4.5 and figure 7,
    centre).

    Args:
        model: a `VisionTransformer` whose positions add to the tokens.

    Returns:
        float32 (grid_h, grid_w, grid_h, grid_w) in [-1, 1]: [i, j, k, l] compares the patch in row i, column
        j with that in row k, column l. 0 where an embedding is all zeros.

    Raises:
        UserError: positions that add nothing to the tokens, saying what they do; a ResNet.
    """
    if not isinstance(model, VisionTransformer):
        raise UserError("a ResNet has no position embeddings: this is for Vision Transformers")
    gh, gw = grid = model.config.grid
    table = model.positions.table(grid)  # (1, T, D), or (1, N, D)
    if table is None:
        kind = model.config.embedding.positions
        raise UserError(
            f"{_WITHOUT_TABLE[kind]}, so there are no position embeddings to compare; positions "
            "learned, learned_2d and sincos_* have them"
        )
    unit = F.normalize(table[0, -gh * gw :].double(), dim=1)  # (N, D)
    return (unit @ unit.T).clamp(-1, 1).float().reshape(*grid, *grid)
