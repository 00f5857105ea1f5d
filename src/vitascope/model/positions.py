"""How tokens know their place: added to them (paper, equation 1 and appendix D.4), or told to attention.

Every kind has one interface: `forward` adds to the tokens what is added, `layout` says what attention needs,
`resize` makes another grid the model's own. Learned embeddings are interpolated in two dimensions (paper,
section 3.2); computed ones are computed for the grid at hand.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.model.config import ViTConfig

Grid = tuple[int, int]
Arguments = ParamSpec("Arguments")
Table = TypeVar("Table")

# How each library interpolates: at a new resolution the rules' logits differ in the third digit.
_RESAMPLING: dict[str, dict[str, Any]] = {
    "timm": {"mode": "bicubic", "antialias": True},
    "huggingface": {"mode": "bicubic"},
    "torchvision": {"mode": "bicubic", "align_corners": True},
    "jax": {"mode": "bilinear", "align_corners": True},  # scipy.ndimage.zoom of order 1
    "dinov2": {"mode": "bicubic"},
}


def resample_grid(image: Tensor, new_grid: Grid, rule: str = "timm") -> Tensor:
    """Interpolate values on a grid by a library's rule, in float32: (1, D, gh, gw) -> (1, D, *new_grid)."""
    if (
        new_grid[1] == 1 < new_grid[0]
    ):  # torch 2.13's antialiased bicubic is right for a row, not for a column
        return resample_grid(image.mT, (1, new_grid[0]), rule).mT
    if rule != "dinov2":
        return F.interpolate(image.float(), size=new_grid, **_RESAMPLING[rule]).to(image.dtype)
    # DINOv2 asks for a scale a little larger than it needs, so that rounding cannot lose a row; the scale,
    # not the size, is what its kernel steps by, and its weights were evaluated so.
    (gh, gw), (new_gh, new_gw) = image.shape[-2:], new_grid
    scale = ((new_gh + 0.1) / gh, (new_gw + 0.1) / gw)
    return F.interpolate(image.float(), scale_factor=scale, **_RESAMPLING[rule]).to(image.dtype)


def resample_positions(
    positions: Tensor, old_grid: Grid, new_grid: Grid, num_prefix_tokens: int, rule: str = "timm"
) -> Tensor:
    """Interpolate position embeddings to another grid of patches: (1, T, D) -> (1, T', D).

    The prefix (class token) has no place in the image and stays as it is. The same grid returns the tensor
    itself.
    """
    if old_grid == new_grid:
        return positions
    prefix, patches = positions[:, :num_prefix_tokens], positions[:, num_prefix_tokens:]
    image = patches.reshape(1, *old_grid, -1).permute(0, 3, 1, 2)  # (1, D, gh, gw)
    image = resample_grid(image, new_grid, rule)
    patches = image.permute(0, 2, 3, 1).flatten(1, 2)  # (1, N', D)
    return torch.cat([prefix, patches], dim=1)


# Tables are kept for whoever comes next, so they must be plain tensors: not of inference mode, not the
# stand-ins that torch.export computes with, whatever their first caller was in. They are kept where they are
# used: a copy to a GPU in every forward pass would wait until the GPU has nothing left to do.

CPU = torch.device("cpu")


def workplace(device: torch.device) -> torch.device:
    """Where a table for a device is computed: on the CPU, so that its numbers are the same for every device.

    Not in a compiled graph: that makes its tables in each call, and would wait for the copy each time.
    """
    in_graph = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return device if in_graph and device.type == "cuda" else CPU


