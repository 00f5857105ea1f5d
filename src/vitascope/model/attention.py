"""Multi-head self-attention (paper, appendix A, equations 5-8), and which kernel runs when.

PyTorch's fused attention is the fastest forward pass on every machine tried. Its backward pass on a CPU is
not: in bf16 it takes 3 to 9 times as long as batched matrix products, and in fp32 it is slower while the
weights fit in the cache. So training on a CPU uses `MatmulAttention` there, and everything else the fused
kernel; whoever asks for the weights gets them from the equations themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitascope.model.config import ViTConfig
from vitascope.model.trace import Trace


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """A = softmax(q k^T / sqrt(hd)), equation 6: (B, heads, Q, hd), (B, heads, T, hd) -> (B, heads, Q, T)."""
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(dim=-1)


class MatmulAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(hd)) v by batched matrix products, forward and backward.

    Autograd's own version of the same products copies q, k and v apart and their gradients together
    again; written out, the gradients land where they belong. Keeps the weights: O(T^2) memory.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        """(B, T, 3, heads, hd) -> (B, T, D)."""
        B, T, _, H, hd = qkv.shape
        qkv = qkv.permute(2, 0, 3, 1, 4).reshape(3, B * H, T, hd)
        q, k, v = qkv
        scores = torch.baddbmm(qkv.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=hd**-0.5)
        weights = scores.softmax(dim=-1)  # (B*H, T, T)
        ctx.save_for_backward(qkv, weights)
        return (weights @ v).view(B, H, T, hd).transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """With dA = g v^T and dS = A * (dA - rowsum(A * dA)): dv = A^T g, dq = dS k, dk = dS^T q, scaled."""
        qkv, weights = ctx.saved_tensors
        q, k, v = qkv
        BH, T, hd = q.shape
        B = grad.shape[0]
        H = BH // B
        grad = grad.view(B, T, H, hd).transpose(1, 2).reshape(BH, T, hd)
        d_qkv = torch.empty_like(qkv)
        torch.bmm(weights.mT, grad, out=d_qkv[2])
        d_scores = torch._softmax_backward_data(grad @ v.mT, weights, -1, weights.dtype)
        torch.baddbmm(d_qkv[0], d_scores, k, beta=0, alpha=hd**-0.5, out=d_qkv[0])
        torch.baddbmm(d_qkv[1], d_scores.mT, q, beta=0, alpha=hd**-0.5, out=d_qkv[1])
        return d_qkv.view(3, B, H, T, hd).permute(1, 3, 0, 2, 4)  # (B, T, 3, H, hd)


# Bytes of attention weights (B, heads, T, T) up to which matrix products are the faster way to train on a
# CPU, by dtype. In bf16 they always were; the limit there bounds the memory, which is kept for every layer.
_MATMUL_LIMIT = {torch.float32: 2**24, torch.bfloat16: 2**28}


def trains_faster_by_matmul(qkv: Tensor) -> bool:
    """Whether `MatmulAttention` beats the fused kernel's backward pass for qkv (B, T, 3, heads, hd)."""
    if qkv.device.type != "cpu" or not qkv.requires_grad:
        return False
    B, T, _, H, _ = qkv.shape
    return B * H * T * T * qkv.element_size() <= _MATMUL_LIMIT.get(qkv.dtype, 0)


class SelfAttention(nn.Module):
    """MSA(z) = [SA_1(z); ...; SA_k(z)] U_msa, equation 8."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_dropout = config.attention_dropout
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim)  # U_qkv of every head, equation 5
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)  # U_msa
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, trace: Trace | None = None, read: slice = slice(None)) -> Tensor:
        """Mix tokens (B, T, D) into (B, Q, D), for the queries that `read` selects."""
        rate = self.attention_dropout if self.training else 0.0
        qkv = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, heads, hd)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, hd)
        if (trace is not None and trace.attention is not None) or read != slice(None):
            weights = attention_weights(q[:, :, read], k)  # (B, heads, Q, T)
            if trace is not None:
                trace.keep_attention(weights)
            mixed = (F.dropout(weights, rate) @ v).transpose(1, 2).flatten(2)
        elif rate == 0 and trains_faster_by_matmul(qkv):
            mixed = MatmulAttention.apply(qkv)  # type: ignore[no-untyped-call]
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate).transpose(1, 2).flatten(2)
        return self.dropout(self.proj(mixed))  # (B, Q, D)
