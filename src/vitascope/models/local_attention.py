"""Attention at less than O(T^2): in windows, or along rows and then columns.

A patch attends to the patches of its window and to the prefix; the prefix attends to everything, so that two
steps connect any two patches. Axial attention is windows of one row and then, on their result, windows of one
column (Ho et al. 2019, "Axial Attention in Multidimensional Transformers"; paper, appendix D.6):
O(HW (H + W)) instead of O(H^2 W^2). Queries, keys and values are those of global attention, so any checkpoint
fits, and the two steps are one linear map of the values, which a trace shows exactly.
"""

import torch
from torch import Tensor

from vitascope.models.attention import SelfAttention, fused_attention, join_heads
from vitascope.models.config import ViTConfig
from vitascope.models.positions import Grid, Layout


def split_windows(patches: Tensor, grid: Grid, window: Grid) -> Tensor:
    """Sort patches into windows: (B, heads, N, hd) -> (B, G, heads, n, hd)."""
    B, H, _, hd = patches.shape
    (gh, gw), (wh, ww) = grid, window
    tiles = patches.reshape(B, H, gh // wh, wh, gw // ww, ww, hd)
    return tiles.permute(0, 2, 4, 1, 3, 5, 6).reshape(B, (gh // wh) * (gw // ww), H, wh * ww, hd)


def join_windows(windows: Tensor, grid: Grid, window: Grid) -> Tensor:
    """The inverse of `split_windows`: (B, G, heads, n, hd) -> (B, heads, N, hd)."""
    B, _, H, _, hd = windows.shape
    (gh, gw), (wh, ww) = grid, window
    tiles = windows.reshape(B, gh // wh, gw // ww, H, wh, ww, hd)
    return tiles.permute(0, 3, 1, 4, 2, 5, 6).reshape(B, H, gh * gw, hd)


def attend_in_windows(
    q: Tensor, k: Tensor, v: Tensor, window: Grid, layout: Layout, rate: float = 0.0
) -> Tensor:
    """Attend: patches to their window and the prefix, the prefix to everything; (B, heads, T, width of v)."""
    P, grid = layout.num_prefix_tokens, layout.grid
    bias = layout.bias(window)
    bias = None if bias is None else bias.to(q.dtype)  # (1, heads, P + n, P + n)
    queries = split_windows(q[:, :, P:], grid, window)  # (B, G, heads, n, hd)
    keys, values = (split_windows(part[:, :, P:], grid, window) for part in (k, v))
    if P:  # the prefix precedes the patches of every window: (B, G, heads, P + n, hd)
        before = (part[:, None, :, :P].expand(-1, keys.shape[1], -1, -1, -1) for part in (k, v))
        keys, values = (torch.cat(parts, dim=3) for parts in zip(before, (keys, values), strict=True))
    mask = None if bias is None else bias[:, :, P:]
    # One batch of all windows: the fused kernels take four dimensions.
    mixed = fused_attention(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), mask, rate)
    patches = join_windows(mixed.unflatten(0, queries.shape[:2]), grid, window)
    if not P:
        return patches
    if bias is not None:  # a prefix token scores every patch alike
        within, to_patch = bias[:, :, :P, :P], bias[:, :, :P, P : P + 1]
        bias = torch.cat([within, to_patch.expand(-1, -1, -1, k.shape[2] - P)], dim=3)
    prefix = fused_attention(q[:, :, :P], k, v, bias, rate)
    return torch.cat([prefix, patches], dim=2)


class LocalAttention(SelfAttention):
    """Attention in the sets of windows of `ViTConfig.windows_of`, one after another.

    One set is Swin's attention without the shift (Liu et al. 2021, section 3.2).
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.windows_of = config.windows_of

    def weights(self, q: Tensor, k: Tensor, layout: Layout) -> Tensor:
        """The steps' linear map of the values, (B, heads, T, T): their result for the identity."""
        T = q.shape[2]
        weights = torch.eye(T, dtype=q.dtype, device=q.device).expand(*q.shape[:2], T, T)
        for window in self.windows_of(layout.grid):
            weights = attend_in_windows(q, k, weights, window, layout)
        return weights

    def mix(self, qkv: Tensor, layout: Layout, queries: slice, rate: float) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, hd)
        for window in self.windows_of(layout.grid):
            v = attend_in_windows(q, k, v, window, layout, rate)
        return join_heads(v[:, :, queries])
