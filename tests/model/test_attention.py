import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model import law, random_images, randomize, small_config
from vitascope.model.attention import MatmulAttention, SelfAttention, attention_weights
from vitascope.model.trace import Trace

SMALL = st.integers(1, 5)


def attention(**overrides: float) -> SelfAttention:
    return randomize(SelfAttention(small_config(**overrides))).eval()


def by_the_equations(qkv: torch.Tensor) -> torch.Tensor:
    """Equations 6 and 7, head by head: (B, T, 3, heads, hd) -> (B, T, heads * hd)."""
    heads = []
    for head in range(qkv.shape[3]):
        q, k, v = qkv[:, :, :, head].unbind(2)  # (B, T, hd)
        heads.append(torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1) @ v)
    return torch.cat(heads, dim=-1)


@law
@given(B=SMALL, heads=SMALL, Q=SMALL, T=SMALL, hd=SMALL, scale=st.sampled_from([0.0, 1.0, 10.0, 1000.0]))
def test_rows_of_attention_sum_to_one(B: int, heads: int, Q: int, T: int, hd: int, scale: float) -> None:
    q, k = scale * random_images(B, heads, Q, hd, seed=1), random_images(B, heads, T, hd, seed=2)
    weights = attention_weights(q, k)
    assert weights.shape == (B, heads, Q, T)
    assert weights.min() >= 0
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, heads, Q))


def test_a_query_attends_more_to_the_key_that_it_resembles() -> None:
    keys = torch.eye(4).view(1, 1, 4, 4)
    assert attention_weights(keys, keys).argmax(-1).flatten().tolist() == [0, 1, 2, 3]


def test_scores_are_scaled_by_the_root_of_the_head_width() -> None:
    q, k = random_images(1, 1, 1, 16, seed=1), random_images(1, 1, 2, 16, seed=2)
    weights = attention_weights(q, k)[0, 0, 0]
    scores = (q[0, 0] @ k[0, 0].T)[0]
    torch.testing.assert_close((weights[0] / weights[1]).log(), (scores[0] - scores[1]) / 4)


@law
@given(B=SMALL, T=SMALL, seed=st.integers(0, 9))
def test_fused_attention_equals_the_explicit_equations(B: int, T: int, seed: int) -> None:
    layer, tokens = attention(), random_images(B, T, 16, seed=seed)
    trace = Trace(attention=True)
    expected = layer.proj(by_the_equations(layer.qkv(tokens).view(B, T, 3, 2, 8)))
    torch.testing.assert_close(layer(tokens), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(tokens, trace), expected, rtol=1e-5, atol=1e-5)
    (weights,) = trace.attention
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, 2, T))


def test_fused_and_explicit_attention_have_the_same_gradients() -> None:
    gradients = []
    for trace in (None, Trace(attention=True)):
        layer, tokens = attention().train(), random_images(2, 5, 16).requires_grad_()
        layer(tokens, trace).square().sum().backward()
        gradients.append([tokens.grad, *(parameter.grad for parameter in layer.parameters())])
    for fused, explicit in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, explicit, rtol=1e-4, atol=1e-5)


@law
@given(B=SMALL, T=SMALL, heads=SMALL, hd=SMALL)
def test_matmul_attention_equals_the_explicit_equations(B: int, T: int, heads: int, hd: int) -> None:
    qkv = random_images(B, T, 3, heads, hd).double().requires_grad_()
    direction = random_images(B, T, heads * hd, seed=2).double()
    expected = by_the_equations(qkv)
    actual = MatmulAttention.apply(qkv)
    torch.testing.assert_close(actual, expected)
    (expected_grad,) = torch.autograd.grad(expected, qkv, direction)
    (actual_grad,) = torch.autograd.grad(actual, qkv, direction)
    torch.testing.assert_close(actual_grad, expected_grad)


def test_matmul_attention_has_the_gradient_of_finite_differences() -> None:
    qkv = random_images(2, 4, 3, 2, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(MatmulAttention.apply, (qkv,))


@law
@given(start=st.integers(0, 6), length=st.integers(1, 7))
def test_read_gives_the_same_tokens_as_computing_everything(start: int, length: int) -> None:
    layer, tokens = attention(), random_images(2, 7, 16)
    read = slice(start, start + length)
    trace = Trace(attention=True)
    torch.testing.assert_close(layer(tokens, read=read), layer(tokens)[:, read])
    torch.testing.assert_close(layer(tokens, trace, read), layer(tokens)[:, read])
    assert trace.attention[0].shape == (2, 2, len(range(7)[read]), 7)


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout"])
@pytest.mark.parametrize("traced", [False, True])
def test_dropout_is_off_in_evaluation_and_keeps_the_mean_in_training(rate: str, traced: bool) -> None:
    layer, without = attention(**{rate: 0.5}), attention()
    tokens = random_images(1, 4, 16)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        return layer(tokens, Trace(attention=True) if traced else None)

    expected = without(tokens)
    torch.testing.assert_close(run(tokens), expected)
    torch.manual_seed(0)
    layer.train()
    draws = run(tokens.expand(4096, -1, -1))
    spread = draws.std(0)
    assert spread.min() > 0
    assert ((draws.mean(0) - expected[0]).abs() < 6 * spread / 4096**0.5).all()


def test_traced_weights_are_those_before_dropout() -> None:
    layer, tokens = attention(attention_dropout=0.5), random_images(2, 5, 16)
    in_training, in_evaluation = Trace(attention=True), Trace(attention=True)
    layer.eval()(tokens, in_evaluation)
    layer.train()(tokens, in_training)
    torch.testing.assert_close(in_training.attention[0].sum(-1), torch.ones(2, 2, 5))
    torch.testing.assert_close(in_training.attention[0], in_evaluation.attention[0])


def bf16_gradients(layer: SelfAttention, tokens: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(tokens)
    mixed.float().square().sum().backward()
    return [mixed.detach().float(), *(parameter.grad for parameter in layer.parameters())]


# Training in bf16 on a CPU may take another kernel than everything else; what holds is the same.
def test_training_in_bf16_has_the_gradients_of_float32_up_to_rounding() -> None:
    layer, tokens = attention().train(), random_images(4, 9, 16)
    mixed = layer(tokens)
    mixed.square().sum().backward()
    exact = [mixed.detach(), *(parameter.grad.clone() for parameter in layer.parameters())]
    for rounded, reference in zip(bf16_gradients(layer, tokens), exact, strict=True):
        assert (rounded - reference).abs().max() < 0.03 * reference.abs().max()


def test_training_in_bf16_drops_attention_weights_too() -> None:
    layer, tokens = attention(attention_dropout=0.5).train(), random_images(4, 9, 16)
    assert not torch.equal(bf16_gradients(layer, tokens)[0], bf16_gradients(layer, tokens)[0])
    layer.eval()
    assert torch.equal(bf16_gradients(layer, tokens)[0], bf16_gradients(layer, tokens)[0])
