"""Small images for the page: pixels as the model gets them, alone or under attention."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from markupsafe import Markup
from PIL import Image

from vitascope.data.decoding import ImageError, source_name
from vitascope.data.splits import ImageSet
from vitascope.explain import plots, rollout
from vitascope.model.classifier import Classifier
from vitascope.model.vit import VisionTransformer
from vitascope.weights.preprocess import preprocess_of

Pixels = npt.NDArray[np.uint8]

SIDE = 192
"""Longest side of a thumbnail."""
COARSE = 64
"""Longest side of an image that is stored without loss and enlarged with visible pixels."""
_BATCH = 4  # attention is large


def read_pixels(images: ImageSet, indices: Iterable[int], model: Classifier) -> dict[int, Pixels]:
    """Pixels (C, H, W) as the model gets them, by index, without images that cannot be read."""
    found = {}
    for index in dict.fromkeys(int(index) for index in indices):
        try:
            found[index] = preprocess_of(model).pixels(images.sources[index])
        except ImageError:
            continue  # the caller reports missing ones
    return found


def attention_over(model: Classifier, pixels: Mapping[int, Pixels], side: int = SIDE) -> dict[int, Pixels]:
    """Images (C, H, W) under attention rollout, (3, h, w), `side` large at most; none for a ResNet."""
    if not isinstance(model, VisionTransformer):
        return {}
    device, keys = next(model.parameters()).device, list(pixels)
    found = {}
    for start in range(0, len(keys), _BATCH):
        some = keys[start : start + _BATCH]
        batch = torch.from_numpy(np.stack([pixels[key] for key in some])).to(device)
        heatmaps = rollout(model, preprocess_of(model).normalize(batch)).cpu().numpy()
        for key, heatmap in zip(some, heatmaps, strict=True):
            small = _shrunk(plots.to_picture(pixels[key]), side)
            found[key] = np.moveaxis(plots.overlay(plots.enlarged(small, 96), heatmap), -1, 0)
    return found


def _shrunk(picture: Pixels, side: int) -> Pixels:
    scale = side / max(picture.shape[:2])
    if scale >= 1:
        return picture
    height, width = (max(1, round(length * scale)) for length in picture.shape[:2])
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS))


def image_element(pixels: Pixels, alt: str) -> Markup:
    """An image (C, H, W) as `<img>`: without loss if it is tiny, else a small JPEG."""
    picture = _shrunk(plots.to_picture(pixels), SIDE)
    height, width = picture.shape[:2]
    coarse = max(height, width) <= COARSE
    written = io.BytesIO()
    kind, options = ("PNG", {}) if coarse else ("JPEG", {"quality": 80})
    Image.fromarray(picture).save(written, kind, optimize=True, **options)
    return Markup('<img src="{}" alt="{}" width="{}" height="{}" class="{}">').format(
        data_uri(written.getvalue(), kind.lower()), alt, width, height, "coarse" if coarse else "smooth"
    )


def data_uri(content: bytes, kind: str) -> str:
    """The address of an image file that contains the file."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def name_of_image(images: ImageSet, index: int) -> str:
    """The end of an image's path, or its number in the split without a file."""
    name = source_name(images.sources[index])
    return f"{images.name} image {index}" if name.startswith("<") else "/".join(Path(name).parts[-2:])
