"""`Explanation`: where a model looks in one picture, as numbers and as a picture."""

import dataclasses
import io
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw

from vitascope.errors import UserError
from vitascope.models.engines.engine import Engine, TorchEngine
from vitascope.models.heads import predicted
from vitascope.models.preprocess import Framed, Pixels
from vitascope.storage import explaining_failure, make_folder, replacing


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
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
    """At its own resolution, up to 768 pixels, with its padding: (H, W) or (H, W, 3)."""
    box: tuple[float, float, float, float]
    """The part of `picture` that the model sees: left, top, right and bottom, in pixels."""

    @property
    def overlay(self) -> Image.Image:
        """The picture, the part that the model sees under the heatmap and the rest dimmed."""
        from vitascope.analysis.explain.pictures import (  # imports matplotlib, which takes a second
            Picture,
            overlay,
        )

        drawn = Image.fromarray(overlay(Picture(self.picture, self.box).enlarged(), self.heatmap))
        if not self.heatmap.any():
            middle = drawn.width / 2, drawn.height / 2
            ImageDraw.Draw(drawn).text(middle, "no evidence", fill="white", anchor="mm", font_size=24)
        return drawn

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
        evidence = "" if self.heatmap.any() else ", no evidence"
        return f"Explanation({self.method}{about}, heatmap {self.heatmap.shape}{evidence})"


def explain_pixels(
    engine: Engine, pixels: Pixels, method: str, target: str | None, *, batch_size: int
) -> Explanation:
    """`explain_framed` of a picture of which only the model's input, uint8 (C, H, W), is known."""
    return explain_framed(engine, Framed.whole(pixels), method, target, batch_size=batch_size)


def explain_framed(
    engine: Engine,
    framed: Framed,
    method: str,
    target: int | str | None,
    *,
    batch_size: int | None = None,
) -> Explanation:
    """Explain the prediction of one picture; `target` None is the predicted class.

    `batch_size` is that of the forward passes of a method that needs many; None is the method's own.
    """
    from vitascope.analysis.explain.inputs import pooled_and_logits, seen_hw  # predictions need no heatmaps
    from vitascope.analysis.explain.methods import METHODS, check_settings, methods_for
    from vitascope.analysis.explain.targets import class_index

    if not isinstance(engine, TorchEngine):  # an exported model has no gradients and no attention
        raise UserError(f"an explanation needs the model itself, not {engine.description}")
    check_settings(method, ["target"] * (target is not None))
    model, chosen = engine.model, METHODS[method]
    if lacking := chosen.lacking(model):
        known = ", ".join(methods_for(model))
        raise UserError(f"{method} needs {lacking}, which this model lacks; methods for it: {known}")
    framed = framed.top_left(*seen_hw(model, engine.preprocess.image_size))
    images = engine.preprocess.normalize(torch.from_numpy(framed.pixels)[None]).to(
        engine.device
    )  # (1, C, H, W)
    index = None
    if chosen.has_target:
        logits = pooled_and_logits(model, images)[1]
        index = int(predicted(logits)) if target is None else class_index(target, model.config)
    heatmap = chosen(model, images, index, batch_size=batch_size)[0].cpu().numpy()
    label = None if index is None else engine.label(index)
    shown = framed.picture
    picture = shown[0] if len(shown) == 1 else shown.transpose(1, 2, 0)
    return Explanation(method, index, label, heatmap, picture, framed.box)
