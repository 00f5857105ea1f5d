"""Images with some of their cells removed, and the curves of the model's answer to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from vitascope.explain.faithfulness.imputation import impute
from vitascope.explain.heatmaps import cell_of_pixels

BLUR = 1 / 8
"""Standard deviation of the blur that insertion starts from, as a share of the side: 28 pixels at 224."""
NOISE = 0.01
"""Standard deviation of the noise on imputed pixels, in normalized values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How many cells are removed at each point of the curves."""

    cells: int
    """N, of the heatmap's grid."""
    steps: int
    """Of deletion and insertion; no more than cells."""
    shares: tuple[float, ...]
    """Shares of the cells that ROAD imputes; in (0, 1)."""

    @property
    def counts(self) -> list[int]:
        """Cells removed at each point of deletion, from 0 to N: `steps` + 1 of them, rising."""
        return [round(step * self.cells / self.steps) for step in range(self.steps + 1)]

    @property
    def imputed(self) -> list[int]:
        """Cells imputed at each share, rounded; at least one, and one stays."""
        return [min(max(round(share * self.cells), 1), self.cells - 1) for share in self.shares]

    @property
    def variants(self) -> int:
        """Images per heatmap; the ends of the curves are the same for all heatmaps."""
        return 2 * (self.steps - 1) + 2 * len(self.shares)


class Perturbation:
    """One image (C, H, W) whose cells are removed in three ways.

    Deletion replaces cells by zero, in normalized images the mean colour. Insertion starts from a blurred
    image. ROAD imputes, with the same noise for every heatmap.
    """

    def __init__(self, image: Tensor, grid: tuple[int, int], plan: Plan, rng: np.random.Generator) -> None:
        self.image = image.detach()
        self.plan = plan
        rows, columns = cell_of_pixels(grid, (image.shape[1], image.shape[2]))
        self._cells = (rows[:, None] * grid[1] + columns).to(image.device)  # (H, W)
        self._blurred = blur(self.image)
        self._noise = torch.from_numpy(rng.normal(scale=NOISE, size=tuple(image.shape))).to(image)

    def ends(self) -> Iterator[Tensor]:
        """The image, all of it deleted, and the blurred image: where curves start and end."""
        yield from (self.image, torch.zeros_like(self.image), self._blurred)

    def variants(self, order: Tensor) -> Iterator[Tensor]:
        """The `plan.variants` images that measure a heatmap.

        Args:
            order: int64 (N,), the cells from the most to the least relevant.

        Yields:
            (C, H, W): deletion without its ends, insertion without its ends, least relevant imputed at each
            share, most relevant imputed at each share.
        """
        rank = order.argsort().to(self._cells.device)[self._cells]  # (H, W), 0 the most relevant
        between = self.plan.counts[1:-1]
        for count in between:
            yield torch.where(rank < count, 0.0, self.image)
        for count in between:
            yield torch.where(rank < count, self.image, self._blurred)
        for count in self.plan.imputed:
            yield impute(self.image, rank >= self.plan.cells - count, self._noise)
        for count in self.plan.imputed:
            yield impute(self.image, rank < count, self._noise)


def areas(plan: Plan, ends: Tensor, variants: Tensor) -> tuple[float, float, float, float]:
    """The areas under deletion and insertion, and the means with the least and the most relevant imputed.

    `ends` (3,) and `variants` (plan.variants,) are the probabilities of a `Perturbation`'s images, float64.
    """
    whole, deleted, blurred = ends.split(1)
    inner, shares = plan.steps - 1, len(plan.shares)
    deletion, insertion, lerf, morf = variants.split([inner, inner, shares, shares])
    share = torch.tensor(plan.counts, dtype=torch.float64) / plan.cells  # (steps + 1,)
    return (
        float(torch.trapezoid(torch.cat([whole, deletion, deleted]), share)),
        float(torch.trapezoid(torch.cat([blurred, insertion, whole]), share)),
        float(lerf.mean()),
        float(morf.mean()),
    )


def blur(image: Tensor) -> Tensor:
    """A Gaussian blur of (C, H, W), `BLUR` of each side wide; at the border, only of pixels that exist."""
    down, across = (_gaussian(side) for side in image.shape[1:])
    return (down @ image.cpu().double() @ across.T).to(image)  # float64: unaffected by autocast


def _gaussian(side: int) -> Tensor:
    """float64 (side, side): the weights of all pixels in each blurred one; rows sum to one."""
    distance = torch.arange(side)[:, None] - torch.arange(side)
    return torch.softmax(-0.5 * (distance.double() / (BLUR * side)) ** 2, dim=1)
