"""The forward passes of explanations; with a hook before each, a server can run something else in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from vitascope.model.vision_model import VisionModel, evaluation_mode

_hook: ContextVar[Callable[[], None] | None] = ContextVar("hook", default=None)


@contextmanager
def before_each_forward(hook: Callable[[], None]) -> Iterator[None]:
    """Call a function before each forward pass of the methods in this thread or task; its exceptions end
    them."""
    token = _hook.set(hook)
    try:
        yield
    finally:
        _hook.reset(token)


def call_hook() -> None:
    """Call the hook, if there is one; a method calls this before each of its forward passes."""
    hook = _hook.get()
    if hook is not None:
        hook()


@torch.no_grad()
def pooled_and_logits(model: VisionModel, images: Tensor) -> tuple[Tensor, Tensor]:
    """The pooled representation (B, D) and the logits (B, K) of images (B, C, H, W), in evaluation mode."""
    call_hook()
    with evaluation_mode(model):
        pooled = model.embed(images)
        return pooled, model.head(pooled)
