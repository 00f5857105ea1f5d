"""A program that uses an exported model without vitascope."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitascope.data.preprocess import Preprocess
from vitascope.deploy.predict.exported_model import InputMode

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

PROGRAMS = {".onnx": ONNX, ".xml": OPENVINO, ".pt2": TORCH}


def usage(path: Path, preprocess: Preprocess, class_names: Sequence[str], input: InputMode) -> str:
    """A program that prints the class of `cat.jpg`."""
    mode = "L" if preprocess.channels == 1 else "RGB"
    opened = 'Image.open("cat.jpg")'
    upright = f"ImageOps.exif_transpose({opened})" if preprocess.exif_orientation else opened
    lines = [f'picture = {upright}.convert("{mode}")']
    if input == "tensors":
        height, width = preprocess.image_size
        lines.append(f"picture = ImageOps.fit(picture, ({width}, {height}))  # better: as {preprocess} says")
    axes = "[None, ..., None]" if preprocess.channels == 1 else "[None]"
    lines.append(f"pixels = numpy.asarray(picture){axes}")
    hint = "without it some CPUs choose bf16: " + (
        "faster, less exact" if input == "tensors" else "too coarse for a resize"
    )
    program = PROGRAMS[path.suffix].format(path=str(path), pixels="\n".join(lines), hint=hint)
    if not class_names:
        program = "\n".join(line for line in program.splitlines() if not line.startswith("class_names ="))
        program = program.replace("class_names[", "").replace("argmax()])", "argmax())")
    return program
