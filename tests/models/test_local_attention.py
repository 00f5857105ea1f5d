from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import by_loops, law, law_of_models, random_images, randomize, small_config
from vitascope.models.attention import SelfAttention
from vitascope.models.config import ViTConfig
from vitascope.models.local_attention import LocalAttention, join_windows, split_windows
from vitascope.models.positions import Layout, Positions
from vitascope.models.relations import position_embedding
from vitascope.models.trace import Trace

SMALL = st.integers(1, 4)
PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))

# Prefix tokens by readout: none, a class token, a class token and two registers.
READOUTS: dict[int, dict[str, Any]] = {0: {"pool": "mean"}, 1: {}, 3: {"num_registers": 2}}
PREFIX = st.sampled_from(list(READOUTS))
KINDS = {"axial": LocalAttention, "window": LocalAttention, "global": SelfAttention}


def local_config(
    attention: str, counts: tuple[int, int], window: tuple[int, int], **options: Any
) -> ViTConfig:
    """A configuration whose grid has this number of windows down and across."""
    grid = (counts[0] * window[0], counts[1] * window[1])
    sizes = {"image_size": (8 * grid[0], 8 * grid[1]), "patch_size": 8, "window": window}
    return small_config(**sizes, attention=attention, **options)


def parts(config: ViTConfig) -> tuple[SelfAttention, Positions, Layout]:
    """The attention and the positions of a configuration, every parameter random, and its layout."""
    positions = randomize(position_embedding(config), seed=3)
    layer = randomize(KINDS[config.block.attention](config)).eval()
    return layer, positions, positions.layout(config.grid, torch.device("cpu"))


def attention_maps(
    layer: SelfAttention, positions: Positions, config: ViTConfig, tokens: torch.Tensor
) -> np.ndarray:
    """The weights of each head, (B, heads, T, T): products of masked softmaxes."""
    grid, P = config.grid, config.num_prefix_tokens
    (gh, gw) = grid
    steps = {"window": [config.block.window], "axial": [(1, gw), (gh, 1)], "global": [grid]}
    bias = 0.0
    if config.embedding.positions == "relative":
        numbers = None if positions.prefix is None else positions.prefix.detach().numpy()
        bias = by_loops.relative_bias(positions.offsets.detach().numpy(), numbers, grid, P)
    qkv = layer.qkv(tokens).detach().numpy().astype(np.float64).reshape(*tokens.shape[:2], 3, 2, -1)
    maps = np.zeros((len(tokens), 2, tokens.shape[1], tokens.shape[1]))
    for image in range(len(tokens)):
        for head in range(2):
            q, k = qkv[image, :, 0, head], qkv[image, :, 1, head]
            if config.embedding.positions == "rotary":
                q, k = (by_loops.rotate(each, grid, config.rotary.rotary_base, P) for each in (q, k))
            scores = q @ k.T / q.shape[1] ** 0.5 + (bias if isinstance(bias, float) else bias[head])
            product = np.eye(tokens.shape[1])
            for window in steps[config.block.attention]:
                product = by_loops.softmax_where(scores, by_loops.may_attend(grid, window, P)) @ product
            maps[image, head] = product
    return maps


@law
@given(B=SMALL, heads=SMALL, hd=SMALL, counts=PAIRS, window=PAIRS)
def test_joining_windows_undoes_splitting_them(
    B: int, heads: int, hd: int, counts: tuple[int, int], window: tuple[int, int]
) -> None:
    grid = (counts[0] * window[0], counts[1] * window[1])
    patches = random_images(B, heads, grid[0] * grid[1], hd)
    windows = split_windows(patches, grid, window)
    assert windows.shape == (B, counts[0] * counts[1], heads, window[0] * window[1], hd)
    assert torch.equal(join_windows(windows, grid, window), patches)
    again = random_images(*windows.shape, seed=2)
    assert torch.equal(split_windows(join_windows(again, grid, window), grid, window), again)


@pytest.mark.parametrize("attention", ["window", "axial", "global"])
@pytest.mark.parametrize("positions", ["learned", "rotary", "relative"])
@law_of_models
@given(counts=PAIRS, window=PAIRS, prefix=PREFIX, seed=st.integers(0, 9))
def test_attention_is_a_masked_softmax_over_the_sequence(
    attention: str, positions: str, counts: tuple[int, int], window: tuple[int, int], prefix: int, seed: int
) -> None:
    config = local_config(attention, counts, window, positions=positions, **READOUTS[prefix])
    layer, places, layout = parts(config)
    tokens = random_images(2, config.num_tokens, 16, seed=seed)
    maps = attention_maps(layer, places, config, tokens)
    values = layer.qkv(tokens).detach().numpy().reshape(2, -1, 3, 2, 8)[:, :, 2].transpose(0, 2, 1, 3)
    mixed = torch.from_numpy((maps @ values).transpose(0, 2, 1, 3).reshape(2, -1, 16)).float()
    expected = layer.proj(mixed)

    trace = Trace(attention=True)
    torch.testing.assert_close(layer(tokens, layout), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(tokens, layout, trace), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trace.attention[0].detach().numpy(), maps, atol=1e-5)
    torch.testing.assert_close(trace.attention[0].sum(-1), torch.ones(2, 2, config.num_tokens))


@pytest.mark.parametrize("attention", ["window", "axial", "global"])
@law_of_models
@given(start=st.integers(0, 10), length=st.integers(1, 8), prefix=PREFIX)
def test_reading_some_tokens_equals_computing_all(
    attention: str, start: int, length: int, prefix: int
) -> None:
    config = local_config(attention, (2, 2), (2, 2), positions="relative", **READOUTS[prefix])
    layer, _, layout = parts(config)
    tokens, read, trace = (
        random_images(2, config.num_tokens, 16),
        slice(start, start + length),
        Trace(attention=True),
    )
    everything = layer(tokens, layout)
    torch.testing.assert_close(layer(tokens, layout, queries=read), everything[:, read])
    torch.testing.assert_close(layer(tokens, layout, trace, read), everything[:, read])
    assert trace.attention[0].shape == (2, 2, everything[:, read].shape[1], config.num_tokens)


@pytest.mark.parametrize("attention", ["window", "axial", "global"])
@pytest.mark.parametrize("positions", ["learned", "rotary", "relative"])
def test_fast_and_traced_attention_have_the_same_gradients(attention: str, positions: str) -> None:
    config = local_config(attention, (2, 2), (2, 2), positions=positions)
    gradients = []
    for trace in (None, Trace(attention=True)):
        layer, places, layout = parts(config)
        tokens = random_images(2, config.num_tokens, 16).requires_grad_()
        layer.train()(tokens, layout, trace).square().sum().backward()
        learned = [value.grad for value in places.parameters()] if positions == "relative" else []
        gradients.append([tokens.grad, *learned, *(value.grad for value in layer.parameters())])
    for fast, traced in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, traced, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["window", "axial"])
@pytest.mark.parametrize("traced", [False, True])
def test_attention_dropout_keeps_the_mean(attention: str, traced: bool) -> None:
    config = local_config(attention, (1, 2), (1, 2), attention_dropout=0.5)
    layer, _, layout = parts(config)
    tokens = random_images(1, config.num_tokens, 16)
    expected = layer(tokens, layout)
    torch.manual_seed(0)
    draws = layer.train()(tokens.expand(4096, -1, -1), layout, Trace(attention=True) if traced else None)
    spread = draws.std(0)
    assert spread.min() > 0
    assert ((draws.mean(0) - expected[0]).abs() < 6 * spread / 4096**0.5).all()
