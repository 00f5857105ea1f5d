"""Images with some of their cells removed, and the curves of the model's answer to them.

The imputation is the "Noisy Linear Imputation" of ROAD (Rong et al. 2022, "A Consistent and Efficient
Evaluation Strategy for Attribution Methods"). A grey patch shows a model where something was cut out; pixels
that continue their neighbours hardly do.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import scipy.sparse as sparse
import torch
from scipy.sparse.linalg import splu
from torch import Tensor

from vitascope.analysis.explain.heatmaps import cell_of_pixels

BLUR = 1 / 8
"""Standard deviation of the blur that insertion starts from, as a share of the side: 28 pixels at 224."""
NOISE = 0.01
"""Standard deviation of the noise on imputed pixels, in normalized values."""
DIRECT, DIAGONAL = 1 / 6, 1 / 12
"""Weights of a pixel's four direct and four diagonal neighbours; their sum is 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerturbationPlan:
    """The number of cells removed at each point of the curves."""

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

    def __init__(
        self, image: Tensor, grid: tuple[int, int], plan: PerturbationPlan, rng: np.random.Generator
    ) -> None:
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
        """The images that measure an order of cells, int64 (N,), most relevant first; no ends of curves."""
        rank = order.argsort().to(self._cells.device)[self._cells]  # (H, W), 0 the most relevant
        between = self.plan.counts[1:-1]
        for count in between:
            yield torch.where(rank < count, 0.0, self.image)
        for count in between:
            yield torch.where(rank < count, self.image, self._blurred)
        least = [rank >= self.plan.cells - count for count in self.plan.imputed]
        most = [rank < count for count in self.plan.imputed]
        yield from (impute(self.image, removed, self._noise) for removed in (*least, *most))


def order_of(heat: Tensor, ties: npt.NDArray[np.int64]) -> Tensor:
    """The cells of a heatmap of N, hottest first, int64 (N,); equal ones in the order of `ties` (N,)."""
    return torch.from_numpy(np.lexsort((ties, -heat.double().numpy().ravel())))


def areas(plan: PerturbationPlan, ends: Tensor, variants: Tensor) -> tuple[float, float, float, float]:
    """Areas under deletion and insertion, means with least and most relevant imputed; float64 inputs."""
    whole, deleted, blurred = ends.split(1)  # probabilities of a `Perturbation`'s images
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


def impute(image: Tensor, removed: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Replace the pixels `removed`, bool (H, W), of an image (C, H, W) by the weighted mean of their
    neighbours, plus noise. At the border, the weights of the existing neighbours are scaled to sum to 1. At
    least one pixel is removed, and one is not."""
    C, H, W = image.shape
    gone = removed.cpu().numpy().ravel()  # (HW,)
    unknown, kept = np.flatnonzero(gone), np.flatnonzero(~gone)
    rows = _system(H, W)[unknown]  # (U, HW)
    pixels = image.detach().cpu().double().reshape(C, H * W).numpy().T  # (HW, C)
    # The matrix is symmetric and positive definite, so there is nothing to pivot.
    factors = splu(
        rows[:, unknown].tocsc(),
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    filled = np.zeros_like(pixels)
    filled[unknown] = factors.solve(-(rows[:, kept] @ pixels[kept]))
    means = torch.from_numpy(filled.T).reshape(C, H, W).to(image)
    return torch.where(removed.to(image.device), means + noise, image)


@functools.lru_cache(maxsize=4)
def _system(H: int, W: int) -> sparse.csr_array:
    """The symmetric matrix (HW, HW) of sum_j w_ij (x_i - x_j) = 0."""
    down, across = (sparse.eye_array(n, k=1) + sparse.eye_array(n, k=-1) for n in (H, W))
    weights = DIRECT * (
        sparse.kron(down, sparse.eye_array(W)) + sparse.kron(sparse.eye_array(H), across)
    ) + DIAGONAL * sparse.kron(down, across)
    return sparse.csr_array(sparse.diags_array(weights.sum(axis=1)) - weights)
