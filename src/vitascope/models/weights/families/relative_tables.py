"""BEiT's relative position bias: a table (n + 3, heads) for all offsets and for scores with the class token.

The last three rows are for the class token with patches, patches with it, and it with itself: our parameter
`prefix`. The others are our `offsets`, row by row.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import Source, State, Stored

TABLE, OFFSETS, PREFIX = "relative_position_bias_table", "relative_offsets", "relative_prefix"


def relative_names(by_block: bool, depth: int, block: str, shared: str) -> Mapping[str, Stored]:
    """The places of our parameters, after `split_tables`: `block` has `{}` for its number."""
    names = [block.format(index) for index in range(depth)] if by_block else [shared]
    parts = (("offsets", OFFSETS), ("prefix", PREFIX))
    return {
        f"positions.{ours}": Stored(
            tuple(name + theirs for name in names),
            (lambda tensors: torch.stack(tuple(tensors))) if by_block else (lambda tensors: tensors[0]),
            (lambda tensor: tensor.unbind()) if by_block else (lambda tensor: [tensor]),
        )
        for ours, theirs in parts
    }


def relative_options(source: Source, block: str, shared: str, *, learned: bool) -> dict[str, Any]:
    """The options of relative positions, perhaps beside `learned` ones; empty if the file has no tables."""
    by_block, for_all = source.has(block.format(0) + OFFSETS), source.has(shared + OFFSETS)
    if by_block and for_all:
        raise CheckpointError(
            f"{source.name}: relative positions of all blocks beside those of each: vitascope has no model "
            "with both"
        )
    if not (by_block or for_all):
        return {}
    kind = "relative_by_block" if by_block else "relative"
    return {"positions": kind, "absolute": "all" if learned else "none"}


def split_tables(tensors: State, grid: tuple[int, int] | None, place: str) -> None:
    """Split tables in two, in place, by the grid of patches, None if square; `place` is for messages."""
    for name in [name for name in tensors if name.endswith(TABLE)]:
        table = tensors[name]
        if table.ndim != 2 or table.shape[0] < 4:
            raise CheckpointError(f"{place}: {name} {tuple(table.shape)} is no table of relative positions")
        count = table.shape[0] - 3
        side = math.isqrt(count)
        sides = (side, side) if grid is None else (2 * grid[0] - 1, 2 * grid[1] - 1)
        if sides[0] * sides[1] != count:
            raise CheckpointError(
                f"{place}: {name} has {count} offsets, and a grid of {grid or 'a square'} has "
                f"{sides[0]} x {sides[1]}"
            )
        del tensors[name]
        before = name.removesuffix(TABLE)
        tensors[before + OFFSETS] = table[:-3].T.reshape(-1, *sides)
        tensors[before + PREFIX] = table[-3:].T


def join_tables(state: State) -> None:
    """The inverse of `split_tables`, in place."""
    for name in [name for name in state if name.endswith(OFFSETS)]:
        before = name.removesuffix(OFFSETS)
        offsets, prefix = state.pop(name), state.pop(before + PREFIX)
        state[before + TABLE] = torch.cat([offsets.flatten(1), prefix], dim=1).T.contiguous()
