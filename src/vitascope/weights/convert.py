"""From any family's checkpoint to any other's file, and the proof that both give the same answers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vitascope.data.preprocess import ImageSource, Preprocess
from vitascope.errors import UserError, check_choice
from vitascope.model.classifier import Classifier
from vitascope.model.config import ViTConfig
from vitascope.weights.mapping import changes
from vitascope.weights.store import (
    FAMILIES,
    Loaded,
    identify,
    load_pretrained,
    load_source,
    read_config,
    write_model,
)


@dataclasses.dataclass(frozen=True)
class Parity:
    """How two models differ on the same pictures, in float32."""

    logits: float
    """Largest difference of the outputs."""
    scale: float
    """Largest output of the first, to compare with."""
    first: str | None
    """The first intermediate (of `Trace`) that differs; None where all are bitwise the same."""
    first_difference: float
    """The largest difference there."""
    images: int
    """Pictures compared."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion did."""

    source_family: str
    """Whose the checkpoint was."""
    files: list[Path]
    """What was written."""
    changes: list[str]
    """What the other library runs otherwise, in words; empty where nothing."""
    parity: Parity
    """The written files, loaded again, against the source."""


def convert(
    ref: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    to: str = "vitascope",
    revision: str | None = None,
    images: Sequence[ImageSource] = (),
) -> Conversion:
    """Write a MODEL argument, in float32, as another library itself loads it: what `vitascope convert` calls.

    Args:
        ref: a MODEL argument.
        folder: a new or empty folder.
        to: one of `FAMILIES`.
        revision: of a hub id.
        images: pictures to compare the outputs on; without any, the two photographs in scikit-learn.

    Raises:
        UserError: an unknown family, a folder with files in it, a model that the family does not have.
    """
    check_choice("format", to, FAMILIES)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is not an empty folder; nothing in it is overwritten, so name a new one")
    loaded = load_pretrained(ref, revision)
    pixels = load_pixels(loaded.preprocess, images)  # a picture that cannot be read leaves no folder behind
    family = FAMILIES[to]
    files = write_model(loaded.model, folder, loaded.preprocess, family)
    written = identify(folder, family=to)
    again = load_source(*written, read_config(*written))
    config = loaded.model.config
    return Conversion(
        source_family=loaded.family,
        files=files,
        changes=(changes(family, config) if isinstance(config, ViTConfig) else []) + lost(loaded, again),
        parity=compare(loaded.model, again.model, loaded.preprocess.normalize(pixels)),
    )


def lost(source: Loaded, written: Loaded) -> list[str]:
    """What the files have no place for, in words."""
    notes = []
    if source.model.config.class_names != written.model.config.class_names:
        notes.append(f"the names of the {source.model.config.num_classes} classes are not in the files")
    ours, theirs = source.preprocess.to_dict(), written.preprocess.to_dict()
    differing = [f"{name} {theirs[name]}, not {ours[name]}" for name in ours if ours[name] != theirs[name]]
    if differing:
        notes.append(f"the preprocessing is not in the files; without it, theirs is {', '.join(differing)}")
    return notes


def load_pixels(preprocess: Preprocess, images: Sequence[ImageSource]) -> Tensor:
    """Pictures as uint8 (B, C, H, W); scikit-learn's two photographs where none are given."""
    if not images:
        from sklearn.datasets import load_sample_images

        images = load_sample_images().images  # a temple and a flower, (427, 640, 3)
    return torch.stack([torch.from_numpy(preprocess.pixels(image)) for image in images])


@torch.inference_mode()
def compare(model: Classifier, other: Classifier, images: Tensor) -> Parity:
    """Run two models on the same images (B, C, H, W) and find where they first differ."""
    trace, theirs = model.trace(images), other.trace(images)
    differences = {
        name: float((value - theirs[name]).abs().max()) for name, value in trace.values.items()
    }  # in the order of the pass
    first = next((name for name, difference in differences.items() if difference != 0), None)
    return Parity(
        logits=differences["logits"],
        scale=float(trace["logits"].abs().max()),
        first=first,
        first_difference=differences[first] if first is not None else 0.0,
        images=len(images),
    )
