"""Generated folders of small pictures."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def noise(height: int, width: int, channels: int = 3, *, seed: int = 0) -> np.ndarray:
    """uint8 pixels (H, W, C), or (H, W) for one channel."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels[..., 0] if channels == 1 else pixels


def write_picture(path: Path, *, size: tuple[int, int] = (8, 8), seed: int = 0) -> Path:
    """Write a picture of noise in the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(*size, seed=seed)).save(path)
    return path


def write_tree(root: Path, counts: Mapping[str, int], *, size: tuple[int, int] = (8, 8)) -> Path:
    """`root/<class>/<number>.png`, all pictures different."""
    seed = 0
    for name, count in counts.items():
        for number in range(count):
            seed += 1
            write_picture(root / name / f"{number:03}.png", size=size, seed=seed)
    return root
