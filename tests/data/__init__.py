"""Generated folders of small pictures."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from vitascope.data.datasets import read_data
from vitascope.data.formats.format import DataFormat
from vitascope.data.listing import is_image, visible_files
from vitascope.data.splits import ImageSet, Splits, complete_splits


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


def read_tree(root: Path) -> ImageSet:
    """The images in the class folders of a folder without splits."""
    return read_data(str(root)).by_name["all"]


def splits_of(format: DataFormat, data: str, *, seed: int) -> Splits:
    """The splits of data in a known format."""
    return complete_splits(format.read(data), data, seed=seed)


def sets_of(format: DataFormat, data: str | Path) -> dict[str, ImageSet]:
    """The sets of images that a known format reads, by name."""
    return format.read(str(data)).by_name


def image_files(root: Path) -> list[Path]:
    """The images that are listed below a folder, sorted."""
    return sorted(Path(entry.path) for entry in visible_files(root) if is_image(entry))
