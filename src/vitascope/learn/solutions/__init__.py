"""The solved exercises. A reader gets the same files without the bodies of the functions."""

from collections.abc import Callable

from torch import Tensor

from vitascope.learn.solutions.attention import attention
from vitascope.learn.solutions.block import block
from vitascope.learn.solutions.loss import loss
from vitascope.learn.solutions.mlp import mlp
from vitascope.learn.solutions.multi_head import multi_head
from vitascope.learn.solutions.patches import patches
from vitascope.learn.solutions.pool import pool
from vitascope.learn.solutions.positions import positions

SOLUTIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (patches, positions, attention, multi_head, mlp, block, pool, loss)
}
"""In the order of the exercises; each function has the name of its file."""
