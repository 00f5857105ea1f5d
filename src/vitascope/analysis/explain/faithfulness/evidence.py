"""The evidence for one heatmap: its deletion curve beside those of random maps, and the p-value."""

import dataclasses
import itertools
import math
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope.analysis.explain.faithfulness import compare, perturbation
from vitascope.analysis.explain.faithfulness.results import MERIT
from vitascope.analysis.explain.heatmaps import Count, grid_of
from vitascope.analysis.explain.inputs import Images, as_images
from vitascope.analysis.explain.targets import TargetLike
from vitascope.arguments import Range, checked
from vitascope.errors import UserError
from vitascope.models.vision_model import VisionModel, evaluation_mode

IMPUTED = 0.3
"""The share of the cells that ROAD imputes; more shares take longest, and hardly change p-values."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Evidence:
    """The deletion curves and the merits of a map and of random maps."""

    shares: npt.NDArray[np.float64]
    """Share of the cells that are deleted, (S,), from 0 to 1."""
    curve: npt.NDArray[np.float64]
    """Probability of the class by the map's order, (S,)."""
    random: npt.NDArray[np.float64]
    """Probability of the class by random orders, (n, S)."""
    merit: float
    """As `Scores.merit`, the mean of deletion, insertion and ROAD's two curves: higher is better."""
    random_merits: npt.NDArray[np.float64]
    """Merits of the random maps, (n,)."""

    @property
    def p(self) -> float:
        """The p-value of the permutation test: the share of maps, this one among them, with at least its
        merit, (1 + k) / (1 + n) (Phipson and Smyth 2010)."""
        return float((1 + (self.random_merits >= self.merit).sum()) / (1 + len(self.random_merits)))

    def __str__(self) -> str:
        return f"p = {self.p:.2g} against {len(self.random)} random maps"


@checked
def evidence(
    model: VisionModel,
    image: Images,
    heatmap: Tensor | npt.NDArray[Any],
    target: TargetLike = None,
    *,
    maps: Count = 99,
    steps: Count = 10,
    seed: Annotated[int, Range(ge=0)] = 0,
    batch_size: Count = 64,
) -> Evidence:
    """Test whether a heatmap says more about a class than random ones, by the curves of `compare`.

    The null hypothesis is that the order of the cells by heat has nothing to do with the model, which runs on
    2 (maps + 1) steps + 3 variants.

    Args:
        image: one picture, or normalized floats (1, C, H, W).
        heatmap: (grid_h, grid_w) or (1, grid_h, grid_w), a tensor or an array, of any scale.
        target: the class that the heatmap explains, by number or name; None is the predicted class.
        maps: random orders; the smallest p-value is 1 / (maps + 1).
        steps: points of the curves after their start; at most the number of cells.
        seed: of the random orders, and of the order of cells with equal heat.

    Raises:
        UserError: several images; a heatmap of another shape, or not finite; otherwise as `compare`.
    """
    images = as_images(model, image)
    if len(images) != 1:
        raise UserError(f"evidence is measured on one image, not {len(images)}")
    grid = grid_of(model, images)
    compare.check_cells(images, grid)
    heat = torch.as_tensor(heatmap).detach().cpu()
    compare.check_heat("evidence", heat[None] if heat.ndim == 2 else heat, grid)
    cells, rng = math.prod(grid), np.random.default_rng(seed)
    plan = perturbation.PerturbationPlan(cells=cells, steps=min(steps, cells), shares=(IMPUTED,))
    orders = [perturbation.order_of(heat, rng.permutation(cells))]
    orders += [torch.from_numpy(rng.permutation(cells)) for _ in range(maps)]
    with evaluation_mode(model):
        about = compare.explained_classes(model, images, target, batch_size)
        perturbed = perturbation.Perturbation(images[0], grid, plan, rng)
        variants = itertools.chain(perturbed.ends(), *map(perturbed.variants, orders))
        scored = compare.class_probabilities(model, variants, about, batch_size)
    ends, rest = scored[:3], scored[3:].reshape(maps + 1, -1)  # (3,), (n, variants)
    curves = torch.cat(
        [ends[:1].expand(maps + 1, 1), rest[:, : plan.steps - 1], ends[1:2].expand(maps + 1, 1)], 1
    )
    merits = np.array([perturbation.areas(plan, ends, row) for row in rest]) @ MERIT  # (n,)
    return Evidence(
        shares=np.array(plan.counts) / cells,
        curve=curves[0].numpy(),
        random=curves[1:].numpy(),
        merit=float(merits[0]),
        random_merits=merits[1:],
    )
