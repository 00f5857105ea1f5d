"""Integrated gradients (Sundararajan, Taly and Yan 2017, "Axiomatic Attribution for Deep Networks")."""

import numpy as np
import torch
from torch import Tensor

from vitascope.analysis.explain.heatmaps import Count, cell_of_pixels, grid_of, to_unit
from vitascope.analysis.explain.inputs import Images, as_images, call_hook, pooled_and_logits
from vitascope.analysis.explain.targets import Target, TargetLike, as_target
from vitascope.arguments import checked
from vitascope.models.vision_model import VisionModel, evaluation_mode


@torch.inference_mode(False)  # the caller's inference mode has no gradients
@checked
def integrated_gradients(
    model: VisionModel,
    images: Images,
    target: TargetLike = None,
    *,
    steps: Count = 32,
    batch_size: Count = 16,
    scaled: bool = True,
) -> Tensor:
    """The contribution of each patch to the target's score, on the way from a blank image to this one.

    The sum of `pixel_attributions` over the channels and pixels of each cell; where it is negative, the heat
    is 0. The cells are those of `occlusion`. The model runs `steps` times per image, forward and backward;
    gradients of its parameters are not changed.

    Args:
        steps: points at which the gradient is computed; a ResNet needs more than a Vision Transformer.

    Raises:
        UserError: gradients that are not finite.
    """
    images = as_images(model, images)
    grid = grid_of(model, images)
    logits = torch.cat([pooled_and_logits(model, part)[1] for part in images.split(batch_size)])
    targets = as_target(target, model.config, logits)
    pixels = pixel_attributions(model, images, targets, steps=steps, batch_size=batch_size).sum(dim=1)
    return to_unit(sum_cells(pixels, grid), scaled)


def sum_cells(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """The sum over the pixels of each cell: (B, H, W) -> (B, gh, gw)."""
    B, H, W = values.shape
    rows, columns = (cells.to(values.device) for cells in cell_of_pixels(grid, (H, W)))
    by_row = values.new_zeros(B, grid[0], W).index_add_(1, rows, values)
    return values.new_zeros(B, *grid).index_add_(2, columns, by_row)


def pixel_attributions(
    model: VisionModel, images: Tensor, target: Target, *, steps: int, batch_size: int
) -> Tensor:
    """Each pixel's contribution to the score, (B, C, H, W): x times the mean gradient at a x (equation 1), a
    from 0, the mean colour, to 1. The sum is the difference of the scores (proposition 1, completeness).

    The mean is a Gauss-Legendre quadrature over t in a = t^4, which puts most points close to the baseline: a
    norm right after a layer without bias, as in a ResNet and a hybrid's stem, makes the score nearly
    independent of contrast except there.
    """
    nodes, weights = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(steps))
    t, weights = (1 + nodes) / 2, weights / 2  # from [-1, 1] to [0, 1]
    # float32 also for a bf16 model: these are sums of many steps.
    inputs = images.detach().to(torch.promote_types(images.dtype, torch.float32))
    contrasts, weights = ((values.to(inputs)[:, None, None, None]) for values in (t**4, 4 * t**3 * weights))
    attributions = torch.zeros_like(inputs)
    with torch.enable_grad(), evaluation_mode(model):
        for index, image in enumerate(inputs):
            for a, weight in zip(contrasts.split(batch_size), weights.split(batch_size), strict=True):
                call_hook()
                variants = (a * image).requires_grad_()  # (n, C, H, W)
                pooled = model.embed(variants.to(images.dtype))  # (n, D)
                scores = target.select(index).score(pooled, model.head(pooled))
                (gradient,) = torch.autograd.grad(scores.sum(), variants)
                attributions[index] += (weight * gradient).sum(dim=0) * image
    return attributions
