"""An exported file: what is written in it beside the graph, and the engine that answers with it alone."""

from __future__ import annotations

import dataclasses
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
from vitascope.model.sizes import architecture_of

InputMode = Literal["pictures", "pixels"]
INPUT_MODES = ("pictures", "pixels")
INPUT = "pixels"
"""The name of the graph's input."""
OUTPUTS = ("probabilities", "logits")
"""The names of the graph's outputs."""
FORMAT_VERSION = 1
SECTION = "vitascope"
"""Where OpenVINO's `rt_info` has the keys below; ONNX has them among its metadata, each as JSON."""

Batch = npt.NDArray[np.uint8]
"""uint8 (B, H, W, C)."""
Answers = npt.NDArray[np.float32]
"""float32 (B, K)."""


class ExportedModelError(UserError):
    """An exported file that cannot be used; the message names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """What an exported file tells about itself."""

    preprocess: Preprocess
    """From any picture to the model's pixels; the graph has it too, but for the decoding."""
    class_names: tuple[str, ...]
    """Of the K classes; empty where they have no names."""
    num_classes: int
    """K."""
    input: InputMode
    """What goes in: `pictures` of any size, or `pixels` of the model's size."""
    model: dict[str, Any]
    """The architecture, as in a model folder's `config.json`."""
    precision: str = "fp32"
    """`fp32` or `int8`."""
    vitascope: str = __version__
    """The version that wrote it."""
    format: int = FORMAT_VERSION
    """The version of these keys."""

    def to_texts(self) -> dict[str, str]:
        """By key, each value as JSON in ASCII: every format holds that, whatever the class names are."""
        values = dataclasses.asdict(self) | {"preprocess": self.preprocess.to_dict()}
        return {key: json.dumps(value) for key, value in values.items()}

    @classmethod
    def from_texts(cls, texts: Mapping[str, str], path: Path) -> Metadata:
        """The inverse of `to_texts`; keys that we do not know are let alone.

        Raises:
            ExportedModelError: a file that we did not write, or one of a later format.
        """
        missing = [field.name for field in dataclasses.fields(cls) if field.name not in texts]
        if missing:
            raise ExportedModelError(
                f"{path}: not written by `vitascope export`: it does not tell {', '.join(missing)}"
            )
        try:
            values = {field.name: json.loads(texts[field.name]) for field in dataclasses.fields(cls)}
            if values["format"] != FORMAT_VERSION:
                raise ExportedModelError(
                    f"{path}: its format {values['format']} is another than {FORMAT_VERSION}, which this "
                    f"vitascope reads; it was written by {values['vitascope']}"
                )
            values["preprocess"] = Preprocess.from_dict(values["preprocess"])
            values["class_names"] = tuple(map(str, values["class_names"]))
            found = cls(**values)
            found.check()
        except ExportedModelError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ExportedModelError(f"{path}: what it tells about itself is broken: {error}") from error
        return found

    def check(self) -> None:
        """Refuse what contradicts itself."""
        if self.input not in INPUT_MODES:
            raise UserError(f"input {self.input!r} is none of {', '.join(INPUT_MODES)}")
        if not isinstance(self.num_classes, int) or self.num_classes < 1:
            raise UserError(f"num_classes must be at least 1, not {self.num_classes!r}")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise UserError(f"{len(self.class_names)} class_names for num_classes {self.num_classes}")


class ExportedEngine(Engine):
    """An exported file in its own runtime; all it needs is in the file."""

    def __init__(self, path: Path, about: Metadata) -> None:
        self.path = path
        self.about = about
        self.preprocess = about.preprocess
        self.class_names = about.class_names
        self.num_classes = about.num_classes
        self.architecture = told_architecture(about.model)
        self.own_pixels = about.input == "pictures" and not about.preprocess.keeps_own_size

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the file, and of the weights beside it where the format has them there."""
        found = hashlib.sha256()
        for path in files_of(self.path):
            with open(path, "rb") as file:
                while block := file.read(2**20):
                    found.update(block)
        return found.hexdigest()

    @abstractmethod
    def run(self, pixels: Batch) -> tuple[Answers, Answers]:
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

        Where the graph would leave it alone, a picture comes in the model's size: pictures of every size then
        go together.
        """
        return self.preprocess.whole_pixels if self.own_pixels else self.preprocess.pixels

    def _run(self, pixels: Tensor) -> tuple[Answers, Answers]:
        return self.run(np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy()))


def files_of(path: Path) -> list[Path]:
    """An exported file, and the weights beside it where its format has them there."""
    beside = {".xml": path.with_suffix(".bin"), ".onnx": path.with_suffix(".onnx.data")}.get(path.suffix)
    return [path] if beside is None or not beside.exists() else [path, beside]


def told_architecture(options: dict[str, Any]) -> str:
    """The architecture that a file tells; empty where another version wrote options that this one lacks."""
    kind = ResNetConfig if "layers" in options else ViTConfig
    try:
        return architecture_of(kind.from_dict(options)) if options else ""
    except UserError:
        return ""
