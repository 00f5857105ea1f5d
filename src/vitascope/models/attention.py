"""Multi-head self-attention (paper, appendix A, equations 5-8), and the choice of its kernel.

PyTorch's fused attention is the fastest forward pass on every machine measured but one: in bf16 on AVX-512
BF16 without AMX, batched matrix products take two thirds of its time from 128 tokens on. Its backward pass is
slow on every CPU: in bf16 it takes 3 to 9 times as long as matrix products, and in fp32 it is slower while
the weights fit in the cache. `MatmulAttention` runs in these cases, the fused kernel in all others. A trace
that requests the weights gets them from the equations themselves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import has_torch_function_unary

from vitascope.models.config import ViTConfig
from vitascope.models.hardware import bf16_units
from vitascope.models.norms import norm_of
from vitascope.models.positions import Layout
from vitascope.models.trace import Trace

EVERY_TOKEN = slice(None)


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """A = softmax(q k^T / sqrt(hd) + bias), equation 6: (B, heads, Q, hd) -> (B, heads, Q, T)."""
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    return (scores if bias is None else scores + bias.to(scores.dtype)).softmax(dim=-1)


def join_heads(mixed: Tensor) -> Tensor:
    """(B, heads, Q, hd) -> (B, Q, heads hd)."""
    return mixed.transpose(1, 2).flatten(2)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Equations 6 and 7 in PyTorch's kernel: (B, heads, Q, hd). A `bias` of 3 dimensions triples its time."""
    return F.scaled_dot_product_attention(q, k, v, None if bias is None else bias.to(q.dtype), dropout)


def attention(
    qkv: Tensor, bias: Tensor | None = None, queries: slice = EVERY_TOKEN, dropout: float = 0.0
) -> Tensor:
    """Equations 6 and 7 in the fastest kernel, of the selected queries: (B, Q, heads hd).

    `bias` is added to the scores: (1, heads, T, T), or (B, 1, 1, T) without gradient.
    """
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, hd)
    by_key = bias is not None and bias.shape[1:3] == (1, 1) and not bias.requires_grad
    if queries == EVERY_TOKEN:
        if dropout == 0 and (bias is None or by_key) and faster_by_matmul(qkv):
            return MatmulAttention.apply(qkv, None if bias is None else bias[:, 0])  # type: ignore[no-untyped-call]
        return join_heads(fused_attention(q, k, v, bias, dropout))
    if by_key:
        return join_heads(fused_attention(q[:, :, queries], k, v, bias, dropout))
    weights = attention_weights(q[:, :, queries], k, None if bias is None else bias[:, :, queries])
    return join_heads(F.dropout(weights, dropout) @ v)


class MatmulAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(hd)) v by batched matrix products, forward and backward.

    Autograd's version of these products copies q, k and v, and their gradients again; here the gradients are
    written to their place. Keeps the weights: O(T^2) memory.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor | None = None) -> Tensor:
        """(B, T, 3, heads, hd) -> (B, T, D); `bias` (B, 1, T), without a gradient, is added to the scores."""
        B, T, _, H, hd = qkv.shape
        qkv = qkv.permute(2, 0, 3, 1, 4).reshape(3, B * H, T, hd)
        q, k, v = qkv
        added = qkv.new_empty(1, 1, 1) if bias is None else bias.to(qkv.dtype).repeat_interleave(H, dim=0)
        scores = torch.baddbmm(added, q, k.mT, beta=int(bias is not None), alpha=hd**-0.5)
        weights = scores.softmax(dim=-1)  # (B*H, T, T)
        ctx.save_for_backward(qkv, weights)
        ctx.num_heads = H  # an empty batch does not show it
        return (weights @ v).view(B, H, T, hd).transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """With dA = g v^T and dS = A * (dA - rowsum(A * dA)): dv = A^T g, dq = dS k, dk = dS^T q, scaled."""
        qkv, weights = ctx.saved_tensors
        q, k, v = qkv
        B, H, (_, T, hd) = grad.shape[0], ctx.num_heads, q.shape
        grad = grad.view(B, T, H, hd).transpose(1, 2).reshape(B * H, T, hd)
        d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)  # of one head, qkv is a view
        torch.bmm(weights.mT, grad, out=d_qkv[2])
        d_scores = torch._softmax_backward_data(grad @ v.mT, weights, -1, weights.dtype)
        torch.baddbmm(d_qkv[0], d_scores, k, beta=0, alpha=hd**-0.5, out=d_qkv[0])
        torch.baddbmm(d_qkv[1], d_scores.mT, q, beta=0, alpha=hd**-0.5, out=d_qkv[1])
        return d_qkv.view(3, B, H, T, hd).permute(1, 3, 0, 2, 4), None  # (B, T, 3, H, hd)


# The largest attention weights (B, heads, T, T), in bytes, for which matrix products train faster on a CPU.
# In bf16 they always do; there the limit bounds the memory of all layers.
_MATMUL_LIMIT = {torch.float32: 2**24, torch.bfloat16: 2**28}


