"""The engines of ONNX Runtime, OpenVINO and torch.export, and `open_engine`, which opens any MODEL."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vitascope.deploy.predict.engine import Engine, TorchEngine
from vitascope.deploy.predict.exported_model import (
    INPUT,
    OUTPUTS,
    SECTION,
    Batch,
    ExportedEngine,
    ExportedModelError,
    Outputs,
)
from vitascope.errors import UserError, check_choice
from vitascope.model.hardware import PRECISIONS
from vitascope.weights.loading import from_pretrained
from vitascope.weights.sources import CONFIG

SUFFIXES = (".onnx", ".xml", ".pt2")
"""Of exported models."""


def open_engine(
    ref: str | os.PathLike[str],
    *,
    revision: str | None = None,
    precision: str = "auto",
    device: str = "auto",
) -> Engine:
    """Open a MODEL reference or an exported model.

    Args:
        ref: a MODEL reference, an exported model (`.onnx`, `.xml`), or a folder with one.
        revision: of a hub id.
        precision: `auto`, `fp32` or `bf16`.
        device: `auto`, or a torch device; exported models run on the CPU.

    Raises:
        CheckpointError: as `from_pretrained`.
        UserError: as `TorchEngine` or `open_exported`.
    """
    file = exported_file_at(ref)
    engine: Engine
    if file is not None:
        engine = open_exported(file, precision=precision, device=device)
    else:
        engine = TorchEngine(from_pretrained(ref, revision), precision=precision, device=device)
    engine.name = name_of(ref)
    return engine


def name_of(ref: str | os.PathLike[str]) -> str:
    """The name of a file or folder, without those above it, or a hub id."""
    text = os.fspath(ref)
    for path in (Path(os.path.expanduser(part)) for part in (text, text.partition(":")[2]) if part):
        if path.exists():
            return path.resolve().name
    return text


def exported_file_at(ref: str | os.PathLike[str]) -> Path | None:
    """The exported model that a MODEL reference means: the file, or the only one in a folder; else None."""
    path = Path(os.path.expanduser(ref))
    if os.path.isfile(path):  # False, not an error, for a path that is too long
        return path if path.suffix in SUFFIXES else None
    if not os.path.isdir(path) or (path / CONFIG).exists():  # a model folder, whatever else it contains
        return None
    found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ExportedModelError(f"{path}: {len(found)} exported models, {names}; name one of them")
    return found[0] if found else None


def open_exported(path: Path, *, precision: str = "auto", device: str = "auto") -> ExportedEngine:
    """Open an ONNX or OpenVINO file."""
    if device not in ("auto", "cpu"):
        raise UserError(f"{path}: exported models run on the CPU, not on {device!r}")
    if path.suffix == ".onnx":
        return OnnxEngine(path, precision=precision)
    if path.suffix == ".xml":
        return OpenVinoEngine(path, precision=precision)
    raise ExportedModelError(
        f"{path}: torch runs code from such a file, so it is not opened by its name; use the model that it "
        "was exported from or, if you trust it, vitascope.deploy.predict.runtimes.ProgramEngine in Python"
    )


def missing_extra(extra: str, library: str) -> UserError:
    """The error for a library that is not installed."""
    return UserError(f"this needs {library}: pip install 'vitascope[{extra}]'")


class OnnxEngine(ExportedEngine):
    """An ONNX file in ONNX Runtime, on the CPU, with as many threads as torch uses."""

    def __init__(self, path: Path, *, precision: str = "auto") -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise missing_extra("onnx", "onnxruntime") from error
        check_choice("precision", precision, PRECISIONS)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4  # its errors are raised as exceptions too
        try:
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ExportedModelError(f"{path}: ONNX Runtime cannot read it: {first_line(error)}") from error
        super().__init__(path, self.session.get_modelmeta().custom_metadata_map)
        if precision not in ("auto", self.stored_precision):
            raise UserError(f"{path} computes in {self.stored_precision}; it does not support {precision}")

    @property
    def description(self) -> str:
        """`ONNX Runtime, fp32, on cpu`."""
        return f"ONNX Runtime, {self.stored_precision}, on cpu"

    def run(self, pixels: Batch) -> tuple[Outputs, Outputs]:
        """Probabilities and logits of uint8 (B, H, W, C)."""
        probabilities, logits = self.session.run(list(OUTPUTS), {INPUT: pixels})
        return probabilities, logits


class OpenVinoEngine(ExportedEngine):
    """An OpenVINO file (`.xml` with its `.bin`), on the CPU, with as many threads as torch uses.

    With precision `auto` the runtime chooses, bf16 if the CPU supports it. The 8 bits of bf16 are too few for
    pixel positions in a resize. So `pictures` come in the model's size, for which the resize is constant; if
    the file has to crop them itself, it computes in fp32.
    """

    def __init__(self, path: Path, *, precision: str = "auto") -> None:
        core = openvino_core()
        check_choice("precision", precision, PRECISIONS)
        with rejecting_broken(path):
            model = core.read_model(path)
            texts = metadata_in(model)
        super().__init__(path, texts)
        if self.own_pixels and precision == "bf16":
            raise UserError(f"{path} crops and resizes, in fp32 only; for bf16 export it with input=tensors")
        self.precision = "fp32" if self.own_pixels else precision
        hints: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        if self.precision != "auto":
            hints["INFERENCE_PRECISION_HINT"] = {"fp32": "f32", "bf16": "bf16"}[self.precision]
        with rejecting_broken(path):
            if self.input == "pictures" and self.precision != "fp32":
                model.reshape([-1, *self.preprocess.image_size, self.preprocess.channels])
            self.compiled = core.compile_model(model, "CPU", hints)
        self._requests = threading.local()

    @property
    def description(self) -> str:
        """`OpenVINO, auto precision, on cpu`."""
        return f"OpenVINO, {self.precision} precision, on cpu"

    def run(self, pixels: Batch) -> tuple[Outputs, Outputs]:
        """Probabilities and logits of uint8 (B, H, W, C)."""
        request = getattr(self._requests, "one", None)
        if request is None:  # one per thread: creating it takes longer than running a small model
            request = self._requests.one = self.compiled.create_infer_request()
        found = request.infer({INPUT: pixels}, share_inputs=True)
        return found[OUTPUTS[0]], found[OUTPUTS[1]]


@functools.cache
def openvino_core() -> Any:
    """OpenVINO's core, one per process, with its CPU plugin loaded for good.

    When loaded, the plugin replaces the thread's signal stack; when unloaded, it restores the former one. Two
    plugins that are not unloaded in reverse order leave a freed stack, and Ctrl-C then kills the process.
    """
    try:
        import openvino
    except ImportError as error:
        raise missing_extra("openvino", "openvino") from error
    core = openvino.Core()
    core.get_versions("CPU")  # loads the plugin
    return core


@contextmanager
def rejecting_broken(path: Path) -> Iterator[None]:
    """Turn OpenVINO's errors into one that names the file."""
    try:
        yield
    except RuntimeError as error:
        raise ExportedModelError(f"{path}: OpenVINO cannot read it: {first_line(error)}") from error


