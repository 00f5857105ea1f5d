"""Properties that all processes share (versions, options, model, images), and a run with its checkpoints."""

import hashlib
import json
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from vitascope import layout
from vitascope._version import __version__
from vitascope.arguments import NamesFile
from vitascope.data.contents import contents_of
from vitascope.data.splits import ImageSet, Splits
from vitascope.errors import UserError
from vitascope.models.configuration import traits
from vitascope.models.decoding import source_name
from vitascope.models.sizes import ModelConfig
from vitascope.training.distributed import gather, is_first, world_size
from vitascope.training.options.groups import Recorded
from vitascope.training.options.recipes import GROUP_OF, TrainConfig
from vitascope.training.plan import Plan

COMPARED_IMAGES = 100
"""Images that processes compare by content, spread over a set; all are compared by name and label."""


def images_facts(images: ImageSet) -> dict[str, Any]:
    """The number, the classes, the names and the labels of the images of a split."""
    names = [source_name(source).replace("\\", "/").rsplit("/", 1)[-1] for source in images.sources]
    labels = None if images.targets is None else images.targets.to_json()
    return {
        f"{images.name} images": len(images),
        f"classes of the {images.name} images": list(images.class_names),
        f"SHA-256 of names and labels of the {images.name} images": _digest(
            json.dumps([names, labels]).encode()
        ),
    }


def run_identity(options: TrainConfig, model: ModelConfig) -> dict[str, Any]:
    """Everything that must stay the same, as JSON: the model, and all options but execution options and
    paths. The split record has the images."""
    # Files may be moved, and a run with minutes records its lengths and validations as it goes.
    left_out = {"run", *traits(TrainConfig, NamesFile), *traits(TrainConfig, Recorded)}
    compared = [name for name, group in GROUP_OF.items() if group != "execution" and name not in left_out]
    identity = {
        **{f"model: {name}": value for name, value in model.to_dict().items() if name != "class_names"},
        **{name: options.option(name) for name in compared},
    }
    return dict(json.loads(json.dumps(identity)))


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any], besides: Collection[str] = ()) -> None:
    """Reject a checkpoint of another model or other options, `besides` those of these names."""
    differences = [
        f"{name} was {saved.get(name)!r}, is {value!r}"
        for name, value in now.items()
        if name not in besides and saved.get(name) != value
    ]
    if differences:
        raise UserError(
            f"the checkpoint is not of this run: {'; '.join(differences)}; restore the options, or start "
            "another run"
        )


def check_versions() -> None:
    """Reject processes with another version of vitascope or torch than the first one."""
    versions = {"version of vitascope": __version__, "version of torch": str(torch.__version__)}
    _check_processes(versions, "install the same versions on every machine")


def check_plan_and_data(plan: Plan, splits: Splits) -> None:
    """Reject processes that have other options or see other images than the first one, before they train.

    Files may have other paths on other machines.
    """
    if world_size() == 1:
        return
    execution = [name for name, group in GROUP_OF.items() if group == "execution"]
    facts = {name: plan.config.option(name) for name in execution if name not in ("workers", "device")}
    facts |= run_identity(plan.config, plan.model)
    for name, part in splits.parts.items():
        contents = contents_of([part.sources[index] for index in part.spread(COMPARED_IMAGES)])
        facts |= images_facts(part)
        facts[f"SHA-256 of some contents of the {name} images"] = _digest(contents.tobytes())
    shown = {name: repr(value) for name, value in facts.items()}
    _check_processes(shown, "give every process the same command and the same data")


def check_folder_is_shared(folder: Path) -> None:
    """Reject processes whose run folder of this path is not that of the first one, which holds its lock."""
    if world_size() == 1:
        return
    lock = folder / layout.LOCK
    holder = {"holder of the run folder": lock.read_text("utf-8") if lock.is_file() else "none"}
    advice = f"set VITASCOPE_CACHE to a folder that all machines share: it has the local copy, {folder}"
    _check_processes(holder, advice)


def _check_processes(facts: Mapping[str, str], advice: str) -> None:
    """Raise in every process the first fact in which one differs from the first process."""
    gathered = gather((socket.gethostname(), dict(facts)))
    first_host, expected = gathered[0]
    for number, (host, theirs) in enumerate(gathered):
        for name, value in expected.items():
            if theirs.get(name) != value:
                error = UserError(
                    f"process {number} of {len(gathered)} ({host}) differs from process 0 ({first_host}) in "
                    f"{name}: {theirs.get(name)}, not {value}; {advice}"
                )
                error.printed_elsewhere = not is_first()
                raise error


def _digest(content: bytes) -> str:
    """The SHA-256, 16 digits."""
    return hashlib.sha256(content).hexdigest()[:16]
