import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.model import law, random_images, randomize, small_config
from vitascope.model.encoder import MLP, Block, DropPath, Encoder
from vitascope.model.trace import Trace


def block(drop_path: float = 0.0, **overrides: float) -> Block:
    return randomize(Block(small_config(**overrides), drop_path)).eval()


def encoder(**overrides: float) -> Encoder:
    return randomize(Encoder(small_config(**overrides))).eval()


@torch.no_grad()
def zero(*layers: nn.Linear) -> None:
    for layer in layers:
        layer.weight.zero_()
        layer.bias.zero_()


@law
@given(depth=st.integers(1, 9), rate=st.sampled_from([0.0, 0.1, 0.5]))
def test_the_rate_of_drop_path_grows_linearly_with_depth(depth: int, rate: float) -> None:
    rates = [each.drop_path.rate for each in Encoder(small_config(depth=depth, drop_path=rate)).blocks]
    np.testing.assert_allclose(rates, np.linspace(0, rate, depth))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_drop_path_leaves_out_whole_images_and_keeps_the_mean(rate: float) -> None:
    torch.manual_seed(0)
    images = 4096
    branch = random_images(1, 3, 5).expand(images, -1, -1)
    dropped = DropPath(rate).train()(branch)
    left_out = (dropped == 0).all(-1).all(-1)
    kept = dropped[~left_out]
    torch.testing.assert_close(kept, branch[: len(kept)] / (1 - rate))
    assert abs(left_out.double().mean() - rate) < 6 * (rate * (1 - rate) / images) ** 0.5


def test_drop_path_is_off_in_evaluation() -> None:
    branch = random_images(64, 3, 5)
    assert torch.equal(DropPath(0.9).eval()(branch), branch)


def test_drop_path_without_a_rate_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    DropPath(0.0).train()(random_images(4, 3, 5))
    assert torch.equal(torch.get_rng_state(), before)


def test_drop_path_keeps_the_dtype() -> None:
    assert DropPath(0.5).train()(torch.ones(4, 3, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_drop_path_acts_on_both_branches_of_a_block() -> None:
    tokens = random_images(1, 4, 16).expand(256, -1, -1)
    layer = block(drop_path=0.5)
    attended = tokens + 2 * layer.attention(layer.norm1(tokens))
    possible = [
        tokens,
        attended,
        tokens + 2 * layer.mlp(layer.norm2(tokens)),
        attended + 2 * layer.mlp(layer.norm2(attended)),
    ]
    torch.manual_seed(0)
    seen = layer.train()(tokens)
    matches = torch.stack([(seen - each).abs().amax((1, 2)) < 1e-4 for each in possible])
    assert (matches.sum(0) == 1).all()
    assert (matches.sum(1) > 0).all()


def test_a_block_whose_branches_end_in_zero_is_the_identity() -> None:
    layer, tokens = block(), random_images(2, 5, 16)
    zero(layer.attention.proj, layer.mlp.fc2)
    assert torch.equal(layer(tokens), tokens)


def test_a_block_adds_attention_then_mlp_each_of_the_normalized_tokens() -> None:
    layer, tokens = block(), random_images(2, 5, 16)
    attended = tokens + layer.attention(layer.norm1(tokens))
    torch.testing.assert_close(layer(tokens), attended + layer.mlp(layer.norm2(attended)))


def test_the_mlp_treats_each_token_by_itself() -> None:
    layer, tokens = randomize(MLP(small_config())), random_images(2, 5, 16)
    alone = torch.stack([layer(tokens[:, index : index + 1])[:, 0] for index in range(5)], dim=1)
    torch.testing.assert_close(layer(tokens), alone)


@law
@given(ratio=st.sampled_from([0.5, 1.0, 2.5, 4.0]))
def test_the_mlp_is_as_wide_as_its_ratio_says(ratio: float) -> None:
    assert MLP(small_config(mlp_ratio=ratio)).fc1.out_features == 16 * ratio


def test_the_activation_is_the_exact_gelu() -> None:
    x = torch.linspace(-4, 4, 81, dtype=torch.float64)
    normal = torch.distributions.Normal(torch.zeros((), dtype=x.dtype), 1.0)
    torch.testing.assert_close(MLP(small_config()).activation(x), x * normal.cdf(x))


@pytest.mark.parametrize("read", [slice(0, 1), slice(2, 4), slice(None)])
def test_read_gives_the_same_tokens_as_computing_everything(read: slice) -> None:
    layers, tokens = encoder(), random_images(2, 5, 16)
    everything = layers(tokens)
    torch.testing.assert_close(layers(tokens, read=read), everything[:, read])


def test_the_encoder_applies_its_blocks_in_order() -> None:
    layers, tokens = encoder(), random_images(2, 5, 16)
    trace = Trace()
    result = layers(tokens, trace)
    for index, layer in enumerate(layers.blocks):
        tokens = layer(tokens)
        torch.testing.assert_close(trace[f"block{index}"], tokens)
    torch.testing.assert_close(result, tokens)


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "drop_path"])
def test_randomness_is_active_in_training_and_off_in_evaluation(rate: str) -> None:
    layers, tokens = encoder(**{rate: 0.5}), random_images(8, 5, 16)
    torch.testing.assert_close(layers(tokens), encoder()(tokens))
    layers.train()
    torch.manual_seed(0)
    assert not torch.allclose(layers(tokens), layers(tokens))


def test_dropout_acts_after_both_layers_of_the_mlp() -> None:
    layer, tokens = randomize(MLP(small_config(dropout=0.5))).train(), random_images(64, 5, 16)
    torch.manual_seed(0)
    zeros = (layer(tokens) == 0).double().mean()
    assert 0.4 < zeros < 0.6  # the outer one zeroes outputs
    nn.init.eye_(layer.fc2.weight)
    nn.init.zeros_(layer.fc2.bias)
    zeros = (layer(tokens) == 0).double().mean()
    assert 0.7 < zeros < 0.8  # an output survives both with probability 1/4
