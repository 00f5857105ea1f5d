"""Exported models: the metadata in their files, and the engine that needs nothing but the file."""

from __future__ import annotations

import functools
import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope._version import __version__
from vitascope.data.decoding import ImageSource
from vitascope.data.preprocess import Pixels, Preprocess
from vitascope.deploy.predict.engine import Engine
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.model.resnet_config import ResNetConfig
from vitascope.model.sizes import ModelConfig, architecture_of

InputMode = Literal["pictures", "tensors"]
INPUT_MODES = ("pictures", "tensors")
FORMER_INPUT_MODES = {"pixels": "tensors"}
"""Names in files of earlier versions."""
INPUT = "pixels"
"""Name of the graph's input."""
OUTPUTS = ("probabilities", "logits")
"""Names of the graph's outputs."""
FORMAT_VERSION = 1
KEYS = ("preprocess", "class_names", "num_classes", "input", "model", "precision", "vitascope", "format")
SECTION = "vitascope"
"""The section of OpenVINO's `rt_info` that has these keys. ONNX has them in its metadata."""

Batch = npt.NDArray[np.uint8]
"""uint8 (B, H, W, C)."""
Outputs = npt.NDArray[np.float32]
"""float32 (B, K)."""


class ExportedModelError(UserError):
    """An exported model that cannot be used; the message names the file."""


def metadata_of(config: ModelConfig, preprocess: Preprocess, input: InputMode) -> dict[str, str]:
    """The metadata of an exported model, each value as JSON in ASCII, which every format can hold."""
    values = {
        "preprocess": preprocess.to_dict(),
        "class_names": config.class_names,
        "num_classes": config.num_classes,
        "input": input,
        "model": config.to_dict(),
        "precision": "fp32",
        "vitascope": __version__,
        "format": FORMAT_VERSION,
    }
    return {key: json.dumps(value) for key, value in values.items()}


def read_metadata(texts: Mapping[str, str], path: Path) -> dict[str, Any]:
    """The inverse of `metadata_of`; unknown keys are ignored."""
    missing = [key for key in KEYS if key not in texts]
    if missing:
        raise ExportedModelError(f"{path}: not written by `vitascope export`: it lacks {', '.join(missing)}")
    try:
        values = {key: json.loads(texts[key]) for key in KEYS}
        if values["format"] != FORMAT_VERSION:
            raise ExportedModelError(
                f"{path}: this vitascope reads format {FORMAT_VERSION}, not format {values['format']}; the "
                f"file was written by vitascope {values['vitascope']}"
            )
        values["preprocess"] = Preprocess.from_dict(values["preprocess"])
        values["class_names"] = tuple(map(str, values["class_names"]))
        values["input"] = FORMER_INPUT_MODES.get(values["input"], values["input"])
        if values["input"] not in INPUT_MODES:
            raise UserError(f"input {values['input']!r} is none of {', '.join(INPUT_MODES)}")
        names, count = values["class_names"], values["num_classes"]
        if not isinstance(count, int) or count < 1:
            raise UserError(f"num_classes must be at least 1, not {count!r}")
        if names and len(names) != count:
            raise UserError(f"{len(names)} class_names for num_classes {count}")
    except ExportedModelError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ExportedModelError(f"{path}: broken metadata: {error}") from error
    return values


class ExportedEngine(Engine):
    """An exported model in its own runtime."""

    def __init__(self, path: Path, texts: Mapping[str, str]) -> None:
        values = read_metadata(texts, path)
        self.path = path
        self.metadata = dict(texts)
        self.preprocess = values["preprocess"]
        self.class_names = values["class_names"]
        self.num_classes = values["num_classes"]
        self.architecture = architecture_from(values["model"])
        self.input: InputMode = values["input"]
        self.stored_precision = str(values["precision"])
        self.own_pixels = self.input == "pictures" and not self.preprocess.keeps_own_size

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the file, and of the weights beside it if the format has them there."""
        found = hashlib.sha256()
        for path in files_of(self.path):
            with open(path, "rb") as file:
                while block := file.read(2**20):
                    found.update(block)
        return found.hexdigest()

    @abstractmethod
    def run(self, pixels: Batch) -> tuple[Outputs, Outputs]:
        """Probabilities and logits of uint8 (B, H, W, C)."""

    def probabilities(self, pixels: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to probabilities (B, K), float32, on the CPU."""
        return torch.from_numpy(self._run(pixels)[0])

    def logits(self, pixels: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to logits (B, K), float32, on the CPU."""
        return torch.from_numpy(self._run(pixels)[1])

    @property
    def reader(self) -> Callable[[ImageSource], Pixels]:
        """From a picture to pixels as `probabilities` takes them, uint8 (C, H, W).

        If the graph would not change a picture of the model's size, pictures come in that size, so that
        those of different sizes can share a batch.
        """
        return self.preprocess.whole_pixels if self.own_pixels else self.preprocess.pixels

    def _run(self, pixels: Tensor) -> tuple[Outputs, Outputs]:
        return self.run(np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy()))


def files_of(path: Path) -> list[Path]:
    """An exported model's file, and the file of weights beside it if there is one."""
    beside = {".xml": path.with_suffix(".bin"), ".onnx": path.with_suffix(".onnx.data")}.get(path.suffix)
    return [path] if beside is None or not beside.exists() else [path, beside]


def architecture_from(options: dict[str, Any]) -> str:
    """The architecture's name; empty if this version does not know its options."""
    kind = ResNetConfig if "layers" in options else ViTConfig
    try:
        return architecture_of(kind.from_dict(options)) if options else ""
    except UserError:
        return ""
