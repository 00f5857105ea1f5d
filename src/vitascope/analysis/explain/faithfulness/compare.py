"""Measure which heatmap to believe: the change of the model's answer as cells of the map are removed."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from vitascope.analysis.explain.faithfulness.perturbation import (
    Perturbation,
    PerturbationPlan,
    areas,
    order_of,
)
from vitascope.analysis.explain.faithfulness.results import RANDOM, Comparison, Scores
from vitascope.analysis.explain.heatmaps import Count, grid_of, not_finite
from vitascope.analysis.explain.inputs import Images, as_images, check_some, pooled_and_logits
from vitascope.analysis.explain.methods import methods_for
from vitascope.analysis.explain.targets import ClassScore, Target, TargetLike, as_classes
from vitascope.arguments import Range, checked
from vitascope.errors import UserError
from vitascope.models.heads import scores
from vitascope.models.vision_model import VisionModel, evaluation_mode

HeatmapFunction = Callable[[VisionModel, Tensor, Target], Tensor]
"""Model, images (1, C, H, W) and target -> heatmap (1, grid_h, grid_w)."""

RANDOM_MAPS = 3
"""Random orders per image, whose scores are averaged: a single one would widen all intervals."""
_TIES, _NOISE, _BASELINE = range(3)
"""Independent random streams of an image, so that no method changes another's numbers."""


