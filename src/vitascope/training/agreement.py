"""What all processes of a run must have in common: versions, options, the model, the data."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from vitascope._version import __version__
from vitascope.arguments import NamesFile
from vitascope.data.contents import contents_of
from vitascope.data.splits import ImageSet, Splits
from vitascope.errors import UserError
from vitascope.model.configuration import traits
from vitascope.options.recipes import GROUP_OF, TrainConfig
from vitascope.run import layout
from vitascope.training.checkpoint.state import names_and_labels
from vitascope.training.distributed import gather, is_first, world_size
from vitascope.training.plan import Plan

COMPARED_IMAGES = 100
"""Training images that are compared by content, spread over the set; all are compared by name and label."""


def check_versions() -> None:
    """Reject processes with another version of vitascope or torch than the first one."""
    versions = {"the version of vitascope": __version__, "the version of torch": str(torch.__version__)}
    _check_equal(versions, "install the same versions on every machine")


def check_plan_and_data(plan: Plan, splits: Splits) -> None:
    """Reject processes that have other options or see other images than the first one, before they train.

    Files may have other paths on other machines.
    """
    if world_size() == 1:
        return
    own = {"workers", "device", *traits(TrainConfig, NamesFile)}
    options = {f"the option {name}": plan.options.option(name) for name in GROUP_OF if name not in own}
    model = {f"the model option {name}": value for name, value in plan.model.to_dict().items()}
    images = {
        f"{fact} of the {name} images": value
        for name, part in splits.parts.items()
        for fact, value in _facts(part).items()
    }
    shown = {name: repr(value) for name, value in {**images, **options, **model}.items()}
    _check_equal(shown, "give every process the same command and the same data")


def check_folder_is_shared(folder: Path) -> None:
    """Reject processes whose run folder of this path is not that of the first one, which holds its lock."""
    if world_size() == 1:
        return
    lock = folder / layout.LOCK
    holder = {"the holder of the run folder": lock.read_text("utf-8") if lock.is_file() else "none"}
    advice = f"set VITASCOPE_CACHE to a folder that all machines share: it has the local copy, {folder}"
    _check_equal(holder, advice)


def _facts(images: ImageSet) -> dict[str, object]:
    return {
        "the number": len(images),
        "the class names": images.class_names,
        "the SHA-256 of names and labels": names_and_labels(images),
        "the SHA-256 of some contents": _contents(images),
    }


def _contents(images: ImageSet) -> str:
    """The SHA-256 of the contents of some images, spread over the set, 16 digits."""
    contents = contents_of([images.sources[index] for index in images.spread(COMPARED_IMAGES)])
    return hashlib.sha256(contents.tobytes()).hexdigest()[:16]


def _check_equal(facts: Mapping[str, str], advice: str) -> None:
    """Raise in every process the first fact in which one differs from the first process."""
    found = gather((socket.gethostname(), dict(facts)))
    first_host, expected = found[0]
    for number, (host, theirs) in enumerate(found):
        for name, value in expected.items():
            if theirs.get(name) != value:
                error = UserError(
                    f"process {number} of {len(found)} ({host}) differs from process 0 ({first_host}) in "
                    f"{name}: {theirs.get(name)}, not {value}; {advice}"
                )
                error.printed_elsewhere = not is_first()
                raise error
