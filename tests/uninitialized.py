"""Models without initial weights, which take most of the time of building one."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor

FILLS = ("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "kaiming_uniform_", "kaiming_normal_")
INITIALIZERS = {"torch.nn.init": FILLS, "timm.layers.weight_init": ("_trunc_normal_",)}


def unchanged(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


@contextlib.contextmanager
def uninitialized() -> Iterator[None]:
    """Build models whose weights are whatever the memory holds, to fill every one, or to have none (meta)."""
    with contextlib.ExitStack() as patches:
        for module, names in INITIALIZERS.items():
            for name in names if module in sys.modules else ():
                patches.enter_context(mock.patch(f"{module}.{name}", unchanged))
        yield
