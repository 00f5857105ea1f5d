import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.models import law, random_images, randomize, sequence, small_config, small_model
from vitascope.models.encoder import (
    MLP,
    Block,
    DropPath,
    Encoder,
    PatchDropout,
    PostNormBlock,
    QuickGELU,
    SwiGLU,
)
from vitascope.models.positions import Layout
from vitascope.models.trace import Trace


def block(kind: type[Block] = Block, drop_path: float = 0.0, **overrides: Any) -> Block:
    return randomize(kind(small_config(**overrides), drop_path)).eval()


def encoder(**overrides: Any) -> Encoder:
    return randomize(Encoder(small_config(**overrides))).eval()


@law
@given(depth=st.integers(1, 9), rate=st.sampled_from([0.0, 0.1, 0.5]))
def test_the_rate_of_drop_path_grows_linearly_with_depth(depth: int, rate: float) -> None:
    rates = [each.drop_path.rate for each in Encoder(small_config(depth=depth, drop_path=rate)).blocks]
    np.testing.assert_allclose(rates, np.linspace(0, rate, depth))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_drop_path_drops_all_tokens_of_an_image_and_keeps_the_mean(rate: float) -> None:
    torch.manual_seed(0)
    images = 4096
    branch = random_images(1, 3, 5).expand(images, -1, -1)
    dropped = DropPath(rate).train()(branch)
    left_out = (dropped == 0).all(-1).all(-1)
    kept = dropped[~left_out]
    torch.testing.assert_close(kept, branch[: len(kept)] / (1 - rate))
    assert abs(left_out.double().mean() - rate) < 6 * (rate * (1 - rate) / images) ** 0.5


def test_drop_path_without_a_rate_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    DropPath(0.0).train()(random_images(4, 3, 5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_drop_path_acts_on_both_branches_of_a_block(norm: str) -> None:
    tokens = random_images(1, 4, 16).expand(256, -1, -1)
    layer = block({"pre": Block, "post": PostNormBlock}[norm], drop_path=0.5)

    def after_attention(kept: bool) -> torch.Tensor:
        if norm == "post":
            return layer.norm1(tokens + 2 * kept * layer.attention(tokens, sequence(4)))
        return tokens + 2 * kept * layer.attention(layer.norm1(tokens), sequence(4))

    def after_mlp(tokens: torch.Tensor, kept: bool) -> torch.Tensor:
        if norm == "post":
            return layer.norm2(tokens + 2 * kept * layer.mlp(tokens))
        return tokens + 2 * kept * layer.mlp(layer.norm2(tokens))

    possible = [after_mlp(after_attention(first), last) for first in (False, True) for last in (False, True)]
    torch.manual_seed(0)
    seen = layer.train()(tokens, sequence(4))
    matches = torch.stack([(seen - each).abs().amax((1, 2)) < 1e-4 for each in possible])
    assert (matches.sum(0) == 1).all()
    assert (matches.sum(1) > 0).all()


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("read", [slice(0, 1), slice(None)])
@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3), (0, 1, 2, 3), (0, 0, 3, 3)])
def test_running_blocks_in_parts_equals_the_encoder(cuts: tuple[int, ...], read: slice, norm: str) -> None:
    layers, tokens = encoder(norm=norm), random_images(2, 5, 16)
    expected, trace = layers(tokens, sequence(5), queries=read), Trace()
    for first, after in itertools.pairwise(cuts):
        tokens = layers(tokens, sequence(5), trace, read, range(first, after))
    assert torch.equal(tokens, expected)
    assert list(trace.values) == ["block0", "block1", "block2"]
    assert [kept.shape[1] for kept in trace.values.values()] == [5, 5, 5 if read == slice(None) else 1]


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "drop_path"])
def test_randomness_is_active_in_training_and_off_in_evaluation(rate: str) -> None:
    layers, tokens = encoder(**{rate: 0.5}), random_images(8, 5, 16)
    torch.testing.assert_close(layers(tokens, sequence(5)), encoder()(tokens, sequence(5)))
    layers.train()
    torch.manual_seed(0)
    assert not torch.allclose(layers(tokens, sequence(5)), layers(tokens, sequence(5)))


@pytest.mark.parametrize("kind", [MLP, SwiGLU])
def test_dropout_acts_after_both_layers_of_the_mlp(kind: type[nn.Module]) -> None:
    layer, tokens = randomize(kind(small_config(dropout=0.5))).train(), random_images(64, 5, 16)
    torch.manual_seed(0)
    zeros = (layer(tokens) == 0).double().mean()
    assert 0.4 < zeros < 0.6  # the outer one zeroes outputs
    nn.init.eye_(layer.fc2.weight)
    nn.init.zeros_(layer.fc2.bias)
    zeros = (layer(tokens) == 0).double().mean()
    assert 0.7 < zeros < 0.8  # an output survives both with probability 1/4