def faster_by_matmul(qkv: Tensor) -> bool:
    """Whether `MatmulAttention` beats the fused kernel for qkv (B, T, 3, heads, hd)."""
    if qkv.device.type != "cpu" or torch.compiler.is_exporting():
        return False  # an exported model predicts, maybe elsewhere; the limit would bound its batch
    if has_torch_function_unary(qkv):
        return False  # a `TorchFunctionMode` sees the functions of torch, and not `MatmulAttention`
    B, T, _, H, _ = qkv.shape
    fits = B * H * T * T * qkv.element_size() <= _MATMUL_LIMIT.get(qkv.dtype, 0)
    if qkv.requires_grad:
        return fits
    if torch.compiler.is_compiling():
        return False  # a compiled model may run elsewhere
    return fits and qkv.dtype == torch.bfloat16 and T >= 128 and bf16_units() == "AVX-512 BF16"


def rotate(qkv: Tensor, layout: Layout) -> Tensor:
    """Apply the layout's rotary embedding to queries and keys: (B, T, 3, heads, hd) -> the same shape."""
    if layout.rotation is None:
        return qkv
    cos, sin = (table.unsqueeze(-3) for table in layout.rotation)  # (N, 1, 1 or heads, hd)
    P = layout.num_prefix_tokens
    qk, v = qkv[:, P:, :2], qkv[:, P:, 2:]
    left, right = qk.chunk(2, dim=-1)
    turned = qk * cos + torch.cat([-right, left], dim=-1) * sin  # in float32 under autocast too
    return torch.cat([qkv[:, :P], torch.cat([turned.to(v.dtype), v], dim=2)], dim=1)


class KeylessLinear(nn.Linear):
    """U_qkv, (B, T, D) -> (B, T, 3 heads hd), without a bias of the keys: it would cancel in the softmax."""

    def __init__(self, embed_dim: int, attention_dim: int) -> None:
        super().__init__(embed_dim, 3 * attention_dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(2 * attention_dim))  # of queries, of values

    def forward(self, tokens: Tensor) -> Tensor:
        q, v = self.bias.chunk(2)
        return F.linear(tokens, self.weight, torch.cat([q, torch.zeros_like(q), v]))


class QueryKeyNorm(nn.Module):
    """Norms of each head's queries and keys, which bound the scores (Dehghani et al. 2023, ViT-22B).

    (B, T, 3, heads, hd) -> the same shape; the values stay.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.q = norm_of(config, config.head_dim)
        self.k = norm_of(config, config.head_dim)

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unbind(2)
        return torch.stack([self.q(q).to(v.dtype), self.k(k).to(v.dtype), v], dim=2)


class SelfAttention(nn.Module):
    """MSA(z) = [SA_1(z); ...; SA_k(z)] U_msa, equation 8: (B, T, D) -> (B, Q, D), for Q `queries`."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        D, inner, bias = config.embed_dim, config.attention_dim, config.block.qkv_bias
        self.num_heads = config.num_heads
        self.attention_dropout = config.regularization.attention_dropout
        # U_qkv of every head, equation 5
        keyless = bias == "no_key"
        self.qkv = KeylessLinear(D, inner) if keyless else nn.Linear(D, 3 * inner, bias=bias == "all")
        normalizes = config.norms.inner_norm == "all"
        self.norm = norm_of(config, inner) if normalizes else nn.Identity()
        self.qk_norm = QueryKeyNorm(config) if config.norms.qk_norm else nn.Identity()
        self.proj = nn.Linear(inner, D, bias=config.block.linear_bias)  # U_msa
        self.dropout = nn.Dropout(config.regularization.dropout)

    def forward(
        self, tokens: Tensor, layout: Layout, trace: Trace | None = None, queries: slice = EVERY_TOKEN
    ) -> Tensor:
        rate = self.attention_dropout if self.training else 0.0
        qkv = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, heads, hd)
        qkv = rotate(self.qk_norm(qkv), layout)
        if trace is not None:
            trace.keep_attended(layout.expand(tokens))
        if trace is None or not trace.keeps_attention:
            mixed = self.mix(qkv, layout, queries, rate)
        else:
            # One copy here instead of one in each product below.
            q, k, v = qkv.permute(2, 0, 3, 1, 4).contiguous()  # (B, heads, T, hd)
            weights = self.weights(q, k, layout)[:, :, queries]  # (B, heads, Q, T)
            trace.keep_attention(layout.expand_weights(weights))
            mixed = join_heads(F.dropout(weights, rate) @ v)  # equation 7
        return self.dropout(self.proj(self.norm(mixed)))  # (B, Q, D)

    def bias(self, k: Tensor, layout: Layout) -> Tensor | None:
        """The numbers to add to the scores, for keys (B, heads, T, hd); see `attention`."""
        return layout.bias(layout.grid)

    def weights(self, q: Tensor, k: Tensor, layout: Layout) -> Tensor:
        """The weights of all tokens for each query, rows that sum to one: (B, heads, T, T)."""
        return attention_weights(q, k, self.bias(k, layout))

    def mix(self, qkv: Tensor, layout: Layout, queries: slice, rate: float) -> Tensor:
        """The values under these weights: (B, T, 3, heads, hd) -> (B, Q, heads hd)."""
        return attention(qkv, self.bias(qkv[:, :, 1].transpose(1, 2), layout), queries, rate)
