"""The models that come with vitascope: a model folder for each, with its card (`README.md`).

This module imports no torch: the command line and the server name the default model before they load it.
"""

import os
from pathlib import Path

from vitascope import layout

DEFAULT = "cifar10"
"""The model of the commands that need none."""
NAMES = (DEFAULT,)
"""Accepted as a MODEL."""
_WEIGHTS = frozenset({".safetensors", ".pth", ".npz", ".onnx", ".xml"})


def built_in(ref: str | os.PathLike[str]) -> Path | None:
    """The folder of the built-in model that a MODEL argument names; None for any other MODEL.

    In the working directory, a file, a run or a folder with a model comes before a built-in model of the same
    name. Any other folder does not: CIFAR-10's own images often lie in a folder called `cifar10`.
    """
    name = os.fspath(ref)
    if name not in NAMES or _holds_model(Path(name)):
        return None
    return Path(__file__).parent / name


def model_in_words(ref: str) -> str:
    """A MODEL argument for people, who see whether it is a built-in model."""
    return ref if built_in(ref) is None else f"{ref} (built in)"


def _holds_model(path: Path) -> bool:
    if not path.is_dir():
        return path.exists()
    if layout.is_run(path) or layout.has_model(path):
        return True
    return any(child.suffix in _WEIGHTS for child in path.iterdir())
