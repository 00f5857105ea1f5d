"""Pictures that reveal a shift by a pixel, another filter and another conversion of colours."""

import numpy as np
from PIL import Image

SIZES = [
    *((333, 500), (500, 333), (224, 224), (224, 225), (225, 224), (223, 224), (41, 37), (37, 41)),
    *((100, 1000), (301, 77), (256, 256), (257, 256), (255, 258), (480, 640), (97, 97), (127, 129)),
    *((1, 1), (3, 2), (64, 63), (511, 250)),
]
"""Height and width: photographs' and odd ones."""
MODES = ("L", "P", "CMYK", "RGBA", "1", "YCbCr", "LA", "RGB")
"""Pillow's modes of 8 bits or less."""


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """A gradient under noise, with an alpha channel of noise if the mode has one."""
    generator = np.random.default_rng(height * 1000 + width)
    noise = generator.integers(0, 120, (height, width, 3))
    down, across = np.linspace(0, 100, height)[:, None, None], np.linspace(0, 35, width)[None, :, None]
    image = Image.fromarray((noise + down + across).astype(np.uint8)).convert(mode)
    if "A" in image.getbands():
        alpha = generator.integers(0, 256, (height, width)).astype(np.uint8)
        image.putalpha(Image.fromarray(alpha))
    return image


PICTURES = [picture(*size) for size in SIZES]
OF_ANY_MODE = [picture(*size, MODES[index % len(MODES)]) for index, size in enumerate(SIZES)]
