"""vitascope's own model folder: `config.json`, `model.safetensors`, `preprocessor_config.json`.

`config.json` holds the architecture and the class names, so that a folder needs nothing beside it.
"""

from __future__ import annotations

from pathlib import Path

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import OPTIONS, ViTConfig
from vitascope.weights.files import CheckpointError
from vitascope.weights.mapping import Family, Source, State, Table
from vitascope.weights.sources import CONFIG, PREPROCESSOR
from vitascope.weights.writing import write_json, write_safetensors

WEIGHTS = "model.safetensors"


class Vitascope(Family):
    """Every model there is, under our own names."""

    name = "vitascope"
    holds = dict.fromkeys(OPTIONS, ())

    def recognizes(self, source: Source) -> bool:
        """Its `config.json` says so."""
        return source.config.get("model_type") == self.name

    def table(self, config: ViTConfig) -> Table:
        """Our names are our names."""
        return {"*": "*"}

    def read_config(self, source: Source) -> ViTConfig:
        """As it was written."""
        values = {name: value for name, value in source.config.items() if name != "model_type"}
        return ViTConfig.from_dict(values)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """As it was written."""
        if not source.preprocessor:
            raise CheckpointError(f"{source.name}: missing {PREPROCESSOR}")
        return Preprocess.from_dict(source.preprocessor)

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        """Each file is flushed and renamed; `config.json`, last, makes the folder whole."""
        return [
            write_safetensors(folder / WEIGHTS, state),
            write_json(folder / PREPROCESSOR, preprocess.to_dict()),
            write_json(folder / CONFIG, {"model_type": self.name, **config.to_dict()}),
        ]


def default_preprocess(config: ViTConfig) -> Preprocess:
    """Centre crop at the model's size, pixels to [-1, 1], as the original ViT code scales them."""
    half = (0.5,) * config.in_channels
    return Preprocess(image_size=config.image_hw, channels=config.in_channels, mean=half, std=half)
