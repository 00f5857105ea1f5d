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


@dataclasses.dataclass(frozen=True)
class Curves:
    """The probability of the class as cells are removed; float64."""

    deletion: Tensor
    """(steps + 1,), from the whole image to nothing, most relevant first."""
    insertion: Tensor
    """(steps + 1,), from the blurred image to the whole one, most relevant first."""
    lerf: Tensor
    """(shares,), the least relevant imputed."""
    morf: Tensor
    """(shares,), the most relevant imputed."""

    @classmethod
    def of(cls, plan: Plan, ends: Tensor, variants: Tensor) -> Curves:
        """From the probabilities of `ends` (3,) and `variants` (plan.variants,) of a `Perturbation`."""
        whole, deleted, blurred = ends.split(1)
        inner, shares = plan.steps - 1, len(plan.shares)
        deletion, insertion, lerf, morf = variants.split([inner, inner, shares, shares])
        return cls(torch.cat([whole, deletion, deleted]), torch.cat([blurred, insertion, whole]), lerf, morf)

    def areas(self, plan: Plan) -> tuple[float, float, float, float]:
        """The areas under deletion and insertion, and the means of `lerf` and `morf`."""
        share = torch.tensor(plan.counts, dtype=torch.float64) / plan.cells  # (steps + 1,)
        areas = (torch.trapezoid(curve, share) for curve in (self.deletion, self.insertion))
        deletion, insertion = map(float, areas)
        return deletion, insertion, float(self.lerf.mean()), float(self.morf.mean())


def blur(image: Tensor) -> Tensor:
    """A Gaussian blur of (C, H, W), `BLUR` of each side wide; at the border, only of pixels that exist."""
    down, across = (_gaussian(side) for side in image.shape[1:])
    return (down @ image.cpu().double() @ across.T).to(image)  # float64: unaffected by autocast


def _gaussian(side: int) -> Tensor:
    """float64 (side, side): the weights of all pixels in each blurred one; rows sum to one."""
    distance = torch.arange(side)[:, None] - torch.arange(side)
    return torch.softmax(-0.5 * (distance.double() / (BLUR * side)) ** 2, dim=1)
