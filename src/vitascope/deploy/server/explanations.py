"""Explanations whose forward passes are short, because predictions wait for their end."""

from __future__ import annotations

import torch

from vitascope.data.preprocess import Pixels
from vitascope.deploy.predict.engine import TorchEngine
from vitascope.deploy.predict.explanation import Explanation, explain_pixels
from vitascope.explain.methods import DEFAULT_METHOD as DEFAULT_METHOD


def batch_size(device: torch.device) -> int:
    """Images per forward pass: on a CPU, two take twice as long as one."""
    return 1 if device.type == "cpu" else 16


def explain(engine: TorchEngine, pixels: Pixels, method: str, target: str | None) -> Explanation:
    """Explain the prediction for a picture, uint8 (C, H, W); see `explain_pixels`."""
    return explain_pixels(engine, pixels, method, target, batch_size=batch_size(engine.device))
