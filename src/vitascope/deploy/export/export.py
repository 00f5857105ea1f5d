"""A model as one file for another runtime, compared with the model before it gets its name."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from vitascope.data.decoding import ImageSource, as_pictures
from vitascope.data.preprocess import Preprocess
from vitascope.deploy.export.formats import FORMATS, check_path, check_room, settled, traced
from vitascope.deploy.export.graph import WholeModel
from vitascope.deploy.export.verification import (
    TOLERANCES,
    Agreement,
    agreement,
    refuse_other_answers,
    sample_pictures,
)
from vitascope.deploy.predict.exported_model import INPUT_MODES, ExportedEngine, InputMode, Metadata
from vitascope.deploy.predict.runtimes import first_line
from vitascope.errors import UserError, check_choice
from vitascope.model.classifier import Classifier
from vitascope.model.resnet_config import ResNetConfig
from vitascope.weights.preprocess import preprocess_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """What an export wrote and proved."""

    files: list[Path]
    """The file, and what it needs beside it: OpenVINO's weights, those of an ONNX file above 2 GB."""
    about: Metadata
    """What the file tells about itself."""
    agreement: Agreement
    """The file in its own runtime against the model in torch."""
    dynamic_resolution: bool
    """Whether it takes pixels of other sizes too."""

    @property
    def path(self) -> Path:
        """The file that is opened."""
        return self.files[0]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def takes(self) -> str:
        """What goes in, in words."""
        fit = self.about.preprocess
        if self.about.input == "pictures":
            return f"pictures of any size, uint8 (batch, height, width, {fit.channels})"
        height, width = ("height", "width") if self.dynamic_resolution else fit.image_size
        return f"pixels, uint8 (batch, {height}, {width}, {fit.channels})"


def export(
    model: Classifier,
    path: str | os.PathLike[str],
    *,
    format: str = "onnx",
    takes: InputMode = "pictures",
    dynamic_resolution: bool = False,
    images: ImageSource | Iterable[ImageSource] = (),
) -> Export:
    """Write a model as a file that takes raw pixels and answers with probabilities.

    The file is written aside, opened by its own runtime and compared with the model on real pictures; it gets
    its name when every answer is the same.

    Args:
        model: a classifier; its preprocessing becomes part of the graph.
        path: a new file, which ends as the format does: `.onnx`, `.xml`, `.pt2`.
        format: `onnx`, `openvino` or `torch`.
        takes: `pictures` of any size, or `pixels` of the model's size.
        dynamic_resolution: with `pixels`, take any height and width that patches tile.
        images: one picture or several to compare on; without any, parts of scikit-learn's two photographs.

    Raises:
        UserError: a model that cannot be exported, a file that exists, a runtime that is not installed, a
            picture that cannot be read, or answers that differ.
    """
    check_choice("format", format, FORMATS)
    check_choice("input", takes, INPUT_MODES)
    kind, path = FORMATS[format], Path(path)
    check_path(path, kind)
    if dynamic_resolution:
        check_dynamic(model, takes, format)
    preprocess = preprocess_of(model)
    module = WholeModel(model.eval().cpu().float(), preprocess, takes).eval()
    about = Metadata(
        preprocess=preprocess,
        class_names=model.config.class_names,
        num_classes=model.config.num_classes,
        input=takes,
        model=model.config.to_dict(),
    )
    sources = as_pictures(images) or sample_pictures()
    pictures = [read_picture(image, preprocess) for image in sources]
    path.parent.mkdir(parents=True, exist_ok=True)
    check_room(path, 4 * model.config.num_parameters)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as aside:
        written = Path(aside) / path.name
        with refused_in_one_line(path.name, format, dynamic_resolution):
            kind.write(traced(module, preprocess, dynamic_resolution), written, about)
            engine = kind.open(written)
            found = prove(engine, model, preprocess, pictures)
            if dynamic_resolution:
                prove_another_size(engine, module, sources[:4])
        refuse_other_answers(found, path.name)
        files = settled(Path(aside), path)
    return Export(files=files, about=about, agreement=found, dynamic_resolution=dynamic_resolution)


def check_dynamic(model: Classifier, takes: InputMode, format: str) -> None:
    """Refuse models whose graph holds for one resolution only."""
    if takes == "pictures":
        raise UserError(
            "pictures are brought to the model's own size; for other resolutions say --input pixels"
        )
    if format == "torch":
        raise UserError(
            "a program of torch.export is of one resolution; --format onnx and openvino hold others"
        )
    config = model.config
    if isinstance(config, ResNetConfig) or config.embedding.stem == "resnet":
        raise UserError("a ResNet pads by the size of the picture, so its graph is of one resolution")
    if config.block.attention != "global":
        raise UserError(f"{config.block.attention} attention has a graph for each resolution")
    if config.embedding.positions == "relative":
        raise UserError("relative positions have a graph for each resolution")


def prove_another_size(engine: ExportedEngine, module: WholeModel, sources: Sequence[ImageSource]) -> None:
    """Compare a file for any resolution at another than the model's own.

    Raises:
        UserError: its answers differ there.
    """
    (height, width), (down, across) = engine.preprocess.image_size, module.patch
    other = engine.preprocess.at_size((height + 2 * down, width + across))
    found = prove(engine, module.model, other, [read_picture(image, other) for image in sources])
    refuse_other_answers(found, f"{engine.path.name}, at {height + 2 * down}x{width + across} pixels,")


@contextmanager
def refused_in_one_line(name: str, format: str, dynamic_resolution: bool) -> Iterator[None]:
    """Exporters and runtimes raise whatever they stumble over; users get what it means for them."""
    try:
        yield
    except (UserError, OSError):  # a full disk is not the format's fault
        raise
    except Exception as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        formats = ("onnx", "openvino") if dynamic_resolution else FORMATS
        others = " or ".join(other for other in formats if other != format)
        what = "graph of every resolution" if dynamic_resolution else "graph"
        way_out = "leave out --dynamic-resolution, or try" if dynamic_resolution else "try"
        raise UserError(
            f"{name}: {format} has no {what} for this model ({first_line(reason)}); "
            f"{way_out} --format {others}"
        ) from error


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture to compare on."""

    ready: Tensor
    """As the model is given it in torch: uint8 (1, C, h, w)."""
    whole: Tensor
    """As it was decoded: uint8 (1, C, H, W)."""


def read_picture(image: ImageSource, preprocess: Preprocess) -> Picture:
    """A picture in both ways.

    Raises:
        ImageError: it cannot be read.
    """
    ready, whole = preprocess.pixels(image), preprocess.whole_pixels(image)
    return Picture(torch.from_numpy(ready)[None], torch.from_numpy(whole)[None])


@torch.inference_mode()
def prove(
    engine: ExportedEngine, model: Classifier, preprocess: Preprocess, pictures: Sequence[Picture]
) -> Agreement:
    """A file's answers against the model's in torch, picture by picture; of the first also two at a time."""
    own, other = [], []
    for picture in pictures:
        given = picture.whole if engine.about.input == "pictures" else picture.ready
        own.append(model(preprocess.normalize(picture.ready)))  # (1, K)
        other.append(engine.logits(given))
        if len(own) == 1 and not torch.allclose(
            engine.logits(given.expand(2, -1, -1, -1)), other[0].expand(2, -1), atol=1e-4, rtol=1e-4
        ):
            raise UserError(f"{engine.path.name} answers two pictures otherwise than one, and is not kept")
    return agreement(torch.cat(own), torch.cat(other), TOLERANCES[engine.about.input])
