"""torch's AdamW and SGD without its compiler, whose import takes longer than a step.

torch wraps methods of its optimizers to keep them out of compiled graphs, and the wrappers import the
compiler. A run compiles its model at most, never its optimizer, so these have the methods without wrappers.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any, ClassVar

import torch


class EagerOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers."""

    add_param_group: ClassVar[Any] = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad: ClassVar[Any] = unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(EagerOptimizer, torch.optim.AdamW):
    """Loshchilov and Hutter 2019."""

    step: ClassVar[Any] = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class SGD(EagerOptimizer, torch.optim.SGD):
    """Gradient descent with momentum."""

    step: ClassVar[Any] = torch.no_grad()(unwrap(torch.optim.SGD.step))
