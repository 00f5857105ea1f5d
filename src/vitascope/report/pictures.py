"""Pictures in the page: as the model sees them, small, inside the document."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vitascope.data.decoding import ImageError, source_name
from vitascope.data.preprocess import Preprocess
from vitascope.data.splits import ImageSet
from vitascope.explain import plots, rollout
from vitascope.model.classifier import Classifier
from vitascope.model.vit import VisionTransformer
from vitascope.report.figures import to_picture
from vitascope.report.html import Markup, element

Picture = npt.NDArray[np.uint8]

SIDE = 192
"""The longer side of a picture in the page, pixels at most."""
COARSE = 64
"""A side up to which a picture is enlarged with its pixels to be seen, and stored without loss."""
AT_ONCE = 4
"""Images that the model looks at together: attention is large."""


def read_pixels(
    images: ImageSet, indices: Iterable[int], preprocess: Preprocess
) -> dict[int, npt.NDArray[np.uint8]]:
    """Pixels (C, H, W) as the model gets them, by index; an image that cannot be read now is left out."""
    found = {}
    for index in dict.fromkeys(int(index) for index in indices):
        try:
            found[index] = preprocess.pixels(images.sources[index])
        except ImageError:
            continue  # whoever asked finds it missing, and says so
    return found


def attention_over(
    model: Classifier, preprocess: Preprocess, pixels: Mapping[int, npt.NDArray[np.uint8]]
) -> dict[int, Picture]:
    """Images (C, H, W) under their attention rollout, (H, W, 3) by the same keys; none of a ResNet."""
    if not isinstance(model, VisionTransformer):
        return {}
    device, keys = next(model.parameters()).device, list(pixels)
    seen = {}
    for start in range(0, len(keys), AT_ONCE):
        some = keys[start : start + AT_ONCE]
        tiles = torch.from_numpy(np.stack([pixels[key] for key in some])).to(device)
        for key, heat in zip(some, rollout(model, preprocess.normalize(tiles)).cpu().numpy(), strict=True):
            seen[key] = plots.overlay(plots.enlarged(shrunk(to_picture(pixels[key])), 96), heat)
    return seen


def shrunk(picture: Picture, side: int = SIDE) -> Picture:
    """A picture (H, W) or (H, W, 3) whose longer side is `side` at most."""
    scale = side / max(picture.shape[:2])
    if scale >= 1:
        return picture
    height, width = (max(1, round(length * scale)) for length in picture.shape[:2])
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS))


def image(picture: Picture, alt: str) -> Markup:
    """A picture (H, W) or (H, W, 3) as `<img>`: its pixels as they are if it is tiny, else a small JPEG."""
    picture = shrunk(picture)
    height, width = picture.shape[:2]
    coarse = max(height, width) <= COARSE
    written = io.BytesIO()
    if coarse:
        Image.fromarray(picture).save(written, "PNG", optimize=True)
    else:
        Image.fromarray(picture).save(written, "JPEG", quality=80, optimize=True)
    return element(
        "img",
        src=data_uri(written.getvalue(), "png" if coarse else "jpeg"),
        alt=alt,
        width=width,
        height=height,
        class_="coarse" if coarse else None,
    )


def data_uri(content: bytes, kind: str) -> str:
    """An image file as an address that holds it."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def place_of(images: ImageSet, index: int) -> str:
    """How a picture is called in the page: the end of its path, or its number in the split."""
    source = images.sources[index]
    name = source_name(source)
    if name.startswith("<"):
        return f"{images.name} image {index}"
    return "/".join(Path(name).parts[-2:])
