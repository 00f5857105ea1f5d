"""`convert`: a checkpoint of any family as files of any other, compared with the source."""

import copy
import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitascope.arguments import checked
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.decoding import ImageSource, is_one_picture
from vitascope.models.preprocess import Preprocess
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.agreement import Agreement, agreement
from vitascope.models.weights.identification import check_format, family_named, identify, read_config
from vitascope.models.weights.loading import load_source
from vitascope.models.weights.mapping import changes, to_family
from vitascope.models.weights.preprocess import changed_settings, preprocess_of
from vitascope.storage import check_new_folder, new_folder


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The result of `convert`; printed, it is the report of the command."""

    source_family: str
    format: str  # the family of the files
    files: list[Path]
    changes: list[str]  # forced by the other library's format, in words
    parity: Agreement  # the written files, loaded again, against the source, on the same tensors
    on_pictures: bool  # or on random tensors, for a model of neither 1 nor 3 channels
    prepared: Agreement | None  # on pictures, each model with its own preprocessing; None if it is the same

    def __str__(self) -> str:
        lines = [f"{file}  {file.stat().st_size:,} bytes" for file in self.files]
        lines += [f"from {self.source_family} to {self.format}", *(f"note: {note}" for note in self.changes)]
        plural = "s" if self.parity.images > 1 else ""
        inputs = f"{self.parity.images} {'picture' if self.on_pictures else 'random tensor'}{plural}"
        lines.append(f"parity: {_in_words(self.parity, inputs)}")
        if self.prepared is not None:
            lines.append(f"each with its own preprocessing: {_in_words(self.prepared, inputs)}")
        return "\n".join(lines)


def _in_words(parity: Agreement, inputs: str) -> str:
    if parity.first is None:
        return f"bitwise the same in every layer, on {inputs}"
    return (
        f"outputs differ by at most {parity.difference:.2g} (the largest is {parity.scale:.3g}), on "
        f"{inputs}; first in {parity.first}, by {parity.differences[parity.first]:.2g}"
    )


@checked
def convert(
    model: VisionModel | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    format: str = "vitascope",
    revision: str | None = None,
    images: ImageSource | Iterable[ImageSource] = (),
) -> Conversion:
    """Write a model, in float32, as another library loads it, and compare the written files with it.

    Args:
        model: a MODEL argument, or a model with its preprocessing.
        folder: a new or empty folder.
        format: a name of `all_families.FAMILIES`.
        revision: branch, tag or commit of a hub id.
        images: pictures to compare the outputs on; by default the two photographs in scikit-learn, or two
            random tensors for a model of neither 1 nor 3 channels.

    Raises:
        UserError: an unknown format, a folder with files in it, a picture that cannot be read, or a model
            that the other library does not have.
    """
    family_named(format, "format")
    folder = Path(folder)
    check_new_folder(folder)
    family_name = "vitascope"
    if isinstance(model, str | os.PathLike):
        source, source_family = identify(model, revision)
        model, family_name = load_source(source, source_family), source_family.name
    elif revision is not None:
        raise UserError("revision is of a hub id, and this model is loaded already: leave it out")
    else:
        model = copy.deepcopy(model).to("cpu", torch.float32).eval()
    check_format(format, model.config)
    preprocess, config = preprocess_of(model), model.config
    several: Any = [images] if is_one_picture(images) else images
    pictures: Sequence[ImageSource] = list(several)
    on_pictures = bool(pictures) or preprocess.channels in (1, 3)
    if on_pictures and not pictures:
        from sklearn.datasets import load_sample_images

        pictures = load_sample_images().images  # a temple and a flower, uint8 (427, 640, 3)
    # Before anything is written: a picture that cannot be read leaves no folder behind.
    if on_pictures:
        inputs = model_input(preprocess, pictures)
    else:
        size = (2, preprocess.channels, *preprocess.image_size)
        inputs = torch.randn(size, generator=torch.Generator().manual_seed(0))
    family = family_named(format)
    with new_folder(folder):
        files = to_family(family, model, preprocess, folder)
    written = identify(folder, family=format)
    again = load_source(*written, read_config(*written))  # its config in hand: nothing is reported as assumed
    prepared = None
    if on_pictures and again.preprocess != preprocess:
        prepared = parity_of(model, again, inputs, model_input(preprocess_of(again), pictures))
    forced = changes(family, config) if isinstance(config, ViTConfig) else []
    return Conversion(
        source_family=family_name,
        format=format,
        files=files,
        changes=forced + _lost(model, again, format, prepared),
        parity=parity_of(model, again, inputs),
        on_pictures=on_pictures,
        prepared=prepared,
    )


def _lost(source: VisionModel, written: VisionModel, family: str, prepared: Agreement | None) -> list[str]:
    """Notes on class names and preprocessing that the files cannot express, with the measured effect."""
    notes = []
    if source.config.class_names != written.config.class_names:
        notes.append(f"the names of the {source.config.num_classes} classes are not in the files")
    if differing := changed_settings(preprocess_of(source), preprocess_of(written)):
        note = f"{family} prepares pictures differently, and has nothing nearer: {differing}"
        if prepared is not None:
            note += (
                f"; logits differ by up to {prepared.difference:.2g} (the largest is {prepared.scale:.3g})"
            )
        notes.append(note)
    return notes


def model_input(preprocess: Preprocess, images: Sequence[ImageSource]) -> Tensor:
    """Pictures as a model's input, float32 (B, C, H, W)."""
    return preprocess.normalize(torch.from_numpy(np.stack([preprocess.pixels(image) for image in images])))


@torch.inference_mode()
def parity_of(
    model: VisionModel, other: VisionModel, images: Tensor, others: Tensor | None = None
) -> Agreement:
    """Run two models and find the first difference; `others` are the other's inputs, if not `images`."""
    trace, theirs = model.trace(images), other.trace(images if others is None else others)
    differences = {
        name: float((value - theirs[name]).abs().max())
        for name, value in trace.values.items()
        if value.shape == theirs[name].shape
    }  # in the order of the pass
    return dataclasses.replace(agreement(trace["logits"], theirs["logits"]), differences=differences)
