"""Parts of a Vision Transformer switched off, by hooks on modules that every pass calls.

So `forward`, `trace`, heatmaps and the lens need no code for it. Each hook selects with `where`: what is off
keeps its place in autograd's graph, with a gradient of zero.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitascope.arguments import has_type
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig, check_head, check_layer
from vitascope.models.positions import Layout


@contextmanager
def switched_off(
    model: nn.Module,
    config: ViTConfig,
    heads: Iterable[tuple[int, int]],
    attention: Iterable[int],
    mlps: Iterable[int],
    layers: Iterable[int],
    patches: Iterable[int],
) -> Iterator[None]:
    """As `VisionTransformer.intervene`, of a model of this configuration."""
    absent, merges = list(patches), bool(config.block.token_merging)

    def part(layer: int, name: str) -> nn.Module:
        return model.get_submodule(f"encoder.blocks.{check_layer(config, layer)}{name}")

    with ExitStack() as hooks:
        for layer, head in heads:
            check_head(config, head)
            without = partial(_without_head, head=head, num_heads=config.num_heads)
            hooks.enter_context(part(layer, ".attention.norm").register_forward_pre_hook(without))
        for name, numbers in ((".scale1", attention), (".scale2", mlps)):
            for layer in numbers:
                hooks.enter_context(part(layer, name).register_forward_hook(_zeros))
        for layer in layers:
            hooks.enter_context(part(layer, "").register_forward_hook(_input))
            if merges:
                raise UserError("with token_merging no layer can be off: load the model with token_merging=0")
        if absent:
            if merges or config.block.attention != "global":
                raise UserError("patches can be off where attention is global and no tokens are merged")
            hide = partial(_hidden, absent=absent)
            hooks.enter_context(model.get_submodule("patch_dropout").register_forward_hook(hide))
            drop = partial(_present, absent=absent, prefix=config.num_prefix_tokens)
            hooks.enter_context(model.get_submodule("pool").register_forward_pre_hook(drop))
        yield


def _never(tokens: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=tokens.device)


def _without_head(_: nn.Module, inputs: tuple[Tensor], head: int, num_heads: int) -> Tensor:
    (mixed,) = inputs  # (B, Q, heads hd)
    is_on = torch.arange(num_heads, device=mixed.device) != head
    return mixed.where(is_on.repeat_interleave(mixed.shape[-1] // num_heads), 0)


def _zeros(_: nn.Module, inputs: Any, branch: Tensor) -> Tensor:
    return branch.where(_never(branch), 0)


def _input(_: nn.Module, inputs: tuple[Tensor, Layout, Any, slice], output: Tensor) -> Tensor:
    tokens, queries = inputs[0], inputs[3]
    return output.where(_never(output), tokens[:, queries])


def _together(hooks: Mapping[int, Any], function: Any) -> list[Any]:
    """The patches that are off in any of the nested contexts, by their hooks of a module."""
    partials = [hook for hook in hooks.values() if isinstance(hook, partial) and hook.func is function]
    return [patch for hook in partials for patch in hook.keywords["absent"]]


def _hidden(
    dropout: nn.Module, inputs: Any, output: tuple[Tensor, Layout], absent: list[int]
) -> tuple[Tensor, Layout]:
    """No token attends to the patches `absent`, which stay in the sequence, so that maps keep their grid."""
    tokens, layout = output
    together = _together(dropout._forward_hooks, _hidden)
    (gh, gw), P = layout.grid, layout.num_prefix_tokens
    N = gh * gw
    for patch in absent:
        if not (has_type(patch, int) and 0 <= patch < N):
            raise UserError(f"no patch {patch}: the grid of {gh}x{gw} has {N}, 0 to {N - 1}")
    if len(set(together)) == N:
        raise UserError(f"all {N} patches are off: leave at least one")
    if tokens.shape[1] != P + N:
        raise UserError(f"{tokens.shape[1] - P} of {N} patches are there: none can be off beside this choice")
    mask = torch.zeros(len(tokens), 1, 1, P + N, device=tokens.device)
    mask[..., [P + patch for patch in absent]] = -torch.inf

    def masked(part: Layout) -> Layout:
        bias = part.bias(part.grid)
        added = mask if bias is None else bias + mask
        blocks = tuple(map(masked, part.by_block))
        return dataclasses.replace(part, biases={part.grid: added}, by_block=blocks)

    return tokens, masked(layout)


def _present(pool: nn.Module, inputs: tuple[Tensor], absent: list[int], prefix: int) -> Tensor:
    """The tokens that pooling may read: (B, T, D) -> (B, T', D).

    Of nested contexts the first one drops the patches of all, because places change by it.
    """
    (tokens,) = inputs
    hooks = pool._forward_pre_hooks
    first = next(hook for hook in hooks.values() if isinstance(hook, partial) and hook.func is _present)
    if first.keywords["absent"] is not absent:
        return tokens
    if tokens.shape[1] < prefix + 2:  # the tokens that pooling reads, or the one patch of a lens
        return tokens
    together = _together(hooks, _present)
    kept = [place for place in range(tokens.shape[1]) if place - prefix not in together]
    return tokens[:, kept]
