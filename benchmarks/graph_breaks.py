"""Graph breaks of torch.compile, each at the line of vitascope that causes it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import vitascope as vs

SOURCE = Path(vs.__file__).parent


def place_of(stack: Iterable[traceback.FrameSummary]) -> str:
    """The innermost frame of vitascope in a stack, as `models/vit.py:66`; `elsewhere` without any."""
    inside = [frame for frame in stack if Path(frame.filename).is_relative_to(SOURCE)]
    if not inside:
        return "elsewhere"
    return f"{Path(inside[-1].filename).relative_to(SOURCE).as_posix()}:{inside[-1].lineno}"


def graph_breaks(function: Callable[..., Any], *inputs: Any) -> list[str]:
    """The places and reasons for which a call is not one graph of torch.compile; empty if it is one."""
    torch.compiler.reset()
    reasons = torch._dynamo.explain(function)(*inputs).break_reasons
    # A break in an inner call is reported again for each call around it.
    return list(
        dict.fromkeys(f"{place_of(reason.user_stack)}: {reason.reason.splitlines()[0]}" for reason in reasons)
    )
