from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import law, random_images, randomize, sequence, small_config
from vitascope.models import attention as attention_module
from vitascope.models.attention import MatmulAttention, SelfAttention, faster_by_matmul
from vitascope.models.trace import Trace

SMALL = st.integers(1, 5)


def attention(**overrides: Any) -> SelfAttention:
    return randomize(SelfAttention(small_config(**overrides))).eval()


def explicit_attention(qkv: torch.Tensor) -> torch.Tensor:
    """Equations 6 and 7, head by head: (B, T, 3, heads, hd) -> (B, T, heads * hd)."""
    heads = []
    for head in range(qkv.shape[3]):
        q, k, v = qkv[:, :, :, head].unbind(2)  # (B, T, hd)
        heads.append(torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1) @ v)
    return torch.cat(heads, dim=-1)


@pytest.mark.parametrize("norm_type", ["layer", "rms"])
def test_normalized_queries_and_keys_have_scores_independent_of_their_size(norm_type: str) -> None:
    layer, tokens = attention(qk_norm=True, norm_type=norm_type, norm_eps=0.0), random_images(2, 5, 16)
    before = layer(tokens, sequence(5))
    with torch.no_grad():
        layer.qkv.weight[:32] *= 100
        layer.qkv.bias[:32] *= 100
    torch.testing.assert_close(layer(tokens, sequence(5)), before, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        layer.qkv.weight[32:] *= 100
    assert not torch.allclose(layer(tokens, sequence(5)), before, rtol=0.1)


@law
@given(B=SMALL, T=SMALL, heads=SMALL, hd=SMALL)
def test_matmul_attention_equals_the_explicit_equations(B: int, T: int, heads: int, hd: int) -> None:
    qkv = random_images(B, T, 3, heads, hd).double().requires_grad_()
    direction = random_images(B, T, heads * hd, seed=2).double()
    expected = explicit_attention(qkv)
    actual = MatmulAttention.apply(qkv)
    torch.testing.assert_close(actual, expected)
    (expected_grad,) = torch.autograd.grad(expected, qkv, direction)
    (actual_grad,) = torch.autograd.grad(actual, qkv, direction)
    torch.testing.assert_close(actual_grad, expected_grad)


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout"])
@pytest.mark.parametrize("traced", [False, True])
def test_dropout_is_off_in_evaluation_and_keeps_the_mean_in_training(rate: str, traced: bool) -> None:
    layer, without = attention(**{rate: 0.5}), attention()
    tokens = random_images(1, 4, 16)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        return layer(tokens, sequence(4), Trace(attention=True) if traced else None)

    expected = without(tokens, sequence(4))
    torch.testing.assert_close(run(tokens), expected)
    torch.manual_seed(0)
    layer.train()
    draws = run(tokens.expand(4096, -1, -1))
    spread = draws.std(0)
    assert spread.min() > 0
    assert ((draws.mean(0) - expected[0]).abs() < 6 * spread / 4096**0.5).all()


def test_traced_weights_are_before_dropout() -> None:
    layer, tokens = attention(attention_dropout=0.5), random_images(2, 5, 16)
    in_training, in_evaluation = Trace(attention=True), Trace(attention=True)
    layer.eval()(tokens, sequence(5), in_evaluation)
    layer.train()(tokens, sequence(5), in_training)
    torch.testing.assert_close(in_training.attention[0].sum(-1), torch.ones(2, 2, 5))
    torch.testing.assert_close(in_training.attention[0], in_evaluation.attention[0])


def bf16_gradients(layer: SelfAttention, tokens: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(tokens, sequence(9))
    mixed.float().square().sum().backward()
    return [mixed.detach().float(), *(parameter.grad for parameter in layer.parameters())]


# Training in bf16 on a CPU may use a kernel of its own; the results are the same.
def test_training_in_bf16_has_the_gradients_of_float32_up_to_rounding() -> None:
    layer, tokens = attention().train(), random_images(4, 9, 16)
    mixed = layer(tokens, sequence(9))
    mixed.square().sum().backward()
    exact = [mixed.detach(), *(parameter.grad.clone() for parameter in layer.parameters())]
    for rounded, reference in zip(bf16_gradients(layer, tokens), exact, strict=True):
        assert (rounded - reference).abs().max() < 0.03 * reference.abs().max()


@pytest.mark.parametrize(
    ("units", "dtype", "T", "faster"),
    [
        ("AVX-512 BF16", torch.bfloat16, 128, True),
        ("AVX-512 BF16", torch.bfloat16, 127, False),
        ("AVX-512 BF16", torch.float32, 128, False),
        ("AVX-512 BF16", torch.bfloat16, 8192, False),  # 128 MiB of weights per head
        ("AMX", torch.bfloat16, 128, False),
        (None, torch.bfloat16, 128, False),
    ],
)
def test_prediction_uses_matrix_products_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, units: str | None, dtype: torch.dtype, T: int, faster: bool
) -> None:
    monkeypatch.setattr(attention_module, "bf16_units", lambda: units)
    qkv = torch.empty(1, T, 3, 3, 2, dtype=dtype)
    assert faster_by_matmul(qkv) == faster


@pytest.mark.parametrize("by_matmul", [True, False])
@torch.inference_mode()
def test_both_kernels_predict_the_same(monkeypatch: pytest.MonkeyPatch, by_matmul: bool) -> None:
    taken, tokens = [], random_images(2, 9, 16)
    expected = attention()(tokens, sequence(9))
    monkeypatch.setattr(attention_module, "faster_by_matmul", lambda _: by_matmul)
    monkeypatch.setattr(
        MatmulAttention, "apply", lambda qkv, bias: taken.append(qkv) or explicit_attention(qkv)
    )
    found = attention().bfloat16()(tokens.bfloat16(), sequence(9))
    assert len(taken) == by_matmul
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
