"""The formats of exported files, and what writes each."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from vitascope.data.preprocess import Preprocess
from vitascope.deploy.export.graph import WholeModel
from vitascope.deploy.export.silencing import silenced
from vitascope.deploy.predict.exported_model import INPUT, OUTPUTS, SECTION, ExportedEngine, Metadata
from vitascope.deploy.predict.runtimes import OnnxEngine, OpenVinoEngine, ProgramEngine, missing_extra
from vitascope.errors import UserError

OPSET = 20
"""Of ONNX: the first with GELU in one operation; ONNX Runtime reads it since 1.17."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A file format."""

    suffix: str
    """How its files end."""
    beside: tuple[str, ...] = ()
    """Endings, in place of the suffix, of what may lie beside such a file and belong to it."""
    write: Callable[[ExportedProgram, Path, Metadata], None]
    """Writes a traced `WholeModel`."""
    open: Callable[[Path], ExportedEngine]
    """The runtime, as exact as it can be."""


def check_path(path: Path, kind: Format) -> None:
    """Refuse a name that does not fit the format, and files that exist."""
    if path.suffix != kind.suffix:
        raise UserError(f"{path}: files of this format end in {kind.suffix}: {path.with_suffix(kind.suffix)}")
    refuse_existing([path.with_suffix(suffix) for suffix in (kind.suffix, *kind.beside)])


def refuse_existing(files: Iterable[Path]) -> None:
    """Refuse to overwrite."""
    for file in files:
        if file.exists():
            raise UserError(f"{file}: there already, and nothing is overwritten; remove it or name another")


def check_room(path: Path, size: int) -> None:
    """Refuse what the disk has no room for: libraries report a full one in ways that nobody understands."""
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise UserError(
            f"{path} takes about {size / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB free; "
            "free some, or name a file on another"
        )


def settled(folder: Path, target: Path) -> list[Path]:
    """The files of a folder, moved beside the target: it comes last, and is never there without the rest."""
    rest = sorted(file for file in folder.iterdir() if file.name != target.name)
    for file in [*rest, folder / target.name]:
        os.replace(file, target.parent / file.name)
    return [target, *(target.parent / file.name for file in rest)]


def traced(module: WholeModel, preprocess: Preprocess, dynamic_resolution: bool = False) -> ExportedProgram:
    """The graph of a module, for any number of pictures, and of the sizes that it takes."""
    height, width = preprocess.image_size
    sizes: dict[int, Any] = {0: Dim("batch")}
    if module.takes == "pictures":
        height, width = height + 3, width + 5  # a size that no other in the graph is taken for
        sizes |= {1: Dim("height"), 2: Dim("width")}
    elif dynamic_resolution:
        (ph, pw), (gh, gw) = module.patch, (Dim("rows"), Dim("columns"))
        sizes |= {1: ph * gh, 2: pw * gw}
        height, width = height + ph, width + 2 * pw  # not the model's own, where positions stay as they are
    example = torch.zeros(2, height, width, preprocess.channels, dtype=torch.uint8)
    with torch.no_grad(), silenced():
        program = torch.export.export(module, (example,), dynamic_shapes={INPUT: sizes}, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names the folders of this machine
    return program


def write_onnx(program: ExportedProgram, path: Path, about: Metadata) -> None:
    """Write an ONNX file; above 2 GB, which is more than one file can hold, with its weights beside it."""
    try:
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise missing_extra("onnx", "onnxscript") from error
    copy_before_flattening(program)
    with silenced():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[INPUT],
            output_names=list(OUTPUTS),
            opset_version=OPSET,
            verbose=False,
        )
        if exported is None:
            raise RuntimeError("torch's exporter gave no program")
        exported.model.metadata_props.update(about.to_texts())
        for node in exported.model.graph.all_nodes():
            node.metadata_props.clear()  # it names the folders of this machine
        exported.save(str(path))


def copy_before_flattening(program: ExportedProgram) -> None:
    """Make what is flattened contiguous, which no answer depends on.

    torch's exporter turns attention with a bias into matrix products after it has decided that its result,
    whose strides are others then, can be flattened without a copy.
    """
    aten = torch.ops.aten
    for node in list(program.graph.nodes):
        if node.target is aten.flatten.using_ints:
            values = node.args[0]
            with program.graph.inserting_before(node):
                copied = program.graph.call_function(
                    aten.clone.default, (values,), {"memory_format": torch.contiguous_format}
                )
            copied.meta.update(values.meta)
            node.replace_input_with(values, copied)
    program.graph_module.recompile()


def write_openvino(program: ExportedProgram, path: Path, about: Metadata) -> None:
    """Write an OpenVINO file and its weights, in float32."""
    try:
        import openvino
        from openvino.frontend import OpConversionFailure
    except ImportError as error:
        raise missing_extra("openvino", "openvino") from error
    try:
        with silenced():
            model = openvino.convert_model(program)
    except OpConversionFailure as error:
        raise RuntimeError(str(error).split("-- ")[-1].strip()) from None  # which operation it lacks
    sizes = next(node.meta["val"].shape for node in program.graph.nodes if node.name == INPUT)
    model.reshape([side if isinstance(side, int) else -1 for side in sizes])
    for port, name in zip([*model.inputs, *model.outputs], (INPUT, *OUTPUTS), strict=True):
        port.get_tensor().set_names({name})
    for key, text in about.to_texts().items():
        model.set_rt_info(text, [SECTION, key])
    openvino.save_model(model, path, compress_to_fp16=False)


def write_program(program: ExportedProgram, path: Path, about: Metadata) -> None:
    """Write a program of torch.export."""
    torch.export.save(program, path, extra_files=about.to_texts())


FORMATS = {
    "onnx": Format(suffix=".onnx", beside=(".onnx.data",), write=write_onnx, open=OnnxEngine),
    "openvino": Format(
        suffix=".xml",
        beside=(".bin",),
        write=write_openvino,
        open=functools.partial(OpenVinoEngine, precision="fp32"),
    ),
    "torch": Format(suffix=".pt2", write=write_program, open=ProgramEngine),
}
"""By name."""
