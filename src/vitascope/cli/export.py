"""`vitascope export`: a model as one file that needs no vitascope."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from vitascope.cli.parsing import MaybePath, Model
from vitascope.errors import UserError
from vitascope.training.options import MaybeText

if TYPE_CHECKING:
    from vitascope.data.decoding import ImageSource
    from vitascope.deploy.export.export import Export as Done

COMPARED = 32
"""Pictures that the file and the model are compared on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write a model for another runtime, and compare their answers.

    It takes raw pixels and gives probabilities; class names are in it.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    format: Literal["onnx", "openvino", "torch"] = "onnx"
    """`onnx` runs nearly everywhere, `openvino` on CPUs, in bf16 where they have it; `torch` is
    torch.export's."""
    out: MaybePath = None
    """The new file. Default: export/model.onnx in a run folder, else the model's name, here."""
    data: MaybeText = None
    """Pictures to compare on: a picture, a folder, or what else `vitascope train --data` takes.
    Default: the run's own test images, else parts of two photographs that come with scikit-learn."""
    input: Literal["pictures", "pixels"] = "pictures"
    """`pictures` of any size, which the file crops and resizes, or `pixels` that are cropped and resized."""
    dynamic_resolution: tyro.conf.FlagCreatePairsOff[bool] = False
    """With `--input pixels`: any height and width that patches tile, not the model's own only."""
    int8: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compute in 8-bit whole numbers: a quarter of the size, and faster. The file is measured beside fp32, on
    `--data`, which then needs a folder for each class; the default name is export/model-int8.onnx (.xml)."""
    calibration: MaybeText = None
    """With `--int8`: pictures that numbers' ranges are taken from; labels are not needed.
    Default: the run's own training images, else the training part of `--data`."""
    calibration_images: int = 300
    """With `--int8`: how many of them to use."""
    max_drop: float = 0.01
    """With `--int8`: the accuracy that may be lost, as a share of the pictures; else nothing is written."""

    def call(self) -> None:
        """Export, compare, print."""
        from vitascope.deploy.export.export import export
        from vitascope.deploy.export.formats import FORMATS
        from vitascope.weights.loading import from_pretrained

        if self.int8:
            self.call_int8()
            return
        if self.calibration is not None:
            raise UserError("--calibration is for --int8, which is not asked for")
        model = from_pretrained(self.model)
        out = self.out or default_out(self.model, FORMATS[self.format].suffix)
        images, whose = pictures(self.model, self.data)
        done = export(
            model,
            out,
            format=self.format,
            takes=self.input,
            dynamic_resolution=self.dynamic_resolution,
            images=images,
        )
        for file in done.files:
            print(f"{file}  {file.stat().st_size:,} bytes")
        print(
            f"takes {done.takes}\ngives probabilities and logits, float32 (batch, {done.about.num_classes})"
        )
        print(f"compared with the model on {whose}: {done.agreement.summary}")
        print(f"\nIt is used like this, without vitascope:\n{usage(done)}")

    def call_int8(self) -> None:
        """Export in int8, measure, print."""
        from vitascope.cli.quantizing import export_int8, pictures_for_int8, report
        from vitascope.deploy.export.formats import FORMATS
        from vitascope.weights.loading import from_pretrained

        if self.format == "torch":
            raise UserError("--int8 is for --format onnx and openvino, not torch")
        model = from_pretrained(self.model)
        calibration, test = pictures_for_int8(
            self.model, model.config.class_names, self.data, self.calibration
        )
        done = export_int8(
            model,
            self.out or default_out(self.model, f"-int8{FORMATS[self.format].suffix}"),
            (calibration, test),
            format=self.format,
            takes=self.input,
            dynamic_resolution=self.dynamic_resolution,
            calibration_images=self.calibration_images,
            max_drop=self.max_drop,
        )
        print(report(done, test.name))


def default_out(ref: str, suffix: str) -> Path:
    """Where an export goes that has no place: into the run folder, or into the folder that we are in."""
    if (Path(ref) / "model").is_dir():
        return Path(ref) / "export" / f"model{suffix}"
    return Path(Path(ref).expanduser().resolve().name + suffix)


def pictures(ref: str, data: str | None) -> tuple[list[ImageSource], str]:
    """Some pictures of a DATA argument, of a run's own test images where there is none; and whose they are.

    Without either, nothing: the library has its own.
    """
    from vitascope.data.datasets import open_pictures
    from vitascope.run.run import Run

    if data is not None:
        found, whose = open_pictures(data), f"pictures of {data}"
    else:
        try:
            found, whose = Run.open(ref).test_images().sources, "the run's own test images"
        except UserError:  # no run folder, or its data are gone
            return [], "parts of scikit-learn's photographs"
    step = max(1, len(found) // COMPARED)
    return [found[place] for place in range(0, len(found), step)][:COMPARED], whose


ONNX = """\
import json
import numpy, onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession({path!r})
class_names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
{pixels}
probabilities, logits = session.run(None, {{"pixels": pixels}})
print(class_names[probabilities[0].argmax()])"""

OPENVINO = """\
import json
import numpy, openvino
from PIL import Image, ImageOps

model = openvino.Core().read_model({path!r})
class_names = json.loads(model.get_rt_info(["vitascope", "class_names"]).value)
exact = {{"INFERENCE_PRECISION_HINT": "f32"}}  # {hint}
compiled = openvino.compile_model(model, "CPU", exact)
{pixels}
found = compiled(pixels)
print(class_names[found["probabilities"][0].argmax()])"""

TORCH = """\
import json
import numpy, torch
from PIL import Image, ImageOps

texts = {{"class_names": ""}}
program = torch.export.load({path!r}, extra_files=texts).module()
class_names = json.loads(texts["class_names"])
{pixels}
probabilities, logits = program(torch.tensor(pixels))
print(class_names[probabilities[0].argmax()])"""

SCRIPTS = {".onnx": ONNX, ".xml": OPENVINO, ".pt2": TORCH}


def usage(done: Done) -> str:
    """A program that uses a file."""
    fit = done.about.preprocess
    mode = "L" if fit.channels == 1 else "RGB"
    lines = ['picture = Image.open("cat.jpg")']
    if fit.exif_orientation:
        lines[0] = 'picture = ImageOps.exif_transpose(Image.open("cat.jpg"))'
    lines[0] += f'.convert("{mode}")'
    if done.about.input == "pixels":
        height, width = fit.image_size
        lines.append(f"picture = ImageOps.fit(picture, ({width}, {height}))  # better: as {fit} says")
    axes = "[None, ..., None]" if fit.channels == 1 else "[None]"
    lines.append(f"pixels = numpy.asarray(picture){axes}")
    hint = "without it some CPUs choose bf16: " + (
        "faster, less exact" if done.about.input == "pixels" else "too coarse for a resize"
    )
    script = SCRIPTS[done.path.suffix].format(path=str(done.path), pixels="\n".join(lines), hint=hint)
    if not done.about.class_names:
        script = "\n".join(line for line in script.splitlines() if not line.startswith("class_names ="))
        script = script.replace("class_names[", "").replace("argmax()])", "argmax())")
    return "\n".join(f"    {line}".rstrip() for line in script.splitlines())
