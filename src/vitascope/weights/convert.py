"""From any family's checkpoint to any other's file, and the proof that both give the same answers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitascope.data.decoding import ImageSource, as_pictures
from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError, check_choice
from vitascope.model.classifier import Classifier
from vitascope.model.config import ViTConfig
from vitascope.weights.mapping import changes
from vitascope.weights.preprocess import preprocess_of
from vitascope.weights.store import (
    FAMILIES,
    identify,
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
    """Inputs compared."""


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
    """The written files, loaded again, against the source, on the same tensors."""
    on_pictures: bool
    """Whether the tensors are of pictures; they are random for a model of neither 1 nor 3 channels."""
    prepared: Parity | None
    """The same where each prepares the pictures by its own rule; None where both have the same rule."""


def convert(
    ref: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    to: str = "vitascope",
    revision: str | None = None,
    images: ImageSource | Iterable[ImageSource] = (),
) -> Conversion:
    """Write a MODEL argument, in float32, as another library itself loads it: what `vitascope convert` calls.

    Args:
        ref: a MODEL argument.
        folder: a new or empty folder.
        to: one of `FAMILIES`.
        revision: of a hub id.
        images: pictures to compare the outputs on; without any, the two photographs in scikit-learn, and
            two random tensors for a model of neither 1 nor 3 channels.

    Raises:
        UserError: an unknown family, a folder with files in it, a model that the family does not have.
    """
    check_choice("format", to, FAMILIES)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is not an empty folder; nothing in it is overwritten, so name a new one")
    source, source_family = identify(ref, revision)
    model = load_source(source, source_family)
    preprocess = preprocess_of(model)
    given = as_pictures(images)
    on_pictures = bool(given) or preprocess.channels in (1, 3)
    pictures = given or (sample_photographs() if on_pictures else ())
    # A picture that cannot be read leaves no folder behind.
    inputs = normalized(preprocess, pictures) if on_pictures else random_inputs(preprocess)
    family = FAMILIES[to]
    files = write_model(model, folder, family)
    written = identify(folder, family=to)
    again = load_source(*written, read_config(*written))
    config, prepared = model.config, None
    if on_pictures and again.preprocess != preprocess:
        prepared = compare(model, again, inputs, normalized(preprocess_of(again), pictures))
    return Conversion(
        source_family=source_family.name,
        files=files,
        changes=(changes(family, config) if isinstance(config, ViTConfig) else []) + lost(model, again, to),
        parity=compare(model, again, inputs),
        on_pictures=on_pictures,
        prepared=prepared,
    )


def lost(source: Classifier, written: Classifier, family: str) -> list[str]:
    """What the files have no place for, or the other library does otherwise, in words."""
    notes = []
    if source.config.class_names != written.config.class_names:
        notes.append(f"the names of the {source.config.num_classes} classes are not in the files")
    ours, theirs = dataclasses.asdict(preprocess_of(source)), dataclasses.asdict(preprocess_of(written))
    differing = [f"{name} {theirs[name]}, not {ours[name]}" for name in ours if ours[name] != theirs[name]]
    if differing:
        notes.append(f"{family} prepares pictures otherwise: {', '.join(differing)}")
    return notes


def sample_photographs() -> Sequence[ImageSource]:
    """The two in scikit-learn: a temple and a flower, uint8 (427, 640, 3)."""
    from sklearn.datasets import load_sample_images

    photographs: Sequence[ImageSource] = load_sample_images().images
    return photographs


def normalized(preprocess: Preprocess, images: Sequence[ImageSource]) -> Tensor:
    """Pictures as a model takes them, float32 (B, C, H, W)."""
    return preprocess.normalize(torch.from_numpy(np.stack([preprocess.pixels(image) for image in images])))


def random_inputs(preprocess: Preprocess) -> Tensor:
    """Two tensors of the normal distribution, the same each time, float32 (2, C, H, W)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, preprocess.channels, *preprocess.image_size, generator=generator)


@torch.inference_mode()
def compare(model: Classifier, other: Classifier, images: Tensor, others: Tensor | None = None) -> Parity:
    """Run two models and find where they first differ.

    Args:
        model: a model.
        other: one of the same architecture.
        images: what both are given, (B, C, H, W).
        others: what the other is given instead; of another size, only the outputs can be compared.
    """
    trace, theirs = model.trace(images), other.trace(images if others is None else others)
    differences = {
        name: float((value - theirs[name]).abs().max())
        for name, value in trace.values.items()
        if value.shape == theirs[name].shape
    }  # in the order of the pass
    first = next((name for name, difference in differences.items() if difference != 0), None)
    return Parity(
        logits=differences["logits"],
        scale=float(trace["logits"].abs().max()),
        first=first,
        first_difference=differences[first] if first is not None else 0.0,
        images=len(images),
    )
