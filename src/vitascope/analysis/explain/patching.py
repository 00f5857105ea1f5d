"""Activation patching (Izadi et al. 2026, "Causal Attribution via Activation Patching").

After some layers, the state of a patch has the evidence that the model formed from it and its surroundings,
and is not yet mixed with that of all other patches.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitascope.analysis.explain.attention import attending
from vitascope.analysis.explain.heatmaps import Count, to_unit
from vitascope.analysis.explain.inputs import Images, as_images, call_hook, pooled_and_logits
from vitascope.analysis.explain.targets import Target, TargetLike, as_target
from vitascope.arguments import checked
from vitascope.errors import UserError
from vitascope.models.vision_model import VisionModel, evaluation_mode
from vitascope.models.vit import VisionTransformer


@torch.no_grad()
@checked
def patching(
    model: VisionModel,
    images: Images,
    target: TargetLike = None,
    *,
    layers: tuple[int, int] | None = None,
    batch_size: Count = 64,
    scaled: bool = True,
) -> Tensor:
    """The rise of the target's score when a blank image gets the states of one patch.

    A blank image, of zeros, runs through the blocks. At the input of some blocks, the state of one patch
    is replaced by that of the same patch in the image; the other tokens follow from the blank image and this
    patch. The heat is the score minus that of the blank image, or 0 where it falls. The blocks from the first
    of `layers` on run forward once per patch.

    Args:
        layers: the first block whose input is patched, and the block after the last one, as in `range`; None
            is the first half of the blocks, which was the best of small models in
            `benchmarks/results/2026-11-28-heatmaps.md`; the paper takes middle blocks, of deeper models.

    Raises:
        UserError: layers that do not exist; a ResNet; token merging; scores that are not finite.
    """
    model, images = attending(model), as_images(model, images)
    depth, grid = model.config.depth, model.grid_of(images)
    first, end = layers or (0, max(1, depth // 2))
    if not 0 <= first < end <= depth:
        raise UserError(f"layers must be two numbers with 0 <= first < end <= {depth}, not {first} and {end}")
    logits = torch.cat([pooled_and_logits(model, part)[1] for part in images.split(batch_size)])
    targets = as_target(target, model.config, logits)
    inputs = ["embeddings", *(f"block{index}" for index in range(depth))][first:end]
    with evaluation_mode(model):
        call_hook()
        blank = model.trace(images.new_zeros(1, *images.shape[1:]))
        rises = []
        for index, image in enumerate(images):
            call_hook()
            trace, about = model.trace(image[None]), targets.select(index)
            start = about.score(blank["pooled"], blank["logits"])  # (1,)
            states = [trace[name] for name in inputs]  # (1, T, D) each
            scores = _patched(model, blank[inputs[0]], states, first, grid, about, batch_size)  # (N,)
            # A patch equal to the blank one differs by rounding, which would fill a map without evidence.
            changed = (states[0] != blank[inputs[0]])[0, model.config.num_prefix_tokens :].any(dim=1)
            rises.append((scores.float() - start.float()).where(changed, 0))
    return to_unit(torch.stack(rises).unflatten(1, grid), scaled) if rises else images.new_zeros(0, *grid)


def _patched(
    model: VisionTransformer,
    context: Tensor,
    states: Sequence[Tensor],
    first: int,
    grid: tuple[int, int],
    target: Target,
    batch_size: int,
) -> Tensor:
    """The scores (N,) of the context (1, T, D) with the states of each patch at the inputs of some blocks."""
    end, queries = first + len(states), model.pool.queries
    scores = []
    for places in torch.arange(model.config.num_prefix_tokens, context.shape[1]).split(batch_size):
        call_hook()
        variants = torch.arange(len(places))
        tokens = context.expand(len(places), -1, -1)
        for block, state in enumerate(states, first):
            tokens = tokens.index_put((variants, places), state[0, places])  # (n, T, D)
            tokens = model.encode(tokens, grid, queries=queries, blocks=range(block, block + 1))
        tokens = model.encode(tokens, grid, queries=queries, blocks=range(end, model.config.depth))
        pooled = model.pool_features(model.norm(tokens))  # (n, D)
        scores.append(target.score(pooled, model.head(pooled)))
    return torch.cat(scores)
