"""The model folder: `config.json`, `model.safetensors`, `preprocessor_config.json`; saved and loaded whole.

`config.json` holds the architecture and the class names, so that a folder needs nothing beside it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError, check_choice, nearest
from vitascope.model.config import ViTConfig, named_config
from vitascope.model.vit import VisionTransformer

CONFIG, WEIGHTS, PREPROCESSOR = "config.json", "model.safetensors", "preprocessor_config.json"
FORMATS = ("vitascope",)


class CheckpointError(UserError):
    """A checkpoint that is not there, broken, or does not fit."""


def save_pretrained(
    model: VisionTransformer,
    folder: str | os.PathLike[str],
    *,
    preprocess: Preprocess | None = None,
    format: str = "vitascope",
) -> Path:
    """Write a model folder: parameters in their own dtype, the configuration, and the preprocessing.

    Without `preprocess`, a plain one of the model's size is written: centre crop, mean and std of 0.5.
    Each file is written aside, flushed to the disk and renamed; `config.json`, last, makes the folder whole.

    Raises:
        UserError: an unknown format; weights that cannot be written.
    """
    check_choice("format", format, FORMATS)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    preprocess = preprocess or default_preprocess(model.config)
    aside = folder / f".{WEIGHTS}"
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    try:
        save_file(state, aside, metadata={"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise CheckpointError(f"{folder / WEIGHTS}: cannot be written: {error}") from error
    settle(aside, folder / WEIGHTS)
    write_json(folder / PREPROCESSOR, preprocess.to_dict())
    write_json(folder / CONFIG, {"model_type": "vitascope", **model.config.to_dict()})
    return folder


def from_pretrained(ref: str | os.PathLike[str], revision: str | None = None) -> VisionTransformer:
    """The model behind a MODEL argument, in evaluation mode, on the CPU, in float32.

    Args:
        ref: a run folder (its `model/`), a model folder, or the `model.safetensors` in one.
        revision: of a hub id; a local folder has none.

    Raises:
        CheckpointError: nothing there, a broken file, or missing, extra and misshapen keys (listed).
    """
    folder = model_folder(ref)
    if revision is not None:
        raise CheckpointError(f"{ref} is a local folder; revision {revision!r} has no meaning for it")
    config = read_config(folder)
    with torch.device("meta"):
        model = VisionTransformer(config)
    fit_state(model, read_weights(folder / WEIGHTS), str(ref))
    return model.eval().float()


def create_model(
    name: str, *, weights: str | os.PathLike[str] | None = None, **overrides: Any
) -> VisionTransformer:
    """A named size, with any field of `ViTConfig` changed: `create_model("vit_b16", num_classes=10)`.

    Args:
        name: one of `list_models()`.
        weights: a MODEL argument whose body is taken over: positions are interpolated to the new size, and
            the head too is taken where its classes are the same, or unnamed and as many; None initializes
            at random.
        **overrides: fields of `ViTConfig`.

    Raises:
        UserError: an unknown name or field, naming the nearest; a checkpoint that does not fit.
    """
    model = VisionTransformer(named_config(name, **overrides))
    if weights is not None:
        transfer(from_pretrained(weights), model, str(weights))
    return model


def transfer(source: VisionTransformer, target: VisionTransformer, name: str) -> list[str]:
    """Start a model from a trained one; returns in words what was not simply copied.

    Raises:
        CheckpointError: the bodies differ; every difference is listed.
    """
    notes = []
    if source.config.grid != target.config.grid:
        source.resize(target.config.image_hw)
        notes.append(f"positions interpolated to a grid of {target.config.grid[0]}x{target.config.grid[1]}")
    state = source.state_dict()
    head = {key: value for key, value in target.state_dict().items() if key.startswith("head.")}
    same_shapes = {k: v.shape for k, v in head.items()} == {
        k: v.shape for k, v in state.items() if k.startswith("head.")
    }
    names = (source.config.class_names, target.config.class_names)
    if not same_shapes or (all(names) and names[0] != names[1]):
        state = {key: value for key, value in state.items() if not key.startswith("head.")} | head
        notes.append(f"a new head for {target.config.num_classes} classes")
    fit_state(target, state, name)
    return notes


def model_folder(ref: str | os.PathLike[str]) -> Path:
    """The folder that holds a MODEL argument's three files."""
    path = Path(ref).expanduser()
    if path.name == WEIGHTS and path.is_file():
        return path.parent
    if not path.exists():
        siblings = [str(other) for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise CheckpointError(
            f"{ref}: no such model{nearest(str(path), siblings)}; give a run or model folder"
        )
    for folder in (path / "model", path):
        if (folder / CONFIG).is_file():
            return folder
    if (path / "config.yaml").is_file():
        raise CheckpointError(
            f"{ref}: this run has no finished model; finish it with `vitascope train --resume {ref}`"
        )
    raise CheckpointError(f"{ref}: not a model: expected a run folder, or {CONFIG} and {WEIGHTS} in a folder")


def read_config(folder: Path) -> ViTConfig:
    """The architecture in a model folder."""
    values = read_json(folder / CONFIG)
    if values.pop("model_type", None) != "vitascope":
        raise CheckpointError(f"{folder / CONFIG}: not a vitascope model (its model_type is another)")
    return ViTConfig.from_dict(values)


def read_preprocess(ref: str | os.PathLike[str]) -> Preprocess:
    """The preprocessing of a MODEL argument."""
    return Preprocess.from_dict(read_json(model_folder(ref) / PREPROCESSOR))


def default_preprocess(config: ViTConfig) -> Preprocess:
    """Centre crop at the model's size, pixels to [-1, 1], as the original ViT code scales them."""
    half = (0.5,) * config.in_channels
    return Preprocess(image_size=config.image_hw, channels=config.in_channels, mean=half, std=half)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: broken or not a safetensors file: {error}") from error


def fit_state(model: VisionTransformer, state: dict[str, Tensor], name: str) -> None:
    """Load a state whole, or refuse it with every missing, extra and misshapen key; replaces parameters.

    Raises:
        CheckpointError: with the list.
    """
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in state.items()}
    faults = [f"missing {key} {shape}" for key, shape in expected.items() if key not in found]
    faults += [f"extra {key} {shape}" for key, shape in found.items() if key not in expected]
    faults += [
        f"{key} is {found[key]}, the model has {shape}"
        for key, shape in expected.items()
        if key in found and found[key] != shape
    ]
    if faults:
        listed = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise CheckpointError(f"{name} does not fit the model: {listed}")
    model.load_state_dict(state, strict=True, assign=any(p.is_meta for p in model.parameters()))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON object so that the file is whole or is the old one."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    settle(aside, path)


def settle(aside: Path, path: Path) -> None:
    """Flush a file that was written aside to the disk, and give it its name."""
    with open(aside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)
