"""vitascope's own model folder: `config.json`, `model.safetensors`, `preprocessor_config.json`.

`config.json` holds the architecture and the class names, so that a folder needs nothing beside it. Its
"architecture" is "resnet" or "vit", which it need not say. ResNets have no other format: there is no library
that these are the names of, so they need no table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitascope.data.preprocess import Preprocess
from vitascope.errors import check_choice
from vitascope.model.config import OPTIONS, ViTConfig
from vitascope.model.resnet import ResNet
from vitascope.model.resnet_config import ResNetConfig
from vitascope.storage import make_folder, write_json
from vitascope.weights.files import CheckpointError, write_safetensors
from vitascope.weights.mapping import (
    MAX_BLOCKS,
    MAX_NUMBERS,
    Family,
    Source,
    State,
    Table,
    move_in,
    refuse,
)
from vitascope.weights.sources import CONFIG, PREPROCESSOR

WEIGHTS = "model.safetensors"
MODEL_TYPE = "vitascope"
ARCHITECTURES = ("vit", "resnet")


class Vitascope(Family):
    """Every Vision Transformer there is, under our own names."""

    name = MODEL_TYPE
    holds = dict.fromkeys(OPTIONS, ())

    def recognizes(self, source: Source) -> bool:
        """Its `config.json` says so."""
        return source.config.get("model_type") == MODEL_TYPE

    def table(self, config: ViTConfig) -> Table:
        """Our names are our names."""
        return {"*": "*"}

    def read_config(self, source: Source) -> ViTConfig:
        """As it was written."""
        return ViTConfig.from_dict(options(source))

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """As it was written."""
        return read_preprocess(source)

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        """As `write_folder`."""
        return write_folder(state, preprocess, {"model_type": MODEL_TYPE, **config.to_dict()}, folder)


def read_preprocess(source: Source) -> Preprocess:
    """As it was written.

    Raises:
        CheckpointError: it was not.
    """
    if not source.preprocessor:
        raise CheckpointError(f"{source.name}: missing {PREPROCESSOR}")
    return Preprocess.from_dict(source.preprocessor)


def is_resnet(source: Source) -> bool:
    """Whether a checkpoint is one of our ResNets.

    Raises:
        UserError: an architecture that we do not have.
    """
    if source.config.get("model_type") != MODEL_TYPE:
        return False
    architecture = source.config.get("architecture", "vit")
    check_choice("architecture", architecture, ARCHITECTURES)
    return architecture == "resnet"


def options(source: Source) -> dict[str, Any]:
    """The options in a `config.json`."""
    return {
        name: value for name, value in source.config.items() if name not in ("model_type", "architecture")
    }


def read_resnet_config(source: Source) -> ResNetConfig:
    """As it was written.

    Raises:
        CheckpointError: more than any ResNet has, before building it costs memory.
        UserError: options that there are not.
    """
    config = ResNetConfig.from_dict(options(source))
    if sum(config.layers) > MAX_BLOCKS or max(config.num_parameters, config.num_tokens) > MAX_NUMBERS:
        raise CheckpointError(
            f"{source.name}: its configuration claims more than any ResNet has: over {MAX_BLOCKS} units, or "
            f"over {MAX_NUMBERS} features or parameters"
        )
    return config


def read_resnet(source: Source, config: ResNetConfig) -> ResNet:
    """The model in a checkpoint.

    Raises:
        CheckpointError: listing all that is missing, left over, misshapen or no floating-point number.
    """
    with torch.device("meta"):
        model = ResNet(config)
    refuse(
        misfits(model, source.tensors), f"{source.name}: not a whole {MODEL_TYPE} checkpoint of this ResNet"
    )
    model.load_state_dict(source.tensors, strict=True, assign=True)
    return model


def write_resnet(model: ResNet, preprocess: Preprocess, folder: Path) -> list[Path]:
    """Write a model folder, written aside and moved in as `to_family` does; returns the files.

    Raises:
        CheckpointError: it cannot be written, or other weights in the folder would be read instead.
    """
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    settings = {"model_type": MODEL_TYPE, "architecture": "resnet", **model.config.to_dict()}
    make_folder(folder)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as aside:
        files = write_folder(state, preprocess, settings, Path(aside))
        return move_in(files, folder)


def write_folder(
    state: State, preprocess: Preprocess, settings: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Each file is flushed and renamed; `config.json`, last, makes the folder whole."""
    return [
        write_safetensors(folder / WEIGHTS, state),
        write_json(folder / PREPROCESSOR, preprocess.to_dict()),
        write_json(folder / CONFIG, settings),
    ]


def misfits(model: nn.Module, state: State) -> list[str]:
    """What stands against loading a state of ours whole: all that is missing, extra or misshapen."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    faults = [f"missing {name} {shape}" for name, shape in expected.items() if name not in found]
    faults += [f"extra {name} {shape}" for name, shape in found.items() if name not in expected]
    for name, shape in expected.items():
        if name not in found:
            continue
        if found[name] != shape:
            faults.append(f"{name} is {found[name]}, the model has {shape}")
        elif not state[name].is_floating_point():  # quantized: its numbers mean something else
            faults.append(f"{name} in {state[name].dtype}, no floating-point numbers")
    return faults
