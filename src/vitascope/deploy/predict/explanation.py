"""`Explanation`: where a model looks in one picture, as numbers and as a picture."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vitascope.data.preprocess import Pixels
from vitascope.deploy.predict.engine import Engine, TorchEngine
from vitascope.errors import UserError
from vitascope.explain.forward import pooled_and_logits
from vitascope.explain.methods import DEFAULT_METHOD, METHODS, check_settings, methods_for
from vitascope.explain.targets import class_index
from vitascope.storage import explaining_failure, make_folder, replacing


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """A heatmap of one picture; a notebook shows the picture under it."""

    method: str
    """A name in `vitascope.explain.METHODS`."""
    target: int | None
    """The explained class; None for a method that is the same for all classes."""
    label: str | None
    """The class's name."""
    heatmap: npt.NDArray[np.float32]
    """(grid_h, grid_w), at least 0, the largest value 1."""
    picture: npt.NDArray[np.uint8]
    """The model's input: (H, W) or (H, W, 3)."""

    @property
    def overlay(self) -> Image.Image:
        """The picture under its heatmap."""
        from vitascope.explain.plots import enlarged, overlay  # imports matplotlib, which takes a second

        return Image.fromarray(overlay(enlarged(self.picture), self.heatmap))

    def png(self) -> bytes:
        """`overlay` as a PNG file."""
        file = io.BytesIO()
        self.overlay.save(file, "PNG")
        return file.getvalue()

    _repr_png_ = png

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `overlay` as a picture, of the format that `path` ends in; returns the path.

        An existing file is replaced, and the folder created if absent.

        Raises:
            UserError: an unknown ending; a file that cannot be written.
        """
        path = Path(path)
        format = Image.registered_extensions().get(path.suffix.lower())
        if format not in Image.SAVE:
            raise UserError(f"{path}: a picture's name ends in .png, .jpg or .webp")
        make_folder(path.parent)
        with explaining_failure(path, "the explanation", "choose another place"), replacing(path) as aside:
            self.overlay.save(aside, format)
        return path

    def __repr__(self) -> str:
        about = "" if self.label is None else f" of {self.label!r}"
        return f"Explanation({self.method}{about}, heatmap {self.heatmap.shape})"


def explain_pixels(
    engine: Engine,
    pixels: Pixels,
    method: str = DEFAULT_METHOD,
    target: int | str | None = None,
    *,
    batch_size: int | None = None,
) -> Explanation:
    """Explain the prediction of one picture, uint8 (C, H, W); `target` None is the predicted class.

    `batch_size` is that of the forward passes of a method that needs many; None is the method's own.
    """
    if not isinstance(engine, TorchEngine):  # an exported model has no gradients and no attention
        raise UserError(f"an explanation needs the model itself, not {engine.description}")
    check_settings(method, ["target"] * (target is not None))
    model, chosen = engine.model, METHODS[method]
    supported = methods_for(model)
    if method not in supported:
        lacks = "attention" if model.config.gives_classes else "a head"
        raise UserError(
            f"{method} needs {lacks}, which this model lacks; methods for it: {', '.join(supported)}"
        )
    images = engine.preprocess.normalize(torch.from_numpy(pixels)[None]).to(engine.device)  # (1, C, H, W)
    index = None
    if chosen.has_target:
        logits = pooled_and_logits(model, images)[1]
        index = int(logits.argmax()) if target is None else class_index(target, model.config)
    heatmap = chosen(model, images, index, batch_size=batch_size)[0].cpu().numpy()
    picture = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    return Explanation(method, index, None if index is None else engine.label(index), heatmap, picture)
