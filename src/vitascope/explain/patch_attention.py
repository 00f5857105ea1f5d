"""The attention of one patch: what it looks at."""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.explain.attention import attending, check_head, layer_attention
from vitascope.explain.heatmaps import to_unit
from vitascope.model.classifier import Classifier


@torch.no_grad()
def patch_attention(
    model: Classifier,
    images: Tensor,
    patch: tuple[int, int],
    layer: int = -1,
    head: int | None = None,
) -> Tensor:
    """How much one patch attends to each patch in a layer.

    The patch's row of the attention weights; what goes to class, distillation and register tokens is left
    out. (With a class token nothing reads what patches attend to in the last layer: it was not trained to
    mean anything.)

    Args:
        model: any `VisionTransformer`; it is run as in evaluation.
        images: normalized floats (B, C, H, W).
        patch: row and column in the grid, from 0.
        layer: of `depth`, from 0; negative counts from the last.
        head: of `num_heads`, from 0; None takes the mean of all heads.

    Returns:
        float32 (B, grid_h, grid_w), each image's largest value 1; all zeros where the patch attends to
        other tokens alone.

    Raises:
        UserError: no such patch, layer or head, naming the range; a ResNet.
    """
    model = attending(model)
    grid, P = model.grid_of(images), model.config.num_prefix_tokens
    number = _number_of(patch, grid)
    check_head(model.config, head)
    rows = layer_attention(model, images, layer)[:, :, P + number, P:].float()  # (B, heads, N)
    row = rows.mean(dim=1) if head is None else rows[:, head]  # (B, N)
    return to_unit(row.unflatten(1, grid))


def _number_of(patch: tuple[int, int], grid: tuple[int, int]) -> int:
    """A patch's place in the sequence of patches, row by row.

    Raises:
        UserError: no such patch.
    """
    (row, column), (gh, gw) = patch, grid
    if not (0 <= row < gh and 0 <= column < gw):
        raise UserError(
            f"no patch ({row}, {column}): the grid is {gh}x{gw}, rows 0 to {gh - 1} and columns 0 to {gw - 1}"
        )
    return row * gw + column
