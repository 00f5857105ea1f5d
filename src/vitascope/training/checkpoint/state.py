"""The state of a run: its identity, and state dicts that are the same for one process, DDP and FSDP."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from vitascope.arguments import NamesFile
from vitascope.data.decoding import source_name
from vitascope.data.splits import ImageSet
from vitascope.errors import UserError
from vitascope.model.configuration import traits
from vitascope.model.sizes import ModelConfig
from vitascope.options.groups import Recorded
from vitascope.options.recipes import GROUP_OF, TrainConfig
from vitascope.training.distributed import world_size

_COUNT, _NAMES = "training images", "names and labels of the training images, SHA-256"
_MODEL = "model: "


def model_state(module: nn.Module, *, whole: bool = True) -> dict[str, Any]:
    """Tensors by the names of the module, which is not wrapped; with shards, whole ones are on the CPU."""
    if not whole or world_size() == 1:
        return module.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state by parameter name, with each process's own shards; empty before the first step.

    As `get_optimizer_state_dict` of torch.distributed.checkpoint, whose import takes half a second.
    """
    if not optimizer.state:
        return {}
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {
        "state": {names[parameter]: state for parameter, state in optimizer.state.items()},
        "param_groups": [
            {name: value for name, value in group.items() if name != "params"}
            | {"params": [names[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def restore_model(module: nn.Module, state: dict[str, Any]) -> None:
    """Load full tensors into a module; every process passes them."""
    missing = sorted(module.state_dict().keys() - state.keys())
    if missing:
        raise UserError(f"the checkpoint has no {', '.join(missing)}; start a new run")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, strict=True))


def restore_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the full state into an optimizer; an empty state leaves it as it is."""
    if state:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        whole = StateDictOptions(full_state_dict=True, strict=True)
        set_optimizer_state_dict(module, optimizer, state, options=whole)


def all_finite(module: nn.Module) -> bool:
    """Whether all parameters in this process are finite."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    finite = [torch.isfinite(parameter).all() for parameter in local]
    return bool(torch.stack(finite).all())  # one wait for the device


def run_identity(options: TrainConfig, model: ModelConfig, images: ImageSet) -> dict[str, Any]:
    """Everything that must stay the same: images, model, and all options but execution options and paths."""
    # Files may be moved, and a run with minutes records its lengths and validations as it goes.
    left_out = {"run", *traits(TrainConfig, NamesFile), *traits(TrainConfig, Recorded)}
    compared = [name for name, group in GROUP_OF.items() if group != "execution" and name not in left_out]
    return {
        _COUNT: len(images),
        "classes": list(images.class_names),
        _NAMES: names_and_labels(images),
        **{f"{_MODEL}{name}": value for name, value in model.to_dict().items() if name != "class_names"},
        **{name: options.option(name) for name in compared},
    }


def names_and_labels(images: ImageSet) -> str:
    """The SHA-256 of the names and the labels of all images, 16 digits."""
    names = [source_name(source).replace("\\", "/").rsplit("/", 1)[-1] for source in images.sources]
    targets = images.targets
    # Earlier versions gave images without labels one class, and their checkpoints are still continued.
    labels = [0] * len(images) if targets is None else targets.to_json()
    return hashlib.sha256(json.dumps([names, labels]).encode()).hexdigest()[:16]


def with_images_of(state: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's state with the training images of another identity: those of a run that skips some."""
    images = {name: identity[name] for name in (_COUNT, _NAMES)}
    return {**state, "identity": {**state["identity"], **images}}


def check_identity(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Reject a checkpoint with other data, model or options; options that it lacks are newer than it."""
    was, plain = (json.loads(json.dumps(identity)) for identity in (saved, now))
    differences = [
        f"{name} was {value!r}, is {plain.get(name)!r}"
        for name, value in was.items()
        if value != plain.get(name)
    ]
    if differences:
        raise UserError(
            f"the checkpoint is not of this run: {'; '.join(differences)}; restore the data and options, or "
            "start another run"
        )
