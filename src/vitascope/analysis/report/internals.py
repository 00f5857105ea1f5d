"""The report's sections about the network: its attention, positions and filters, and masked patches."""

import io
from collections.abc import Iterable
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from vitascope.analysis.explain.inputs import normalized
from vitascope.analysis.explain.learned import attention_distance, uniform_distance
from vitascope.analysis.explain.plots import draw_attention_distance
from vitascope.analysis.report.figures import draw_embedding
from vitascope.analysis.report.page import PAGE_STYLE, embedded
from vitascope.analysis.report.thumbnails import attention_over, data_uri, name_of_image, read_pictures
from vitascope.data.splits import ImageSet
from vitascope.language import say
from vitascope.models.decoding import read_image
from vitascope.models.preprocess import Framed
from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer
from vitascope.training.run.run import Run

EXAMPLES = 8
"""Images that are shown under their attention."""
FOR_DISTANCE = 16
"""Images that the attention distance is a mean of."""


def attention_section(model: VisionModel, images: ImageSet | None) -> dict[str, Any] | None:
    """Attention over some images and its distance by layer; None for a ResNet."""
    if not isinstance(model, VisionTransformer):
        return None
    if images is None:
        return {"missing": say("The images cannot be found.")}
    pictures = read_pictures(images, images.spread(FOR_DISTANCE), model)
    if not pictures:
        return {"missing": say("None of the images can be read any more.")}
    examples = dict(list(pictures.items())[:: max(1, len(pictures) // EXAMPLES)][:EXAMPLES])
    seen = attention_over(model, examples)
    return {
        "missing": "",
        "examples": [(pictures[index], seen[index], name_of_image(images, index)) for index in examples],
        "distance": _distance(model, pictures.values()) if model.config.grid != (1, 1) else None,
        "count": len(pictures),
    }


def _distance(model: VisionTransformer, pictures: Iterable[Framed]) -> str:
    images = normalized(model, torch.from_numpy(np.stack([picture.pixels for picture in pictures])))
    distances = attention_distance(model, images).cpu().numpy()  # (depth, heads)

    def draw() -> Figure:
        figure = draw_attention_distance(distances, uniform_distance(model, images))
        figure.suptitle("")
        figure.set_size_inches(5.4, 3.6)  # readable on a phone
        return figure

    return embedded(draw, "distance", "attention distance by layer", width=760)


def learned(model: VisionModel) -> dict[str, Any] | None:
    """Positions and filters of the patch embedding; None if the model has neither."""
    if not isinstance(model, VisionTransformer):
        return None
    with matplotlib.rc_context(PAGE_STYLE):
        figures = draw_embedding(model)
    if max(model.config.patch_hw) == 1:
        figures.pop("filters", None)  # a filter of one pixel has no pattern
    alts = {"positions": "similarity of position embeddings", "filters": "filters of the patch embedding"}
    for figure in figures.values():
        figure.suptitle("")
    drawings = {
        name: embedded(partial(figures.__getitem__, name), name, alts[name], width=640) for name in figures
    }
    return drawings or None


def masked(run: Run) -> dict[str, Any] | None:
    """Predictions of a pre-trained model for hidden patches; None if they are not drawn."""
    path = run.figures / "masked.png"
    if not path.is_file():
        return None
    written = io.BytesIO()
    read_image(path).convert("RGB").save(written, "JPEG", quality=85)
    return {"source": data_uri(written.getvalue(), "jpeg")}
