"""Position embeddings: added to the tokens (paper, equation 1 and appendix D.4), or passed to attention.

Every kind has one interface: `forward` adds to the tokens, `layout` describes them to attention, `resize`
adopts another grid. Learned embeddings are interpolated in two dimensions (paper, section 3.2).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.models.config import ViTConfig

Grid = tuple[int, int]
Arguments = ParamSpec("Arguments")
Table = TypeVar("Table")

# The libraries' interpolations differ: at a new resolution the logits change in the third digit.
_RESAMPLING: dict[str, dict[str, Any]] = {
    "timm": {"mode": "bicubic", "antialias": True},
    "huggingface": {"mode": "bicubic"},
    "torchvision": {"mode": "bicubic", "align_corners": True},
    "jax": {"mode": "bilinear", "align_corners": True},  # scipy.ndimage.zoom of order 1
    "dinov2": {"mode": "bicubic"},
}


def resample_grid(image: Tensor, new_grid: Grid, rule: str = "timm") -> Tensor:
    """Interpolate values on a grid by a library's rule, in float32: (1, D, gh, gw) -> (1, D, *new_grid)."""
    if new_grid[1] == 1 < new_grid[0]:  # torch 2.13's antialiased bicubic is right for rows, not for columns
        return resample_grid(image.mT, (1, new_grid[0]), rule).mT
    if rule != "dinov2":
        return F.interpolate(image.float(), size=new_grid, **_RESAMPLING[rule]).to(image.dtype)
    # DINOv2 sets a slightly larger scale, so that rounding cannot lose a row. The kernel steps by the scale,
    # not by the size, and the published results were measured so.
    (gh, gw), (new_gh, new_gw) = image.shape[-2:], new_grid
    scale = ((new_gh + 0.1) / gh, (new_gw + 0.1) / gw)
    return F.interpolate(image.float(), scale_factor=scale, **_RESAMPLING[rule]).to(image.dtype)


