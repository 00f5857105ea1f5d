"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each part in the mode that it had."""
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
