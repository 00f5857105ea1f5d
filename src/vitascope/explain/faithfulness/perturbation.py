"""Images with some of their cells removed, and the curves of the model's answer to them.

The imputation is the "Noisy Linear Imputation" of ROAD (Rong et al. 2022, "A Consistent and Efficient
Evaluation Strategy for Attribution Methods"). A grey patch shows a model where something was cut out; pixels
that continue their neighbours hardly do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import scipy.sparse as sparse
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import splu
from torch import Tensor

from vitascope.errors import UserError
from vitascope.explain.heatmaps import cell_of_pixels

BLUR = 1 / 8
"""Standard deviation of the blur that insertion starts from, as a share of the side: 28 pixels at 224."""
NOISE = 0.01
"""Standard deviation of the noise on imputed pixels, in normalized values."""
DIRECT, DIAGONAL = 1 / 6, 1 / 12
"""Weights of a pixel's four direct and four diagonal neighbours; their sum is 1."""
TOLERANCE = 1e-10
"""Of conjugate gradients: the residual's norm as a share of the right-hand side's."""
CHECKED_EVERY = 32
"""Their steps between two looks at it, for which the device has to wait."""


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
        if self.image.device.type == "cpu":  # where a direct solution is faster, above all of small images
            yield from (impute(self.image, removed, self._noise) for removed in (*least, *most))
        else:
            yield from impute_together(self.image, torch.stack([*least, *most]), self._noise)


def areas(plan: PerturbationPlan, ends: Tensor, variants: Tensor) -> tuple[float, float, float, float]:
    """Areas under deletion and insertion, means with the least and the most relevant imputed; float64
    inputs."""
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
    neighbours, plus noise. At the border, the weights of the existing neighbours are scaled to sum to 1."""
    C, H, W = image.shape
    gone = removed.cpu().numpy().ravel()  # (HW,)
    if gone.all():
        raise UserError(f"all {H * W} pixels are removed: none is left to impute them from")
    if not gone.any():
        return image.clone()
    system, order = _system(H, W)
    unknown, known = order[gone[order]], np.flatnonzero(~gone)
    rows = system[unknown]  # (U, HW)
    pixels = image.detach().cpu().double().reshape(C, H * W).numpy().T  # (HW, C)
    # The matrix is symmetric and positive definite: no pivots, and `order` already keeps the factors sparse.
    factors = splu(
        rows[:, unknown].tocsc(),
        permc_spec="NATURAL",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    filled = np.zeros_like(pixels)
    filled[unknown] = factors.solve(-(rows[:, known] @ pixels[known]))
    means = torch.from_numpy(filled.T).reshape(C, H, W).to(image)
    return torch.where(removed.to(image.device), means + noise, image)


def impute_together(image: Tensor, removed: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """As `impute`, of an image (C, H, W) without the pixels of each mask, bool (n, H, W): (n, C, H, W).

    All are solved at once by conjugate gradients in float64, where the image is; the relative difference is
    below 1e-5. No mask removes all pixels.
    """
    gone = removed[:, None]  # (n, 1, H, W)
    pixels = image.detach().double()
    ring = [[DIAGONAL, DIRECT, DIAGONAL], [DIRECT, 0.0, DIRECT], [DIAGONAL, DIRECT, DIAGONAL]]
    weights = torch.tensor(ring, dtype=torch.float64, device=image.device)[None, None]

    def around(values: Tensor) -> Tensor:
        """The weighted sum of each pixel's neighbours, as far as they are removed, (n, C, H, W)."""
        summed = F.conv2d(values.flatten(0, 1)[:, None], weights, padding=1)
        return torch.where(gone, summed.view(values.shape), 0.0)

    total = F.conv2d(torch.ones_like(pixels[:1])[None], weights, padding=1)  # (1, 1, H, W)
    residual = around(torch.where(gone, 0.0, pixels))  # (n, C, H, W), the right-hand side
    means, direction = torch.zeros_like(residual), residual
    squares = residual.square().sum((2, 3), keepdim=True)  # (n, C, 1, 1)
    enough = squares * TOLERANCE**2
    for step in range(removed[0].numel()):
        if step % CHECKED_EVERY == 0 and bool((squares <= enough).all()):
            break
        product = total * direction - around(direction)
        curvature = (direction * product).sum((2, 3), keepdim=True)
        length = torch.where(squares > 0, squares / curvature, 0.0)
        means, residual = means + length * direction, residual - length * product
        before, squares = squares, residual.square().sum((2, 3), keepdim=True)
        direction = residual + torch.where(before > 0, squares / before, 0.0) * direction
    return torch.where(gone, means.to(image) + noise, image)


@functools.lru_cache(maxsize=4)
def _system(H: int, W: int) -> tuple[sparse.csr_array, npt.NDArray[np.int64]]:
    """The symmetric matrix (HW, HW) of sum_j w_ij (x_i - x_j) = 0, and an elimination order."""
    down, across = (sparse.eye_array(n, k=1) + sparse.eye_array(n, k=-1) for n in (H, W))
    weights = DIRECT * (
        sparse.kron(down, sparse.eye_array(W)) + sparse.kron(sparse.eye_array(H), across)
    ) + DIAGONAL * sparse.kron(down, across)
    matrix = sparse.diags_array(weights.sum(axis=1)) - weights
    pixels = np.arange(H * W).reshape(H, W)
    return sparse.csr_array(matrix), np.concatenate(_dissect(pixels))


def _dissect(pixels: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Nested dissection (George 1973): both halves of the pixels, each likewise, then the line between
    them."""
    # Elimination fills in little: at 224 x 224 a third faster than SuperLU's own orders.
    if pixels.size <= 16:
        return [pixels.ravel()]
    if len(pixels) < pixels.shape[1]:
        pixels = pixels.T
    middle = len(pixels) // 2
    return [*_dissect(pixels[:middle]), *_dissect(pixels[middle + 1 :]), pixels[middle]]
