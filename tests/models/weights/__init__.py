"""Edit saved models, and compare loaded ones."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def assert_same_state(ours: nn.Module, others: nn.Module) -> None:
    """Compare names, types and values of all tensors."""
    expected = others.state_dict()
    assert list(ours.state_dict()) == list(expected)
    for name, value in ours.state_dict().items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors in a model folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: object) -> None:
    """Change values in a model folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
