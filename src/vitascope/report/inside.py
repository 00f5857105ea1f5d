"""What the network looks at and what it has learned, as far as it has attention, positions and filters."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vitascope.data.preprocess import Preprocess
from vitascope.data.splits import ImageSet
from vitascope.explain.learned import attention_distance, uniform_distance
from vitascope.explain.model_plots import draw_attention_distance
from vitascope.model.classifier import Classifier
from vitascope.model.vit import VisionTransformer
from vitascope.report.figures import draw_embedding, to_picture
from vitascope.report.html import Markup, Section, element, figure, join, note, paragraph, scrolling
from vitascope.report.pictures import attention_over, data_uri, image, place_of, read_pixels
from vitascope.report.svg import DRAWING, embed
from vitascope.run.run import Run

EXAMPLES = 8
FOR_DISTANCE = 16
MASKED_BYTES = 1_500_000


def attention_section(model: Classifier, preprocess: Preprocess, images: ImageSet | None) -> Section | None:
    """Where the model looks, and how far; None of a ResNet."""
    if not isinstance(model, VisionTransformer):
        return None
    title = "Where it looks"
    if images is None:
        return Section(
            "attention", title, note("Attention is attention over pictures, which are not to be had.")
        )
    spread = np.unique(np.linspace(0, len(images) - 1, min(FOR_DISTANCE, len(images))).astype(int))
    pixels = read_pixels(images, spread, preprocess)
    if not pixels:
        return Section("attention", title, note("None of the pictures looked at can be read any more."))
    examples = dict(list(pixels.items())[:: max(1, len(pixels) // EXAMPLES)][:EXAMPLES])
    text = (
        "A few pictures, spread over the set, each beside itself under attention rollout: how much of each "
        "patch flows into the answer over all layers (Abnar and Zuidema 2020). Bright is much."
    )
    seen = attention_over(model, preprocess, examples)
    cards = [
        figure(
            element(
                "div",
                image(to_picture(pixels[index]), "a picture"),
                image(seen[index], "the same under its attention"),
                class_="row",
            ),
            element("span", place_of(images, index), class_="small"),
            class_="picture",
        )
        for index in examples
    ]
    parts = [paragraph(text), element("div", *cards, class_="pictures double")]
    if model.config.grid != (1, 1):
        parts += [element("h3", "How far its heads look"), _distance(model, preprocess, pixels)]
    return Section("attention", title, join(parts))


def _distance(
    model: VisionTransformer, preprocess: Preprocess, pixels: Mapping[int, npt.NDArray[np.uint8]]
) -> Markup:
    tiles = torch.from_numpy(np.stack(list(pixels.values()))).to(next(model.parameters()).device)
    images = preprocess.normalize(tiles)
    distances = attention_distance(model, images).cpu().numpy()  # (depth, heads)
    with matplotlib.rc_context(DRAWING):
        drawn = draw_attention_distance(distances, uniform_distance(model, images))
    drawn.suptitle("")
    drawn.set_size_inches(5.4, 3.6)  # so that its text is readable on a phone
    caption = (
        "A dot is a head: the mean distance, in pixels of the model's input, between a patch and the patches "
        f"that it attends to, over {len(pixels)} pictures (Dosovitskiy et al. 2021, figure 7). Heads "
        "far below the dashed line look near by, as a convolution does; heads at it look everywhere alike."
    )
    return figure(embed(drawn, "distance", "attention distance by layer", width=760), caption)


def learned_section(model: Classifier) -> Section | None:
    """What equation 1 has learned: positions and filters; None where there is neither."""
    if not isinstance(model, VisionTransformer):
        return None
    captions = {
        "positions": "Similarity of positions. Each tile is a patch; its picture, the cosine similarity of "
        "the patch's position embedding to all others (Dosovitskiy et al. 2021, figure 7). In a model that "
        "has learned where patches lie, each tile is bright around its own place, along its row and column.",
        "filters": "Filters. The principal components of the patch embedding, strongest first: the patterns "
        "of pixels that it tells apart. Smooth waves and edges are learned; noise is what it started from.",
    }
    with matplotlib.rc_context(DRAWING):
        drawn = draw_embedding(model)
    if max(model.config.patch_hw) == 1:
        drawn.pop("filters", None)  # a filter of one pixel has no pattern
    if not drawn:
        return None
    figures = []
    for name, figure_ in drawn.items():
        figure_.suptitle("")
        alt = captions[name].partition(".")[0]
        figures.append(figure(embed(figure_, name, alt, width=640), captions[name]))
    return Section(
        "learned", "What its first layer has learned", element("div", *figures, class_="side-by-side")
    )


def masked_section(run: Run) -> Section | None:
    """What a pre-trained model made of hidden patches; None where it was not drawn."""
    path = run.figures / "masked.png"
    if not path.is_file():
        return None
    content, kind = path.read_bytes(), "png"
    if len(content) > MASKED_BYTES:
        content, kind = _as_jpeg(path), "jpeg"
    text = (
        "Some patches were hidden, and the model said what was there. From above: the image, what it was "
        "given, what it predicted, and the right answer."
    )
    drawn = element(
        "img",
        src=data_uri(content, kind),
        alt="images, what the model was given of them, what it predicted, the right answer",
        class_="on-white",
    )
    return Section("masked", "What it makes of hidden patches", join([paragraph(text), scrolling(drawn)]))


def _as_jpeg(path: Path) -> bytes:
    written = io.BytesIO()
    with Image.open(path) as opened:
        opened.convert("RGB").save(written, "JPEG", quality=85)
    return written.getvalue()
