"""The formats of exported models, and the function that writes each."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from vitascope.data.preprocess import Preprocess
from vitascope.deploy.export.graph import WholeModel
from vitascope.deploy.export.silencing import silenced
from vitascope.deploy.predict.exported_model import INPUT, OUTPUTS, SECTION, ExportedEngine
from vitascope.deploy.predict.runtimes import OnnxEngine, OpenVinoEngine, ProgramEngine, missing_extra
from vitascope.errors import UserError
from vitascope.storage import flush

OPSET = 20
"""Of ONNX: the first with GELU as one operation; ONNX Runtime reads it since 1.17."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A file format."""

    suffix: str
    """Of its files."""
    beside: tuple[str, ...] = ()
    """Suffixes of the files that may lie beside such a file and belong to it."""
    write: Callable[[ExportedProgram, Path, Mapping[str, str]], None]
    """Writes a traced `WholeModel` with its metadata."""
    open: Callable[[Path], ExportedEngine]
    """Opens a file in its runtime, as exactly as that can compute."""


def check_path(path: Path, kind: Format) -> None:
    """Reject a suffix of another format, and files that exist."""
    if path.suffix != kind.suffix:
        raise UserError(f"{path}: files of this format end in {kind.suffix}: {path.with_suffix(kind.suffix)}")
    for file in (path.with_suffix(suffix) for suffix in (kind.suffix, *kind.beside)):
        if file.exists():
            raise UserError(f"{file} exists and is not overwritten; remove it, or choose another file")


def move_beside(folder: Path, target: Path) -> list[Path]:
    """Move a folder's files beside the target, and the target last: it never exists without the rest."""
    rest = sorted(file for file in folder.iterdir() if file.name != target.name)
    for file in [*rest, folder / target.name]:
        flush(file)
        os.replace(file, target.parent / file.name)
    flush(target.parent)
    return [target, *(target.parent / file.name for file in rest)]


def traced(module: WholeModel, preprocess: Preprocess, dynamic_resolution: bool = False) -> ExportedProgram:
    """Trace a module for any batch size and for the picture sizes that it takes."""
    height, width = preprocess.image_size
    sizes: dict[int, Any] = {0: Dim("batch")}
    if module.input == "pictures":
        height, width = height + 3, width + 5  # a size that equals no other in the graph
        sizes |= {1: Dim("height"), 2: Dim("width")}
    elif dynamic_resolution:
        (ph, pw), (gh, gw) = module.patch, (Dim("rows"), Dim("columns"))
        sizes |= {1: ph * gh, 2: pw * gw}
        height, width = height + ph, width + 2 * pw  # at the model's own size, positions are not resampled
    example = torch.zeros(2, height, width, preprocess.channels, dtype=torch.uint8)
    with torch.no_grad(), silenced():
        program = torch.export.export(module, (example,), dynamic_shapes={INPUT: sizes}, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names folders of this machine
    return program


def write_onnx(program: ExportedProgram, path: Path, metadata: Mapping[str, str]) -> None:
    """Write an ONNX file; above 2 GB, the limit of one file, with its weights beside it."""
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
            raise RuntimeError("torch's exporter returned no program")
        exported.model.metadata_props.update(metadata)
        for node in exported.model.graph.all_nodes():
            node.metadata_props.clear()  # it names folders of this machine
        exported.save(str(path))


def copy_before_flattening(program: ExportedProgram) -> None:
    """Make tensors contiguous before they are flattened, which changes no output.

    torch's exporter decomposes attention with a bias into matrix products, whose result has other strides,
    after it has decided that the result can be flattened without a copy.
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


def write_openvino(program: ExportedProgram, path: Path, metadata: Mapping[str, str]) -> None:
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
        raise RuntimeError(str(error).split("-- ")[-1].strip()) from None  # the operation that it lacks
    sizes = next(node.meta["val"].shape for node in program.graph.nodes if node.name == INPUT)
    model.reshape([side if isinstance(side, int) else -1 for side in sizes])
    for port, name in zip([*model.inputs, *model.outputs], (INPUT, *OUTPUTS), strict=True):
        port.get_tensor().set_names({name})
    for key, text in metadata.items():
        model.set_rt_info(text, [SECTION, key])
    openvino.save_model(model, path, compress_to_fp16=False)


def write_program(program: ExportedProgram, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a program of torch.export."""
    torch.export.save(program, path, extra_files=dict(metadata))


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