def kept(make: Callable[Arguments, Table]) -> Callable[Arguments, Table]:
    """Keep the last tables that were made; what is compiled or exported makes its own, within its graph."""
    cached = functools.lru_cache(maxsize=16)(make)

    @functools.wraps(make)
    def table(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Table:
        if torch.compiler.is_compiling():
            return make(*args, **kwargs)
        return cached(*args, **kwargs)  # type: ignore[arg-type]

    return table


@kept
def sincos_table(
    kind: str, grid: Grid, embed_dim: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The fixed embedding of every patch of a grid, (1, N, D); see `SinCosPositions`."""
    (gh, gw), D, where = grid, embed_dim, workplace(device)
    with torch.inference_mode(False):
        if kind == "sincos_1d":
            waves = sincos(torch.arange(gh * gw, device=where), D // 2, last=D // 2)
        else:
            axes = (torch.arange(side, device=where) for side in grid)
            rows, columns = (axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij"))  # (N,) each
            last = D // 4 - 1 if kind == "sincos_2d_big_vision" else D // 4
            waves = (*sincos(columns, D // 4, last), *sincos(rows, D // 4, last))
        return torch.cat(waves, dim=1).float()[None].to(device, dtype)


def sincos(places: Tensor, dim: int, last: int) -> tuple[Tensor, ...]:
    """Sine and cosine of places (N,) at dim frequencies 10000^(-k / last): two of (N, dim)."""
    exponents = -torch.arange(dim, dtype=torch.float64, device=places.device) / max(1, last)
    angles = places.double()[:, None] * 10000.0**exponents
    return angles.sin(), angles.cos()


@kept
def rotary_table(
    grid: Grid, head_dim: int, base: float, rounded: bool = False, device: torch.device = CPU
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every patch of a grid, float32 (N, hd); see `RotaryPositions`."""
    count = head_dim // 4  # cut to, since a rounded step makes one too many for some widths
    where = workplace(device)
    with torch.inference_mode(False):
        periods = base ** torch.arange(0, 1, 4 / head_dim, dtype=torch.float32, device=where)[:count]
        frequencies = 1 / (periods.bfloat16().float() if rounded else periods)
        centres = [torch.arange(0.5, side, dtype=torch.float32, device=where) / side * 2 - 1 for side in grid]
        places = torch.stack(torch.meshgrid(*centres, indexing="ij"), dim=-1).flatten(0, 1)  # (N, 2)
        angles = (2 * math.pi * places[:, :, None] * frequencies).flatten(1).tile(2)  # (N, hd)
        return angles.cos().to(device), angles.sin().to(device)


@dataclasses.dataclass
class Layout:
    """Where the tokens of a sequence lie: what attention has to know beside the tokens."""

    grid: Grid
    """Rows and columns of patches."""
    num_prefix_tokens: int
    """Tokens before the patches."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosines and sines for the patches' queries and keys, float32 (N, hd) or (B, N, hd)."""
    biases: dict[Grid, Tensor] = dataclasses.field(default_factory=dict)
    """By window: numbers to add to the scores in it and its prefix, (1, heads, P + n, P + n)."""

    def bias(self, window: Grid) -> Tensor | None:
        """What adds to the scores in a window, if anything does; while exporting a size may be a symbol."""
        return self.biases[window] if self.biases else None

    def select(self, kept: Tensor) -> Layout:
        """The layout when each image keeps only some patches, indices (B, N')."""
        if self.rotation is None:
            return self
        cos, sin = self.rotation
        return dataclasses.replace(self, rotation=(cos[kept], sin[kept]))


class Positions(nn.Module):
    """No positions at all: the encoder sees a bag of patches. The other kinds override what they do."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.num_prefix_tokens = config.num_prefix_tokens

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Add positions to tokens (B, T, D) of a grid; another grid than the model's is interpolated to."""
        table = self.table_for(tokens, grid)
        if table is None:
            return tokens
        covered = table.shape[1]
        if covered == tokens.shape[1]:
            return tokens + table
        skipped = tokens.shape[1] - covered  # a prefix without positions
        return torch.cat([tokens[:, :skipped], tokens[:, skipped:] + table], dim=1)

    def table(self, grid: Grid) -> Tensor | None:
        """What `forward` adds, (1, T, D), or (1, N, D) where the prefix has none; None adds nothing."""
        return None

    def table_for(self, tokens: Tensor, grid: Grid) -> Tensor | None:
        """The table on the tokens' device and in their dtype.

        Under autocast the residual stream then stays bf16, which is 8% faster.
        """
        table = self.table(grid)
        return None if table is None else table.to(tokens.device, tokens.dtype)

    def layout(self, grid: Grid, device: torch.device) -> Layout:
        """What attention needs to know for a grid."""
        return Layout(grid, self.num_prefix_tokens)

    @torch.no_grad()
    def resize(self, grid: Grid) -> None:
        """Make another grid the model's own, by interpolation, for good; a parameter is a new one."""
        self.grid = grid


class LearnedPositions(Positions):
    """E_pos of equation 1: one learned vector a token, added to it; patches are numbered row by row."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.rule = config.embedding.resample
        self.covered_prefix = config.num_prefix_tokens if config.embedding.position_prefix else 0
        length = self.covered_prefix + self.grid[0] * self.grid[1]
        self.weight = nn.Parameter(torch.zeros(1, length, config.embed_dim))

    def table(self, grid: Grid) -> Tensor:
        """The parameter, interpolated where the grid is another."""
        return resample_positions(self.weight, self.grid, grid, self.covered_prefix, self.rule)

    @torch.no_grad()
    def resize(self, grid: Grid) -> None:
        """Interpolate the parameter."""
        if grid != self.grid:
            self.weight = nn.Parameter(self.table(grid), requires_grad=self.weight.requires_grad)
        self.grid = grid


class LearnedAxes(Positions):
    """A learned vector a row plus one a column: the paper's 2-D embedding, summed (appendix D.4)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.rule = config.embedding.resample
        self.rows = nn.Parameter(torch.zeros(1, self.grid[0], config.embed_dim))
        self.columns = nn.Parameter(torch.zeros(1, self.grid[1], config.embed_dim))

    def axes(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """Rows (1, gh, D) and columns (1, gw, D), each interpolated along its axis."""
        rows = resample_positions(self.rows, (self.grid[0], 1), (grid[0], 1), 0, self.rule)
        columns = resample_positions(self.columns, (1, self.grid[1]), (1, grid[1]), 0, self.rule)
        return rows, columns

    def table(self, grid: Grid) -> Tensor:
        """Every row with every column."""
        rows, columns = self.axes(grid)
        return (rows[:, :, None] + columns[:, None]).flatten(1, 2)  # (1, gh, gw, D) -> (1, N, D)

    @torch.no_grad()
    def resize(self, grid: Grid) -> None:
        """Interpolate both parameters."""
        if grid != self.grid:
            rows, columns = self.axes(grid)
            self.rows = nn.Parameter(rows, requires_grad=self.rows.requires_grad)
            self.columns = nn.Parameter(columns, requires_grad=self.columns.requires_grad)
        self.grid = grid


class SinCosPositions(Positions):
    """Fixed sines and cosines: nothing to learn, and any grid is exact.

    `sincos_1d` numbers the patches row by row (Vaswani et al. 2017, section 3.5). `sincos_2d` gives each
    half of the channels to one axis, columns first, as MAE does. `sincos_2d_big_vision` has its slowest
    frequency at exactly 1/10000 instead of just above it.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.kind = config.embedding.positions
        self.embed_dim = config.embed_dim

    def table(self, grid: Grid) -> Tensor:
        """The waves at every patch."""
        return sincos_table(self.kind, grid, self.embed_dim)

    def table_for(self, tokens: Tensor, grid: Grid) -> Tensor:
        """The same, kept on the device once it is there."""
        return sincos_table(self.kind, grid, self.embed_dim, tokens.device, tokens.dtype)


class RotaryPositions(Positions):
    """Rotary embeddings in 2-D as DINOv3 has them (Su et al. 2021; Siméoni et al. 2025, section 3.2).

    Queries and keys of patches are turned by angles 2 pi p / base^(4 k / hd), p being the patch's centre in
    [-1, 1] of each axis: the first half of the angles by its row, the second by its column. Prefix tokens
    are not turned.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.head_dim = config.head_dim
        self.base = config.embedding.rotary_base
        self.rounded = config.embedding.rotary_rounded

    def layout(self, grid: Grid, device: torch.device) -> Layout:
        """The layout with cosines and sines."""
        tables = rotary_table(grid, self.head_dim, self.base, self.rounded, device)
        return Layout(grid, self.num_prefix_tokens, rotation=tables)


class RelativeBias(Positions):
    """A learned number a head for each offset between two patches, added to their score.

    Shared by all blocks (paper, appendix D.4; Raffel et al. 2020). Scores with the prefix have three numbers
    of their own: prefix to patch, patch to prefix, prefix to prefix (as in BEiT).
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        gh, gw = self.grid
        self.rule = config.embedding.resample
        self.windows_of = config.windows_of
        self.offsets = nn.Parameter(torch.zeros(config.num_heads, 2 * gh - 1, 2 * gw - 1))
        has_prefix = self.num_prefix_tokens > 0
        self.prefix = nn.Parameter(torch.zeros(config.num_heads, 3)) if has_prefix else None

    def layout(self, grid: Grid, device: torch.device) -> Layout:
        """The layout with what adds to the scores."""
        offsets = self.offsets_for(grid)
        biases = {window: self.bias(offsets, grid, window)[None] for window in self.windows_of(grid)}
        return Layout(grid, self.num_prefix_tokens, biases=biases)

    def offsets_for(self, grid: Grid) -> Tensor:
        """The offsets of a grid, interpolated where it is another: (heads, 2*gh - 1, 2*gw - 1)."""
        if grid == self.grid:
            return self.offsets
        return resample_grid(self.offsets[None], (2 * grid[0] - 1, 2 * grid[1] - 1), self.rule)[0]

    def bias(self, offsets: Tensor, grid: Grid, window: Grid) -> Tensor:
        """What adds to the scores in a window with its prefix: (heads, P + n, P + n)."""
        (gh, gw), (wh, ww), P = grid, window, self.num_prefix_tokens
        y = torch.arange(wh, device=offsets.device).repeat_interleave(ww)  # (n,)
        x = torch.arange(ww, device=offsets.device).repeat(wh)
        between = offsets[:, gh - 1 + y[:, None] - y, gw - 1 + x[:, None] - x]  # (heads, n, n)
        if self.prefix is None:
            return between
        n = wh * ww
        to_patch, to_prefix, within = (score[:, None, None] for score in self.prefix.unbind(1))
        above = torch.cat([within.expand(-1, P, P), to_patch.expand(-1, P, n)], dim=2)
        below = torch.cat([to_prefix.expand(-1, n, P), between], dim=2)
        return torch.cat([above, below], dim=1)

    @torch.no_grad()
    def resize(self, grid: Grid) -> None:
        """Interpolate the offsets."""
        if grid != self.grid:
            self.offsets = nn.Parameter(self.offsets_for(grid), requires_grad=self.offsets.requires_grad)
        self.grid = grid


def position_embedding(config: ViTConfig) -> Positions:
    """The kind that `config.embedding.positions` names."""
    kinds = {
        "none": Positions,
        "learned": LearnedPositions,
        "learned_2d": LearnedAxes,
        "sincos_1d": SinCosPositions,
        "sincos_2d": SinCosPositions,
        "sincos_2d_big_vision": SinCosPositions,
        "relative": RelativeBias,
        "rotary": RotaryPositions,
    }
    return kinds[config.embedding.positions](config)
