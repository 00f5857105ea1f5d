"""The solved exercises. A reader gets the same files without the bodies of the functions."""

from collections.abc import Callable

from torch import Tensor

from vitascope_lessons.solutions.attention import attention
from vitascope_lessons.solutions.block import block
from vitascope_lessons.solutions.loss import loss
from vitascope_lessons.solutions.mlp import mlp
from vitascope_lessons.solutions.multi_head import multi_head
from vitascope_lessons.solutions.patches import patches
from vitascope_lessons.solutions.pool import pool
from vitascope_lessons.solutions.positions import positions

SOLUTIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (patches, positions, attention, multi_head, mlp, block, pool, loss)
}
"""In the order of the exercises; each function has the name of its file."""
