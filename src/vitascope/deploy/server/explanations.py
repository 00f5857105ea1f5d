"""Explanations: a heatmap as numbers, or as a picture."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitascope.data.preprocess import Pixels
from vitascope.deploy.predict.engine import TorchEngine
from vitascope.errors import UserError, check_choice
from vitascope.explain.forward import pooled_and_logits
from vitascope.explain.methods import DEFAULT_METHOD as DEFAULT_METHOD
from vitascope.explain.methods import METHODS, methods_for
from vitascope.explain.plots import enlarged, overlay
from vitascope.explain.targets import class_index


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The heatmap (gh, gw) of a class, or of none, and the pixels (C, H, W) of its picture."""

    target: int | None
    heatmap: np.ndarray[Any, np.dtype[np.float32]]
    pixels: Pixels

    def png(self) -> bytes:
        """The picture under its heatmap."""
        picture = self.pixels[0] if len(self.pixels) == 1 else self.pixels.transpose(1, 2, 0)
        file = io.BytesIO()
        Image.fromarray(overlay(enlarged(picture), self.heatmap)).save(file, "PNG")
        return file.getvalue()


def batch_size(engine: TorchEngine) -> int:
    """Images per forward pass of an explanation, for whose end predictions wait.

    On a CPU, two images take twice as long as one: half a second with ViT-B/16 and gradients.
    """
    return 1 if engine.device.type == "cpu" else 16


def explain(engine: TorchEngine, pixels: Pixels, method: str, target: str | None) -> Explanation:
    """Explain the prediction for a picture, uint8 (C, H, W).

    Args:
        engine: has the model.
        pixels: uint8 (C, H, W).
        method: a name in `METHODS`.
        target: a class name or number; default: the predicted class.

    Raises:
        UserError: an unknown or unsuitable method, an unknown class, or a target for a method without one.
    """
    check_choice("method", method, METHODS)
    model, chosen = engine.model, METHODS[method]
    suitable = methods_for(model)
    if method not in suitable:
        need = "attention" if model.config.gives_classes else "a head"
        raise UserError(
            f"{method} needs {need}, which this model lacks; methods for it: {', '.join(suitable)}"
        )
    if target is not None and not chosen.has_target:
        raise UserError(f"{method} shows the same for every class: leave out the target")
    images = engine.preprocess.normalize(torch.from_numpy(pixels)[None]).to(engine.device)  # (1, C, H, W)
    index = None
    if chosen.has_target:
        logits = pooled_and_logits(model, images)[1]
        index = int(logits.argmax()) if target is None else class_index(target, model.config)
    heatmap = chosen(model, images, index, batch_size=batch_size(engine))[0].cpu().numpy()
    return Explanation(index, heatmap, pixels)
