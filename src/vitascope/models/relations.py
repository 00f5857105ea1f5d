"""Positions that attention sees: rotations of queries and keys, and numbers that are added to the scores.

Learned positions may be added to the tokens too (the option `absolute`). `position_embedding` creates every
kind.
"""

import math

import torch
from torch import Tensor, nn

from vitascope.models.config import ViTConfig
from vitascope.models.options import pair
from vitascope.models.positions import (
    CPU,
    Grid,
    Layout,
    LearnedAxes,
    LearnedPositions,
    Positions,
    SinCosPositions,
    cached,
    resample_grid,
    workplace,
)


@cached
def rotary_table(
    grid: Grid, head_dim: int, base: float, rounded: bool = False, device: torch.device = CPU
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every patch of a grid, float32 (N, 1, hd); see `RotaryPositions`."""
    count = head_dim // 4  # for some widths, rounding of the step gives one more
    where = workplace(device)
    with torch.inference_mode(False):
        periods = base ** torch.arange(0, 1, 4 / head_dim, dtype=torch.float32, device=where)[:count]
        frequencies = 1 / (periods.bfloat16().float() if rounded else periods)
        centres = [torch.arange(0.5, side, dtype=torch.float32, device=where) / side * 2 - 1 for side in grid]
        places = torch.stack(torch.meshgrid(*centres, indexing="ij"), dim=-1).flatten(0, 1)  # (N, 2)
        angles = (2 * math.pi * places[:, :, None] * frequencies).flatten(1).tile(2)[:, None]  # (N, 1, hd)
        return angles.cos().to(device), angles.sin().to(device)


@cached
def axial_table(
    grid: Grid, head_dim: int, base: float, stretched: Grid | None, offset: float, device: torch.device = CPU
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every patch of a grid, float32 (N, 1, hd); see `AxialRotary`."""
    where = workplace(device)
    with torch.inference_mode(False):
        exponents = torch.arange(head_dim // 4, dtype=torch.float32, device=where) / (head_dim // 4)
        frequencies = 1 / base**exponents
        numbers = [torch.arange(side, dtype=torch.float32, device=where) + offset for side in grid]
        if stretched is not None:
            sides = zip(numbers, grid, stretched, strict=True)
            numbers = [number / side * whole for number, side, whole in sides]
        places = torch.stack(torch.meshgrid(*numbers, indexing="ij"), dim=-1).flatten(0, 1)  # (N, 2)
        angles = (places[:, :, None] * frequencies).flatten(1).tile(2)[:, None]  # (N, 1, hd)
        return angles.cos().to(device), angles.sin().to(device)


class RotaryPositions(LearnedPositions):
    """DINOv3's rotary embeddings in 2-D (Su et al. 2021; Siméoni et al. 2025, section 3.2).

    Rotates queries and keys of patches by angles 2 pi p / base^(4 k / hd), p being the patch's centre in
    [-1, 1] along an axis: the row gives the first half of the angles, the column the second.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.head_dim = config.head_dim
        self.base = config.rotary.rotary_base
        self.rounded = config.rotary.rotary_rounded

    def layout(self, grid: Grid, device: torch.device) -> Layout:
        tables = rotary_table(grid, self.head_dim, self.base, self.rounded, device)
        return Layout(grid, self.num_prefix_tokens, rotation=tables)


class AxialRotary(RotaryPositions):
    """The same with angles n / base^(4 k / hd), n being the patch's row or column (EVA-02, RoPE-ViT's axial).

    Rows and columns count from `rotary_offset`; with `rotary_grid` they are stretched to that many.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        options = config.rotary
        self.stretched = None if options.rotary_grid is None else pair(options.rotary_grid)
        self.offset = options.rotary_offset

    def layout(self, grid: Grid, device: torch.device) -> Layout:
        tables = axial_table(grid, self.head_dim, self.base, self.stretched, self.offset, device)
        return Layout(grid, self.num_prefix_tokens, rotation=tables)


class MixedRotary(RotaryPositions):
    """Angles f_y y + f_x x of row y and column x, with learned frequencies (Heo et al. 2024, "RoPE-Mixed").

    Each head of each block has its own pair of frequencies for every pair of channels.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        shape = (2, config.depth, config.num_heads, config.head_dim // 2)
        self.frequencies = nn.Parameter(torch.zeros(shape))  # of columns, of rows

    @torch.no_grad()
    def start(self) -> None:
        """Axial frequencies, turned by a random angle in each head (their section 3.2)."""
        _, depth, heads, pairs = self.frequencies.shape
        lengths = self.base ** -(torch.arange(pairs // 2) * 2 / pairs)
        turns = torch.rand(depth, heads, 1) * 2 * math.pi
        turns = torch.cat([turns, turns + math.pi / 2], dim=2).repeat_interleave(pairs // 2, dim=2)
        self.frequencies.copy_(torch.stack([turns.cos(), turns.sin()]) * lengths.tile(2))

    def layout(self, grid: Grid, device: torch.device) -> Layout:
        columns, rows = self.frequencies.float()[
            ..., None, :
        ]  # (L, heads, 1, hd / 2); bf16 would round angles
        y = torch.arange(grid[0], dtype=torch.float32, device=device).repeat_interleave(grid[1])[:, None]
        x = torch.arange(grid[1], dtype=torch.float32, device=device).repeat(grid[0])[:, None]
        angles = (x * columns + y * rows).transpose(1, 2).tile(2)  # (L, N, heads, hd)
        tables = zip(angles.cos(), angles.sin(), strict=True)
        blocks = tuple(Layout(grid, self.num_prefix_tokens, rotation=table) for table in tables)
        return Layout(grid, self.num_prefix_tokens, by_block=blocks)


class RelativeBias(LearnedPositions):
    """A learned number per head and offset between two patches, added to their score in all blocks.

    Paper, appendix D.4; Raffel et al. 2020. Scores with the prefix have three numbers of their own: prefix to
    patch, patch to prefix, prefix to prefix (as in BEiT).
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        gh, gw = self.grid
        self.windows_of = config.windows_of
        self.offsets = nn.Parameter(torch.zeros(config.num_heads, 2 * gh - 1, 2 * gw - 1))
        self.prefix = nn.Parameter(torch.zeros(config.num_heads, 3)) if self.num_prefix_tokens else None

    def layout(self, grid: Grid, device: torch.device) -> Layout:
        offsets = self.offsets if grid == self.grid else self.interpolated(grid)["offsets"]
        return self.layout_of(offsets, self.prefix, grid)

    def layout_of(self, offsets: Tensor, prefix: Tensor | None, grid: Grid) -> Layout:
        """The layout for numbers by offset, (heads, 2 gh - 1, 2 gw - 1), and of the prefix, (heads, 3)."""
        biases = {window: self.bias(offsets, prefix, grid, window)[None] for window in self.windows_of(grid)}
        return Layout(grid, self.num_prefix_tokens, biases=biases)

    def interpolated(self, grid: Grid) -> dict[str, Tensor]:
        size = (2 * grid[0] - 1, 2 * grid[1] - 1)
        offsets = resample_grid(self.offsets.flatten(end_dim=-3)[None], size, self.rule)[0]
        return super().interpolated(grid) | {"offsets": offsets.view(*self.offsets.shape[:-2], *size)}

    def bias(self, offsets: Tensor, prefix: Tensor | None, grid: Grid, window: Grid) -> Tensor:
        """The numbers to add to the scores in a window with its prefix: (heads, P + n, P + n)."""
        (gh, gw), (wh, ww), P = grid, window, self.num_prefix_tokens
        y = torch.arange(wh, device=offsets.device).repeat_interleave(ww)  # (n,)
        x = torch.arange(ww, device=offsets.device).repeat(wh)
        between = offsets[:, gh - 1 + y[:, None] - y, gw - 1 + x[:, None] - x]  # (heads, n, n)
        if prefix is None:
            return between
        n = wh * ww
        to_patch, to_prefix, within = (score[:, None, None] for score in prefix.unbind(1))
        above = torch.cat([within.expand(-1, P, P), to_patch.expand(-1, P, n)], dim=2)
        below = torch.cat([to_prefix.expand(-1, n, P), between], dim=2)
        return torch.cat([above, below], dim=1)


class BlockRelativeBias(RelativeBias):
    """The same with numbers of its own for each block (BEiT's)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.offsets = nn.Parameter(self.offsets.new_zeros(config.depth, *self.offsets.shape))
        if self.prefix is not None:
            self.prefix = nn.Parameter(self.prefix.new_zeros(config.depth, *self.prefix.shape))

    def layout(self, grid: Grid, device: torch.device) -> Layout:
        offsets = self.offsets if grid == self.grid else self.interpolated(grid)["offsets"]
        prefixes = [None] * len(offsets) if self.prefix is None else list(self.prefix)
        blocks = tuple(self.layout_of(*parts, grid) for parts in zip(offsets, prefixes, strict=True))
        return Layout(grid, self.num_prefix_tokens, by_block=blocks)


def position_embedding(config: ViTConfig) -> Positions:
    """Create the kind `config.embedding.positions`."""
    kinds = {
        "none": Positions,
        "learned": LearnedPositions,
        "learned_2d": LearnedAxes,
        "sincos_1d": SinCosPositions,
        "sincos_2d": SinCosPositions,
        "sincos_2d_big_vision": SinCosPositions,
        "relative": RelativeBias,
        "relative_by_block": BlockRelativeBias,
        "rotary": RotaryPositions,
        "rotary_axial": AxialRotary,
        "rotary_mixed": MixedRotary,
    }
    return kinds[config.embedding.positions](config)
