"""Exercise 6, pre-norm block: z' = MSA(LN(z)) + z, then MLP(LN(z')) + z', equations 2 and 3.

Layer norm comes first in each half, and each half adds its result to its input (the residual connection).
Each half has its own layer norm.

Tools: the four arguments are functions from (B, T, D) to (B, T, D).
"""

from collections.abc import Callable

from torch import Tensor

Part = Callable[[Tensor], Tensor]


def block(z: Tensor, LN_1: Part, MSA: Part, LN_2: Part, MLP: Part) -> Tensor:
    """Tokens (B, T, D) to the tokens after the block (B, T, D)."""
    z = MSA(LN_1(z)) + z
    return MLP(LN_2(z)) + z
