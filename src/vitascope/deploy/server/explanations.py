"""An explanation as the server answers it: the numbers of a heatmap, or a picture of it."""

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
from vitascope.explain.methods import METHODS, methods_for
from vitascope.explain.plots import enlarged, overlay
from vitascope.explain.targets import class_index

AT_ONCE = 16
"""Images in a forward pass of a method that needs many passes ..."""
AT_ONCE_ON_CPU = 1
"""... and on a CPU, where two take twice as long: half a second with ViT-B/16 and gradients."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Where a model looks in a picture."""

    method: str
    target: int | None
    """The class that is explained; None where the method shows the same for all."""
    heatmap: np.ndarray[Any, np.dtype[np.float32]]
    """(gh, gw), the largest value 1."""
    picture: np.ndarray[Any, np.dtype[np.uint8]]
    """As the model sees it: (H, W) or (H, W, 3)."""

    def png(self) -> bytes:
        """The picture under its heatmap."""
        file = io.BytesIO()
        Image.fromarray(overlay(enlarged(self.picture), self.heatmap)).save(file, "PNG")
        return file.getvalue()


def images_at_once(engine: TorchEngine) -> int:
    """Images in a forward pass of an explanation: predictions wait for the end of each pass."""
    return AT_ONCE_ON_CPU if engine.device.type == "cpu" else AT_ONCE


def explain(engine: TorchEngine, pixels: Pixels, method: str, target: str | None) -> Explanation:
    """Explain the answer to a picture.

    Args:
        engine: has the model.
        pixels: uint8 (C, H, W).
        method: one of `METHODS`.
        target: a class by name or number; None is the one that the model predicts.

    Raises:
        UserError: no such method, or none for this model; no such class; a target for a method that has none.
    """
    check_choice("method", method, METHODS)
    model, chosen = engine.model, METHODS[method]
    fitting = methods_for(model)
    if method not in fitting:
        lacks = "attention" if model.config.gives_classes else "a head"
        raise UserError(
            f"{method} needs {lacks}, which this model lacks; methods for it: {', '.join(fitting)}"
        )
    if target is not None and not chosen.has_target:
        raise UserError(f"{method} shows the same for every class: leave out the target")
    images = engine.preprocess.normalize(torch.from_numpy(pixels)[None]).to(engine.device)  # (1, C, H, W)
    index = None
    if chosen.has_target:
        logits = pooled_and_logits(model, images)[1]
        index = int(logits.argmax()) if target is None else class_index(target, model.config)
    heat = chosen(model, images, index, batch_size=images_at_once(engine))[0].cpu().numpy()
    picture = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    return Explanation(method, index, heat, picture)