def resample_positions(
    positions: Tensor, old_grid: Grid, new_grid: Grid, num_prefix_tokens: int, rule: str = "timm"
) -> Tensor:
    """Interpolate position embeddings to another grid, but not the prefix's: (1, T, D) -> (1, T', D)."""
    if old_grid == new_grid:
        return positions
    prefix, patches = positions[:, :num_prefix_tokens], positions[:, num_prefix_tokens:]
    image = patches.reshape(1, *old_grid, -1).permute(0, 3, 1, 2)  # (1, D, gh, gw)
    image = resample_grid(image, new_grid, rule)
    return torch.cat([prefix, image.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


# Cached tables must be plain tensors, whatever mode their first caller was in: not of inference mode, not the
# fake tensors of torch.export. They stay on the device: a copy in every forward pass would block on the GPU.

CPU = torch.device("cpu")


def workplace(device: torch.device) -> torch.device:
    """The device to compute a table on: the CPU, for the same numbers; in a graph, a copy would block."""
    in_graph = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return device if in_graph and device.type == "cuda" else CPU


def cached(make: Callable[Arguments, Table]) -> Callable[Arguments, Table]:
    """Cache the last tables; compiled and exported graphs compute their own."""
    lookup = functools.lru_cache(maxsize=16)(make)

    @functools.wraps(make)
    def table(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Table:
        if torch.compiler.is_compiling():
            return make(*args, **kwargs)
        return lookup(*args, **kwargs)  # type: ignore[arg-type]

    return table


@cached
def sincos_table(
    kind: str, grid: Grid, embed_dim: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The embedding of every patch of a grid, (1, N, D); see `SinCosPositions`."""
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
    """Sines and cosines of places (N,) at `dim` frequencies 10000^(-k / last): two tensors (N, dim)."""
    exponents = -torch.arange(dim, dtype=torch.float64, device=places.device) / max(1, last)
    angles = places.double()[:, None] * 10000.0**exponents
    return angles.sin(), angles.cos()


@dataclasses.dataclass
class Layout:
    """Where the tokens of a sequence lie in the image, for attention."""

    grid: Grid
    """Rows and columns of patches."""
    num_prefix_tokens: int
    """Tokens before the patches."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosines and sines for the patches' queries and keys, float32 ([B,] N, heads or 1, hd)."""
    biases: dict[Grid, Tensor] = dataclasses.field(default_factory=dict)
    """By window: numbers to add to the scores in it and its prefix, (1, heads, P + n, P + n)."""
    by_block: "tuple[Layout, ...]" = ()
    """Layouts that differ by block, one for each; empty if all blocks share this one."""

    def of_block(self, index: int) -> "Layout":
        """The layout of one block."""
        return self.by_block[index] if self.by_block else self

    def bias(self, window: Grid) -> Tensor | None:
        """The numbers to add to the scores in a window; while exporting its size may be a symbol."""
        return self.biases[window] if self.biases else None

    def merge(self, tokens: Tensor) -> Tensor:
        """Merge tokens between attention and MLP, here none: (B, Q, D) -> (B, Q - r, D)."""
        return tokens

    def expand(self, tokens: Tensor) -> Tensor:
        """Give each of the T tokens the state that it was merged into: (B, Q, D) -> (B, T, D)."""
        return tokens

    def expand_weights(self, weights: Tensor) -> Tensor:
        """Attention weights between the T tokens: (B, heads, rows, Q) -> (B, heads, rows or T, T)."""
        return weights

    def select(self, visible: Tensor) -> Self:
        """The layout of some patches of each image, by their indices (B, N')."""
        blocks = tuple(layout.select(visible) for layout in self.by_block)
        if self.rotation is None:
            return dataclasses.replace(self, by_block=blocks) if blocks else self
        cos, sin = self.rotation
        return dataclasses.replace(self, rotation=(cos[visible], sin[visible]), by_block=blocks)


class Positions(nn.Module):
    """No position embedding: the encoder sees a set of patches. Base class of the other kinds."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.num_prefix_tokens = config.num_prefix_tokens
        self.rule = config.embedding.resample

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Add the embeddings of a grid to tokens (B, T, D); learned ones are interpolated to other grids."""
        table = self.table_for(tokens, grid)
        if table is None:
            return tokens
        skipped = tokens.shape[1] - table.shape[1]  # a prefix without positions
        if skipped == 0:
            return tokens + table
        return torch.cat([tokens[:, :skipped], tokens[:, skipped:] + table], dim=1)

    def table(self, grid: Grid) -> Tensor | None:
        """The embeddings, (1, T, D), or (1, N, D) if the prefix has none; None if nothing is added."""
        return None

    def table_for(self, tokens: Tensor, grid: Grid) -> Tensor | None:
        """The table in the tokens' dtype, so that under autocast the residual stream stays bf16."""
        table = self.table(grid)
        return None if table is None else table.to(tokens.device, tokens.dtype)

    def layout(self, grid: Grid, device: torch.device) -> Layout:
        """The layout of a grid's tokens."""
        return Layout(grid, self.num_prefix_tokens)

    def interpolated(self, grid: Grid) -> dict[str, Tensor]:
        """The parameters that depend on the grid, by name, for another grid."""
        return {}

    @torch.no_grad()
    def resize(self, grid: Grid) -> None:
        """Adopt another grid: interpolate the parameters, and replace them by new ones."""
        if grid != self.grid:
            for name, value in self.interpolated(grid).items():
                trains = self.get_parameter(name).requires_grad
                setattr(self, name, nn.Parameter(value, requires_grad=trains))
        self.grid = grid


class LearnedPositions(Positions):
    """E_pos of equation 1: one learned vector per token; patches are numbered row by row."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.covered_prefix = config.num_prefix_tokens if config.embedding.learned == "all" else 0
        length = self.covered_prefix + self.grid[0] * self.grid[1]
        exists = config.embedding.learned != "none"  # attention may have positions of its own
        self.weight = nn.Parameter(torch.zeros(1, length, config.embed_dim)) if exists else None

    def table(self, grid: Grid) -> Tensor | None:
        if self.weight is None:
            return None
        return resample_positions(self.weight, self.grid, grid, self.covered_prefix, self.rule)

    def interpolated(self, grid: Grid) -> dict[str, Tensor]:
        table = self.table(grid)
        return {} if table is None else {"weight": table}


class LearnedAxes(Positions):
    """The paper's 2-D embedding: the sum of a learned vector per row and one per column (appendix D.4)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.rows = nn.Parameter(torch.zeros(1, self.grid[0], config.embed_dim))
        self.columns = nn.Parameter(torch.zeros(1, self.grid[1], config.embed_dim))

    def interpolated(self, grid: Grid) -> dict[str, Tensor]:
        rows = resample_positions(self.rows, (self.grid[0], 1), (grid[0], 1), 0, self.rule)
        columns = resample_positions(self.columns, (1, self.grid[1]), (1, grid[1]), 0, self.rule)
        return {"rows": rows, "columns": columns}

    def table(self, grid: Grid) -> Tensor:
        rows, columns = self.interpolated(grid).values()
        return (rows[:, :, None] + columns[:, None]).flatten(1, 2)  # (1, gh, gw, D) -> (1, N, D)


class SinCosPositions(Positions):
    """Fixed sines and cosines, exact on any grid.

    `sincos_1d` numbers the patches row by row (Vaswani et al. 2017, section 3.5). `sincos_2d` gives half of
    the channels to each axis, columns first, as MAE does. `sincos_2d_big_vision` has its slowest frequency
    at exactly 1/10000 instead of just above it.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.kind = config.embedding.positions
        self.embed_dim = config.embed_dim

    def table(self, grid: Grid) -> Tensor:
        return sincos_table(self.kind, grid, self.embed_dim)

    def table_for(self, tokens: Tensor, grid: Grid) -> Tensor:
        return sincos_table(self.kind, grid, self.embed_dim, tokens.device, tokens.dtype)  # cached there