@checked
def compare(
    model: VisionModel,
    images: Images,
    methods: Mapping[str, HeatmapFunction] | None = None,
    *,
    target: TargetLike = None,
    steps: Count = 10,
    shares: Annotated[Sequence[float], Range(gt=0, lt=1)] = (0.1, 0.3, 0.5, 0.7, 0.9),
    seed: Annotated[int, Range(ge=0)] = 0,
    batch_size: Count = 64,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Measure how faithful heatmaps are to a model: deletion, insertion and ROAD, over a random baseline.

    Cells are removed in the order of falling heat; cells of equal heat in random order. The score is the
    probability of the explained class, which is fixed before anything is removed.

    Deletion (Petsiuk et al. 2018, "RISE", section 4.2): cells are replaced by zero, the mean colour; the area
    under the probability over the share deleted, by the trapezoidal rule. Insertion: cells are inserted into
    a blurred image. ROAD (Rong et al. 2022, "A Consistent and Efficient Evaluation Strategy for Attribution
    Methods"): whole cells are imputed; the probability with the least relevant cells imputed minus that with
    the most relevant ones, mean over `shares`.

    The baseline, "random", is the mean of `RANDOM_MAPS` random orders per image. For each image and method
    the model runs on 2 (steps - 1) + 2 len(shares) variants; memory does not grow with the number of images.

    Args:
        images: pictures, or normalized floats (B, C, H, W) on the model's device.
        methods: by name; each is called with the model, (1, C, H, W) and a `Target`, and returns
            (1, grid_h, grid_w). Default: all `METHODS` that suit the model.
        target: the class to explain, by number or name, or one per image; None is the predicted class.
        steps: points of the deletion and insertion curves after their start; at most the number of cells.
        shares: shares of the cells that ROAD imputes, each in (0, 1); at least one cell is, and one is not.
        seed: of the random orders and of the noise.
        progress: called after each batch with the number of variants done, and of all.

    Raises:
        UserError: no images; a method named "random"; a target that is not a class; a heatmap of another
            shape; heatmaps or logits that are not finite; a grid of one cell.
    """
    images = as_images(model, images)
    methods = methods_for(model) if methods is None else methods
    grid = grid_of(model, images)
    check_some(images)
    if RANDOM in methods:
        raise UserError(f'"{RANDOM}" names the baseline, which is always included: rename the method')
    check_cells(images, grid)
    plan = PerturbationPlan(cells=math.prod(grid), steps=min(steps, math.prod(grid)), shares=tuple(shares))
    names = (*methods, *[RANDOM] * RANDOM_MAPS)
    total = len(images) * (3 + len(names) * plan.variants)
    done = 0

    def advance(variants: int) -> None:
        nonlocal done
        done += variants
        if progress is not None:
            progress(done, total)

    measured: dict[str, list[list[float]]] = {name: [] for name in names}
    with evaluation_mode(model):
        chosen = explained_classes(model, images, target, batch_size)
        for index, image in enumerate(images):
            about = chosen.select(index)
            orders, seconds = _orders(model, image, methods, about, grid, (seed, index))
            perturbed = Perturbation(image, grid, plan, np.random.default_rng([seed, index, _NOISE]))
            variants = itertools.chain(perturbed.ends(), *(perturbed.variants(order) for order in orders))
            scored = class_probabilities(model, variants, about, batch_size, advance)
            ends, rest = scored[:3], scored[3:].split(plan.variants)
            for name, part, took in zip(names, rest, seconds, strict=True):
                measured[name].append([*areas(plan, ends, part), took])
    return Comparison(
        scores={name: _scores(rows, len(images)) for name, rows in measured.items()},
        classes=tuple(chosen.classes.expand(len(images)).tolist()),
        grid=grid,
        steps=plan.steps,
        shares=plan.shares,
        seed=seed,
    )


def check_cells(images: Tensor, grid: tuple[int, int]) -> None:
    """Reject a grid without an order."""
    if math.prod(grid) < 2:
        raise UserError(
            f"the heatmaps of {images.shape[2]}x{images.shape[3]} images have one cell, which no method can "
            "order: use larger images, or a model with smaller patches"
        )


def explained_classes(model: VisionModel, images: Tensor, target: TargetLike, batch_size: int) -> ClassScore:
    """The class of each image whose probability is measured."""
    logits = torch.cat([pooled_and_logits(model, part)[1] for part in images.split(batch_size)])
    if not logits.isfinite().all():
        raise not_finite("the model's logits are not finite")
    return as_classes(target, model.config, logits)


def check_heat(name: str, heat: Tensor, grid: tuple[int, int]) -> None:
    """Reject anything but a heatmap (1, gh, gw) of finite values."""
    if heat.shape != (1, *grid) or not heat.isfinite().all():
        raise UserError(
            f"{name}: a heatmap of one image has finite values {(1, *grid)}, and this one is "
            f"{tuple(heat.shape)} with {int((~heat.isfinite()).sum())} values not finite"
        )


def _orders(
    model: VisionModel,
    image: Tensor,
    methods: Mapping[str, HeatmapFunction],
    about: Target,
    grid: tuple[int, int],
    key: tuple[int, int],
) -> tuple[list[Tensor], list[float]]:
    """The cells of an image, most relevant first, int64 (N,), by each method and `RANDOM_MAPS` times at
    random, and the seconds of each."""
    cells = math.prod(grid)
    ties = np.random.default_rng([*key, _TIES]).permutation(cells)
    orders, seconds = [], []
    for name, method in methods.items():
        start = time.perf_counter()
        heat = method(model, image[None], about).detach().cpu()  # waits for the device: part of the time
        seconds.append(time.perf_counter() - start)
        check_heat(name, heat, grid)
        orders.append(order_of(heat, ties))
    baseline = np.random.default_rng([*key, _BASELINE])
    orders += [torch.from_numpy(baseline.permutation(cells)) for _ in range(RANDOM_MAPS)]
    return orders, seconds + [0.0] * RANDOM_MAPS


@torch.no_grad()
def class_probabilities(
    model: VisionModel,
    variants: Iterable[Tensor],
    about: ClassScore,
    batch_size: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """The probability of one class in any number of images (C, H, W): float64 (n,), on the CPU."""
    scored, rest, label = [], iter(variants), int(about.classes)
    while batch := list(itertools.islice(rest, batch_size)):
        logits = pooled_and_logits(model, torch.stack(batch))[1].float()  # (B, K)
        probabilities = scores(logits, model.config.outputs)
        scored.append(probabilities[:, label].double())
        advance(len(batch))
    return torch.cat(scored).cpu()  # not batch by batch: the device would wait for the next one


def _scores(rows: list[list[float]], images: int) -> Scores:
    """One method's scores; several maps of the same image are averaged."""
    means = np.array(rows).reshape(images, -1, len(rows[0])).mean(axis=1)  # (B, 5)
    deletion, insertion, lerf, morf, seconds = (tuple(column) for column in means.T.tolist())
    return Scores(deletion=deletion, insertion=insertion, lerf=lerf, morf=morf, seconds=seconds)
