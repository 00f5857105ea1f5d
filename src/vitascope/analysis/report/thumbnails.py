"""Small pictures for the page, alone or under attention: the model's part bright, the rest dimmed."""

import base64
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from markupsafe import Markup
from PIL import Image

from vitascope.analysis.explain.inputs import normalized, seen_hw
from vitascope.analysis.explain.methods import heatmap, methods_for
from vitascope.analysis.explain.pictures import Picture, dimmed, overlay
from vitascope.data.reading import Faults, readable
from vitascope.data.splits import ImageSet
from vitascope.language import say
from vitascope.models.decoding import ImageSource, source_name
from vitascope.models.preprocess import Framed
from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.preprocess import preprocess_of

Pixels = npt.NDArray[np.uint8]

SIDE = 192
"""Longest side of a thumbnail."""
COARSE = 64
"""Longest side of an image that is stored without loss and enlarged with visible pixels."""
CHEAP = ("gradient-rollout", "layer-cam")
"""Methods of one backward pass, the more faithful first; the second suits every classifier."""
_SCORES = 2**21
"""Attention scores of a layer in memory at once; of a ViT-B/16 four images have so many."""


def framed(model: VisionModel, source: ImageSource, longest: int) -> Framed:
    """A picture as a model sees it, and as people see it; raises as `Preprocess.pixels`."""
    preprocess = preprocess_of(model)
    return preprocess.framed(source, longest).top_left(*seen_hw(model, preprocess.image_size))


def read_pictures(images: ImageSet, indices: Iterable[int], model: VisionModel) -> dict[int, Framed]:
    """Pictures as the model gets them, and as people see them with at most `SIDE` pixels a side; by index,
    without those that cannot be read."""
    some = list(dict.fromkeys(map(int, indices)))
    faults = Faults(len(some))  # which the caller reports
    pictures = readable(lambda index: framed(model, images.sources[index], SIDE), some, faults)
    return {some[number]: picture for number, picture in pictures}


def attention_over(model: VisionModel, pictures: Mapping[int, Framed]) -> dict[int, Pixels]:
    """Pictures under attention rollout, (h, w, 3); none for a ResNet."""
    return _under(model, pictures, "rollout", {}) if isinstance(model, VisionTransformer) else {}


def evidence_over(
    model: VisionModel, pictures: Mapping[int, Framed], classes: Mapping[int, int]
) -> dict[int, Pixels]:
    """Pictures under the evidence for a class of each, (h, w, 3), by a method of one backward pass."""
    suits = methods_for(model)
    return _under(model, pictures, next(name for name in CHEAP if name in suits), classes)


def _under(
    model: VisionModel, pictures: Mapping[int, Framed], method: str, classes: Mapping[int, int]
) -> dict[int, Pixels]:
    keys, drawn, size = list(pictures), {}, 8
    if isinstance(model, VisionTransformer):
        size = max(1, _SCORES // (model.config.num_heads * model.config.num_tokens**2))
    for start in range(0, len(keys), size):
        some = keys[start : start + size]
        batch = torch.from_numpy(np.stack([pictures[key].pixels for key in some]))
        target = [classes[key] for key in some] if classes else None
        heatmaps = heatmap(model, normalized(model, batch), method, target).cpu().numpy()
        for key, heat in zip(some, heatmaps, strict=True):
            drawn[key] = overlay(picture_of(pictures[key]).enlarged(96), heat)
    return drawn


def picture_of(framed: Framed) -> Picture:
    """The picture as people see it."""
    return Picture.of_channels(framed.picture, framed.box)


def image_element(picture: Pixels | Framed, alt: str, side: int = SIDE) -> Markup:
    """An image, (H, W) or (H, W, 3), as `<img>` of at most `side` pixels a side: without loss if it is tiny,
    else a small JPEG."""
    drawn = dimmed(picture_of(picture)) if isinstance(picture, Framed) else picture
    drawn = Picture.whole(drawn).shrunk(side).pixels
    height, width = drawn.shape[:2]
    coarse = max(height, width) <= COARSE
    written = io.BytesIO()
    kind, options = ("PNG", {}) if coarse else ("JPEG", {"quality": 80})
    Image.fromarray(drawn).save(written, kind, optimize=True, **options)
    return Markup('<img src="{}" alt="{}" width="{}" height="{}" class="{}">').format(
        data_uri(written.getvalue(), kind.lower()), alt, width, height, "coarse" if coarse else "smooth"
    )


def data_uri(content: bytes, kind: str) -> str:
    """The address of an image file that contains the file."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def name_of_image(images: ImageSet, index: int) -> str:
    """The end of an image's path, or its number in the split without a file."""
    name = source_name(images.sources[index])
    return (
        say("{split} image {number}", split=images.name, number=index)
        if name.startswith("<")
        else "/".join(Path(name).parts[-2:])
    )
