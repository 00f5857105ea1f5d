"""Exercise 4, multi-head attention: MSA(z) = [SA_1(z); ...; SA_k(z)] U_msa, equations 5 and 8.

z U_qkv has 3 D numbers per token: first the queries of all heads, then the keys, then the values. Within each
third, head 1 has the first D_h = D / heads numbers, head 2 the next, and so on. Split them, call
`attention(q, k, v)`, your function of exercise 3, put the results of the heads side by side again, and
multiply by U_msa.

Tools: `unflatten(-1, (3, heads, -1))` splits the last axis, `permute`, `transpose`, `flatten(2)`.
"""

from collections.abc import Callable

from torch import Tensor


def multi_head(
    z: Tensor, U_qkv: Tensor, U_msa: Tensor, heads: int, attention: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Tokens (B, T, D), U_qkv (D, 3 D) and U_msa (D, D) to MSA(z) (B, T, D)."""
    q, k, v = (z @ U_qkv).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, T, D_h)
    answers = attention(q, k, v)  # (B, heads, T, D_h)
    return answers.transpose(1, 2).flatten(2) @ U_msa
