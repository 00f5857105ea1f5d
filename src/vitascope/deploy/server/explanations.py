"""Explanations whose forward passes are short, so that predictions go between them."""

from __future__ import annotations

from vitascope.data.preprocess import Pixels
from vitascope.deploy.predict.engine import TorchEngine
from vitascope.deploy.predict.explanation import Explanation, explain_pixels
from vitascope.explain.methods import DEFAULT_METHOD as DEFAULT_METHOD


def batch_size(engine: TorchEngine) -> int:
    """Images per forward pass of an explanation, for whose end predictions wait.

    On a CPU, two images take twice as long as one: half a second with ViT-B/16 and gradients.
    """
    return 1 if engine.device.type == "cpu" else 16


def explain(engine: TorchEngine, pixels: Pixels, method: str, target: str | None) -> Explanation:
    """Explain the prediction for a picture, uint8 (C, H, W); see `explain_pixels`."""
    return explain_pixels(engine, pixels, method, target, batch_size=batch_size(engine))