def test_swiglu_gates_one_half_by_the_silu_of_the_other() -> None:
    layer, tokens = randomize(SwiGLU(small_config(mlp_ratio=1.5))), random_images(2, 5, 16)
    gate_weight, value_weight = layer.fc1.weight.split(24)
    gate_bias, value_bias = layer.fc1.bias.split(24)
    gate, value = tokens @ gate_weight.T + gate_bias, tokens @ value_weight.T + value_bias
    expected = (gate / (1 + (-gate).exp()) * value) @ layer.fc2.weight.T + layer.fc2.bias
    torch.testing.assert_close(layer(tokens), expected, rtol=1e-5, atol=1e-5)


def test_the_tanh_gelu_is_that_of_jax() -> None:
    x = torch.linspace(-4, 4, 81, dtype=torch.float64)
    expected = x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    activation = MLP(small_config(mlp="gelu_tanh")).activation
    torch.testing.assert_close(activation(x), expected)
    assert (activation(x) - MLP(small_config()).activation(x)).abs().max() > 1e-4


def test_quick_gelu_is_a_sigmoid_gate() -> None:
    x = torch.linspace(-4, 4, 81, dtype=torch.float64)
    assert isinstance(MLP(small_config(mlp="quick_gelu")).activation, QuickGELU)
    torch.testing.assert_close(QuickGELU()(x), x / (1 + (-1.702 * x).exp()))


def numbered(B: int, P: int, N: int) -> torch.Tensor:
    """Tokens that hold their own image and position: (B, P + N, 2)."""
    images = torch.arange(B).repeat_interleave(P + N)
    return torch.stack([images, torch.arange(P + N).repeat(B)], dim=1).view(B, P + N, 2).float()


@law
@given(
    B=st.integers(1, 4),
    P=st.integers(0, 3),
    N=st.integers(1, 20),
    rate=st.floats(0.01, 0.99),
    seed=st.integers(0, 9),
)
def test_patch_dropout_keeps_the_prefix_and_a_share_of_the_patches_in_order(
    B: int, P: int, N: int, rate: float, seed: int
) -> None:
    torch.manual_seed(seed)
    tokens = numbered(B, P, N)
    kept, _ = PatchDropout(rate).train()(tokens, Layout((N, 1), P))
    assert kept.shape == (B, P + max(1, round(N * (1 - rate))), 2)
    for image in range(B):
        places = kept[image, :, 1].tolist()
        assert (kept[image, :, 0] == image).all()
        assert places[:P] == list(range(P))
        assert places == sorted(set(places))


def test_every_patch_is_kept_equally_often() -> None:
    torch.manual_seed(0)
    kept, _ = PatchDropout(0.75).train()(numbered(4096, 1, 8), Layout((8, 1), 1))
    counts = kept[:, 1:, 1].flatten().long().bincount(minlength=9)[1:]
    spread = (4096 * 0.25 * 0.75) ** 0.5
    assert ((counts - 1024).abs() < 6 * spread).all()


@pytest.mark.parametrize(("rate", "training"), [(0.5, False), (0.0, True)])
def test_patch_dropout_does_nothing_in_evaluation_or_without_a_rate(rate: float, training: bool) -> None:
    tokens, layout, before = numbered(2, 1, 8), Layout((8, 1), 1), torch.get_rng_state()
    kept, same = PatchDropout(rate).train(training)(tokens, layout)
    assert kept is tokens
    assert same is layout
    assert torch.equal(torch.get_rng_state(), before)


RECOMPUTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "post-norm, layer scale, swiglu": {"norm": "post", "layer_scale": 0.1, "mlp": "swiglu"},
    "rotary": {"positions": "rotary"},
    "relative": {"positions": "relative"},
    "axial, relative": {"attention": "axial", "positions": "relative"},
    "window, relative": {"attention": "window", "window": 2, "positions": "relative"},
    "dropout everywhere": {"dropout": 0.2, "attention_dropout": 0.2, "drop_path": 0.5},
    "patch dropout, rotary": {"patch_dropout": 0.5, "positions": "rotary", "drop_path": 0.5},
}


@pytest.mark.parametrize("options", RECOMPUTED.values(), ids=RECOMPUTED)
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(options: dict[str, Any]) -> None:
    results, pool = [], "mean" if "positions" in options else "cls"
    for recompute in (False, True):
        model = small_model(pool=pool, **options).train()
        model.encoder.checkpointing = recompute
        torch.manual_seed(0)
        images = random_images(4, 3, 32, 32).requires_grad_()
        loss = model(images).square().sum()
        loss.backward()
        results.append([loss.detach(), images.grad, *(value.grad for value in model.parameters())])
    for kept, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, kept, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("training", "recompute"), [(True, True), (True, False), (False, True)])
def test_blocks_are_recomputed_only_for_gradients_in_training(training: bool, recompute: bool) -> None:
    layers = encoder().train(training)
    layers.checkpointing = recompute
    runs: list[nn.Module] = []
    for layer in layers.blocks:
        layer.norm1.register_forward_hook(lambda module, args, output: runs.append(module))
    layers(random_images(2, 5, 16), sequence(5)).sum().backward()
    assert len(runs) == (2 if training and recompute else 1) * 3


def test_traced_blocks_are_never_recomputed() -> None:
    layers, trace = encoder().train(), Trace(attention=True)
    layers.checkpointing = True
    layers(random_images(2, 5, 16), sequence(5), trace).sum().backward()
    assert len(trace.attention) == 3
