"""Finds and opens the checkpoint of a MODEL argument: a folder, a file, a hub id, a name of torchvision's."""

from __future__ import annotations

import os
from pathlib import Path

from vitascope.errors import nearest_path
from vitascope.run import layout
from vitascope.weights.files import CheckpointError, read_json, read_weights, refusal
from vitascope.weights.hub import (
    SETTINGS,
    VARIANT,
    WEIGHTS,
    fetch_hub,
    fetch_torchvision,
    is_hub_id,
    torchvision_file,
    weights_name,
)
from vitascope.weights.mapping import Source
from vitascope.weights.other_formats import described

CONFIG, PREPROCESSOR = SETTINGS


def open_source(ref: str | os.PathLike[str], revision: str | None = None) -> Source:
    """Open the checkpoint of a MODEL argument; arguments and errors as `from_pretrained`."""
    path = locate(os.fspath(ref), revision)
    names = [child.name for child in (path if path.is_dir() else path.parent).iterdir()]
    if path.is_dir():
        file = weights_name(ref, names)
        if file is None:
            expected = f"not a model: expected a run folder, or {CONFIG} and model.safetensors in a folder"
            raise refusal(ref, described(names) or expected)
        path = path / file
    settings = {}
    if _has_settings(path.name, names):
        for key, name in (("config", CONFIG), ("preprocessor", PREPROCESSOR)):
            settings[key] = read_json(path.with_name(name)) if name in names else {}
        if CONFIG in names and not settings["config"]:
            raise refusal(path.with_name(CONFIG), "an empty object; it should describe the architecture")
    weights = read_weights(path)
    return Source(
        name=str(ref), file=path.name, tensors=weights.tensors, training=weights.training, **settings
    )


def exists(ref: str | os.PathLike[str]) -> bool:
    """Whether there is such a path; a path that the system rejects (too long, for example) is an error."""
    try:
        return Path(ref).exists()
    except OSError as error:
        raise refusal(ref, f"no such model: {error.strerror}") from error


def _has_settings(file: str, names: list[str]) -> bool:
    """Whether the settings in a folder belong to a weights file in it, and not to another one there."""
    if file in WEIGHTS or VARIANT.fullmatch(file):
        return True
    try:
        return weights_name(file, names) == file
    except CheckpointError:  # several weights: the settings belong to none
        return False


def locate(ref: str, revision: str | None = None) -> Path:
    """The folder or file of a MODEL argument, downloaded if necessary."""
    try:
        path = Path(ref).expanduser()
    except RuntimeError as error:  # there is no such user
        raise refusal(ref, f"no such model: {error}") from error
    place = "a local path" if exists(path) else "torchvision's" if torchvision_file(ref) else ""
    if place and revision is not None:
        raise CheckpointError(f"{ref} is {place}; revision {revision!r} has no meaning for it")
    if exists(path):
        return path if path.is_file() else _model_folder(path)
    if (file := torchvision_file(ref)) is not None:
        return fetch_torchvision(file)
    mistyped = nearest_path(str(path))
    name, _, wanted = ref.partition("@")
    local = bool(mistyped) or (len(path.parts) > 1 and path.parent.is_dir())  # more likely than an owner
    if is_hub_id(name) and not local:
        if revision and wanted and revision != wanted:
            raise CheckpointError(f"{ref}: revision {revision!r} contradicts the one in the name")
        return fetch_hub(name, revision or wanted or None)
    hub_id = f"hf-hub:{name} for the hub's" if is_hub_id(name) else "a hub id (owner/name)"
    raise CheckpointError(
        f"{ref}: no such model{mistyped}; give a run folder, a model folder or file, {hub_id}, "
        "or a name like torchvision/vit_b_16"
    )


def _model_folder(path: Path) -> Path:
    """The model in a run folder or a model folder."""
    if (path / CONFIG).is_file():  # a model folder, whatever else lies in it
        return path
    if layout.is_finished(path):
        return path / layout.MODEL
    if layout.is_run(path):
        raise CheckpointError(
            f"{path}: this run has no finished model; finish it with `vitascope train --resume {path}`"
        )
    return path