def metadata_in(model: Any) -> dict[str, str]:
    """Our metadata in an OpenVINO model; empty if it has none."""
    if not model.has_rt_info([SECTION]):
        return {}
    return {key: str(value) for key, value in model.get_rt_info([SECTION]).value.items()}


class ProgramEngine(ExportedEngine):
    """A program of torch.export (`.pt2`), in torch, on the CPU, in fp32.

    torch runs code from such a file, so open only files that you trust.
    """

    def __init__(self, path: Path) -> None:
        texts: dict[str, Any] = {"format": ""}  # torch fills no empty dict
        try:
            program = torch.export.load(path, extra_files=texts)
        except Exception as error:
            raise ExportedModelError(f"{path}: torch cannot read it: {first_line(error)}") from error
        super().__init__(path, texts)
        self.module = program.module()

    @property
    def description(self) -> str:
        """`a torch.export program, fp32, on cpu`."""
        return "a torch.export program, fp32, on cpu"

    @torch.inference_mode()
    def run(self, pixels: Batch) -> tuple[Outputs, Outputs]:
        """Probabilities and logits of uint8 (B, H, W, C)."""
        probabilities, logits = self.module(torch.from_numpy(pixels))
        return probabilities.numpy(), logits.numpy()


def first_line(error: BaseException) -> str:
    """The first line of an exception's message that is no heading."""
    lines = (line for line in map(str.strip, str(error).splitlines()) if line and not line.endswith(":"))
    return next(lines, type(error).__name__)
