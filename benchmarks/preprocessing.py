"""Compare the pixels of every published timm ViT and of transformers' processors with ours.

    .venv/bin/python benchmarks/preprocessing.py --out

20 RGB pictures of odd sizes, and 20 of the modes L, P, CMYK, RGBA, 1, YCbCr, LA and RGB, go through the
library's transform and through ours, which is read from the library's settings. Differences are in levels of
256. timm's weights with equal settings share a transform. Its data sets drop the alpha channel, ours put the
picture on white: with timm, pictures without transparency are compared. It takes half a minute on 2 cores,
and needs timm, transformers and torchvision.
"""

from __future__ import annotations

import collections
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peers  # noqa: F401  # before the libraries

# isort: split

import PIL
import timm
import torch
import transformers
from PIL import Image
from tests.peers.pictures import OF_ANY_MODE, PICTURES
from torch import Tensor

from reports import command_line, markdown_table, note, publish
from vitascope.data.preprocess import Preprocess
from vitascope.model.config import ViTConfig
from vitascope.weights.identification import FAMILIES
from vitascope.weights.mapping import Source

MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva", "beit")
PILLOW = "ImageProcessorPil"
# The model types that are read, and the processor of their published checkpoints.
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": (f"ViT{PILLOW}", {}),
    "deit": (f"DeiT{PILLOW}", {}),
    "vit_mae": (f"ViT{PILLOW}", {"resample": 3}),
    "vit_msn": (f"ViT{PILLOW}", {"resample": 3}),
    "ijepa": (f"ViT{PILLOW}", {}),
    "beit": (f"Beit{PILLOW}", {}),
    "data2vec-vision": (f"Beit{PILLOW}", {}),
    "dinov2": (f"Bit{PILLOW}", {"size": {"shortest_edge": 256}}),
    "dinov2_with_registers": (f"Bit{PILLOW}", {"size": {"shortest_edge": 256}}),
    "dinov3_vit": ("DINOv3ViTImageProcessor", {}),
    "clip": (f"CLIP{PILLOW}", {}),
    "siglip": (f"Siglip{PILLOW}", {"size": {"height": 384, "width": 384}}),
}
Transform = Callable[[Image.Image], Tensor]
Row = tuple[str, str, str, str]


def difference(ours: Preprocess, theirs: Transform, pictures: Sequence[Image.Image]) -> float:
    """The largest difference of any pixel, in levels of 256."""
    levels = 255 * torch.tensor(ours.std).view(-1, 1, 1)
    pairs = ((ours.normalize(torch.from_numpy(ours.pixels(one))), theirs(one)) for one in pictures)
    return max(((found - expected).abs() * levels).max().item() for found, expected in pairs)


def shown(levels: float) -> str:
    """A difference; that of floating-point numbers within one level is none."""
    return "0" if levels < 0.01 else f"{levels:.2f}"


def ours_of(family: str, **parts: Any) -> Callable[[tuple[int, int]], Preprocess]:
    """Our preprocessing by a model's image size, read from a library's settings."""

    def read(size: tuple[int, int]) -> Preprocess:
        config = ViTConfig.from_dict({"image_size": size, "patch_size": size})
        return FAMILIES[family].read_preprocess(Source(name="x", tensors={}, **parts), config)

    return read


def timm_rows() -> Iterator[Row]:
    """Of each module: its published weights, their different settings, and the largest difference."""
    for module in MODULES:
        settings: dict[str, list[str]] = collections.defaultdict(list)
        for name in timm.list_models(module=module, pretrained=True, include_tags=True):
            settings[json.dumps(transform_settings(name), sort_keys=True)].append(name)
        largest = 0.0
        for names in settings.values():
            told = timm.get_pretrained_cfg(names[0]).to_dict()
            theirs = timm.data.create_transform(**transform_settings(names[0]))
            config = {"architecture": names[0].partition(".")[0], "pretrained_cfg": told}
            ours = ours_of("timm", config=config)(tuple(told["input_size"][1:]))
            opaque = [one.convert("RGB") for one in OF_ANY_MODE if not one.has_transparency_data]
            largest = max(largest, difference(ours, theirs, [*PICTURES, *opaque]))
            note(f"{names[0]}: {largest}")
        count = sum(map(len, settings.values()))
        yield f"timm {module}.py", f"{count} weights", f"{len(settings)} transforms", shown(largest)


def transform_settings(name: str) -> dict[str, Any]:
    """The arguments of `create_transform` for published weights."""
    return timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())


def transformers_rows() -> Iterator[Row]:
    """Of each model type: its processor, and the largest difference."""
    for kind, (name, options) in PROCESSORS.items():
        processor: Any = getattr(transformers, name)(**options)
        with tempfile.TemporaryDirectory() as folder:
            processor.save_pretrained(folder)
            told = json.loads((Path(folder) / "preprocessor_config.json").read_text())

        def theirs(one: Image.Image, processor: Any = processor) -> Tensor:
            rgb = one if processor.do_convert_rgb else on_white(one)
            return processor(rgb, return_tensors="pt")["pixel_values"][0]

        ours = ours_of("huggingface", config={"model_type": kind}, preprocessor=told)((224, 224))
        # Below four pixels, theirs confuses channels and pixels.
        pictures = [one for one in (*PICTURES, *OF_ANY_MODE) if min(one.size) > 3]
        largest = difference(ours, theirs, pictures)
        note(f"{kind}: {largest}")
        yield f"transformers {kind}", name, "1 processor", shown(largest)


def on_white(picture: Image.Image) -> Image.Image:
    """What a processor does that converts, for those that leave it to their caller."""
    return Image.fromarray(transformers.image_transforms.convert_to_rgb(picture, return_numpy=True))


def report() -> str:
    header = ("models", "of", "compared", "largest difference, of 256")
    rows = [*timm_rows(), *transformers_rows()]
    versions = f"timm {timm.__version__}, transformers {transformers.__version__}"
    return "\n\n".join(
        [
            "# Preprocessing, pixel by pixel",
            markdown_table(header, rows),
            "40 pictures of odd sizes and modes. DINOv3's processor rounds nothing, Pillow's resize twice.",
            f"{versions}, Pillow {PIL.__version__}",
        ]
    )


def main() -> None:
    parser = command_line(__doc__)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    publish("preprocessing", report(), arguments)


if __name__ == "__main__":
    main()
