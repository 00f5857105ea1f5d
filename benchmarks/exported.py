"""Entrants that run exported files."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from contest import DTYPES, Entrant, Step
from vitascope.models.engines.runtimes import ExportedEngine, OnnxEngine, OpenVinoEngine
from vitascope.models.sizes import ModelConfig

RUNTIMES: dict[str, tuple[str, type[OnnxEngine | OpenVinoEngine]]] = {
    ".onnx": ("ONNX Runtime", OnnxEngine),
    ".xml": ("OpenVINO", OpenVinoEngine),
}
"""Runtime name and engine by file suffix."""


def exported_entrant(path: Path, precision: str, config: ModelConfig, batch_size: int) -> Entrant:
    """A file of `vitascope export --input tensors` in fp32, in bf16 (OpenVINO only), or as it is in int8."""
    name, _ = RUNTIMES[path.suffix]
    return Entrant(
        name=f"vitascope, {name}",
        precision=precision,
        dtype=torch.int8 if precision == "int8" else DTYPES[precision],
        prepare=functools.partial(exported_inference, path, precision, batch_size),
        images=batch_size,
        flops=config.flops * batch_size,
    )


def exported_engine(path: Path, precision: str) -> ExportedEngine:
    """The engine of a file; the runtime chooses the precision of the float layers of an int8 file."""
    _, engine = RUNTIMES[path.suffix]
    return engine(path, precision="auto" if precision == "int8" else precision)


@contextmanager
def exported_inference(path: Path, precision: str, batch_size: int) -> Iterator[Step]:
    """Pixels to probabilities as in `vitascope predict FILE`; the time includes normalization and softmax."""
    engine = exported_engine(path, precision)
    fit = engine.preprocess
    pixels = torch.randint(256, (batch_size, fit.channels, *fit.image_size), dtype=torch.uint8)
    yield functools.partial(engine.probabilities, pixels)
