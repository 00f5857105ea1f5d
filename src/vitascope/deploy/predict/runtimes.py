"""The engines of exported files: ONNX Runtime, OpenVINO, and torch.export's programs."""

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
    SECTION,
    Answers,
    Batch,
    ExportedEngine,
    ExportedModelError,
    Metadata,
)
from vitascope.errors import UserError, check_choice
from vitascope.model.hardware import PRECISIONS
from vitascope.weights.loading import from_pretrained
from vitascope.weights.sources import CONFIG

SUFFIXES = (".onnx", ".xml", ".pt2")
"""Of exported files."""


def exported_file_at(ref: str | os.PathLike[str]) -> Path | None:
    """The exported file that a MODEL argument means: itself, or the only one in a folder; None where none is.

    Raises:
        ExportedModelError: a folder with several.
    """
    path = Path(os.path.expanduser(ref))
    if os.path.isfile(path):  # False, not an error, for a path that is too long
        return path if path.suffix in SUFFIXES else None
    if not os.path.isdir(path) or (path / CONFIG).exists():  # a model folder, whatever else lies in it
        return None
    found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ExportedModelError(f"{path}: {len(found)} exported files, {names}; name one of them")
    return found[0] if found else None


def open_exported(path: Path, *, precision: str = "auto", device: str = "auto") -> ExportedEngine:
    """The engine of an ONNX or OpenVINO file.

    Raises:
        ExportedModelError: an unreadable or foreign file, or a program of torch.export,
            which can contain code.
        UserError: a device, a precision or a library that is not there.
    """
    if device not in ("auto", "cpu"):
        raise UserError(f"{path}: exported files run on the CPU, not on {device!r}")
    if path.suffix == ".onnx":
        return OnnxEngine(path, precision=precision)
    if path.suffix == ".xml":
        return OpenVinoEngine(path, precision=precision)
    raise ExportedModelError(
        f"{path}: torch runs code that such a file brings along, so it is not opened by its name; use the "
        "model it was made of or, if you trust it, vitascope.deploy.predict.runtimes.ProgramEngine in Python"
    )


def missing_extra(extra: str, library: str) -> UserError:
    """The error for a library that is not installed."""
    return UserError(f"this needs {library}: pip install 'vitascope[{extra}]'")


class OnnxEngine(ExportedEngine):
    """An ONNX file in ONNX Runtime, on the CPU, with as many threads as torch has.

    Raises:
        ExportedModelError: a broken file, or one that vitascope did not write.
        UserError: ONNX Runtime is not installed, or another precision than the file's is asked for.
    """

    def __init__(self, path: Path, *, precision: str = "auto") -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise missing_extra("onnx", "onnxruntime") from error
        check_choice("precision", precision, PRECISIONS)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4  # what it has to say comes as an exception too
        try:
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ExportedModelError(f"{path}: ONNX Runtime cannot read it: {first_line(error)}") from error
        about = Metadata.from_texts(self.session.get_modelmeta().custom_metadata_map, path)
        super().__init__(path, about)
        if precision not in ("auto", about.precision):
            raise UserError(f"{path} computes in {about.precision}; --precision {precision} it cannot")

    @property
    def description(self) -> str:
        """`ONNX Runtime, fp32, on cpu`."""
        return f"ONNX Runtime, {self.about.precision}, on cpu"

    def run(self, pixels: Batch) -> tuple[Answers, Answers]:
        """Probabilities and logits of uint8 (B, H, W, C)."""
        probabilities, logits = self.session.run(["probabilities", "logits"], {"pixels": pixels})
        return probabilities, logits


class OpenVinoEngine(ExportedEngine):
    """An OpenVINO file (`.xml` with its `.bin`), on the CPU, with as many threads as torch has.

    Precision `auto` is the runtime's choice, bf16 where the CPU computes in it. A resize in the graph is not
    left to that: bf16 has 8 bits, too few for the place of a pixel. So `pictures` come in the size of the
    model, at which the resize is a constant, or, where the file must crop them itself, it computes in fp32.

    Raises:
        ExportedModelError: a broken file, or one that vitascope did not write.
        UserError: OpenVINO is not installed, or bf16 is asked for where the file must crop pictures itself.
    """

    def __init__(self, path: Path, *, precision: str = "auto") -> None:
        core = openvino_core()
        check_choice("precision", precision, PRECISIONS)
        with refused_as_broken(path):
            model = core.read_model(path)
            texts = told(model)
        super().__init__(path, Metadata.from_texts(texts, path))
        if self.own_pixels and precision == "bf16":
            raise UserError(f"{path} crops and resizes in fp32; for bf16 export it with --input pixels")
        self.precision = "fp32" if self.own_pixels else precision
        hints: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        if self.precision != "auto":
            hints["INFERENCE_PRECISION_HINT"] = {"fp32": "f32", "bf16": "bf16"}[self.precision]
        with refused_as_broken(path):
            if self.about.input == "pictures" and self.precision != "fp32":
                model.reshape([-1, *self.preprocess.image_size, self.preprocess.channels])
            self.compiled = core.compile_model(model, "CPU", hints)
        self._requests = threading.local()

    @property
    def description(self) -> str:
        """`OpenVINO, auto precision, on cpu`."""
        return f"OpenVINO, {self.precision} precision, on cpu"

    def run(self, pixels: Batch) -> tuple[Answers, Answers]:
        """Probabilities and logits of uint8 (B, H, W, C)."""
        request = getattr(self._requests, "one", None)
        if request is None:  # each thread keeps one: making it anew takes longer than a small model
            request = self._requests.one = self.compiled.create_infer_request()
        found = request.infer({"pixels": pixels}, share_inputs=True)
        return found["probabilities"], found["logits"]


@functools.cache
def openvino_core() -> Any:
    """OpenVINO's entry, the one of this process, with what computes on the CPU loaded for good.

    Loaded, that gives the thread another stack for signals, and unloaded it puts back the one that it found.
    Two that do not end in the reverse order leave a stack that is gone: Ctrl-C then kills the process.

    Raises:
        UserError: OpenVINO is not installed.
    """
    try:
        import openvino
    except ImportError as error:
        raise missing_extra("openvino", "openvino") from error
    core = openvino.Core()
    core.get_versions("CPU")  # loads it
    return core


@contextmanager
def refused_as_broken(path: Path) -> Iterator[None]:
    """Whatever OpenVINO complains of, as an error that names the file."""
    try:
        yield
    except RuntimeError as error:
        raise ExportedModelError(f"{path}: OpenVINO cannot read it: {first_line(error)}") from error


def told(model: Any) -> dict[str, str]:
    """The texts that an OpenVINO model carries for us."""
    if not model.has_rt_info([SECTION]):
        return {}
    return {key: str(value) for key, value in model.get_rt_info([SECTION]).value.items()}


class ProgramEngine(ExportedEngine):
    """A program of torch.export (`.pt2`), in torch, on the CPU, in fp32.

    torch runs code that such a file brings along, so open only what you or somebody you trust has made.

    Raises:
        ExportedModelError: a broken file, or one that vitascope did not write.
    """

    def __init__(self, path: Path) -> None:
        texts: dict[str, Any] = {"format": ""}  # torch fills no empty one
        try:
            program = torch.export.load(path, extra_files=texts)
        except Exception as error:
            raise ExportedModelError(f"{path}: torch cannot read it: {first_line(error)}") from error
        super().__init__(path, Metadata.from_texts(texts, path))
        self.module = program.module()

    @property
    def description(self) -> str:
        """`a torch.export program, fp32, on cpu`."""
        return "a torch.export program, fp32, on cpu"

    @torch.inference_mode()
    def run(self, pixels: Batch) -> tuple[Answers, Answers]:
        """Probabilities and logits of uint8 (B, H, W, C)."""
        probabilities, logits = self.module(torch.from_numpy(pixels))
        return probabilities.numpy(), logits.numpy()


def first_line(error: BaseException) -> str:
    """What an exception says, in one line: the first that is no heading to the next."""
    lines = (line for line in map(str.strip, str(error).splitlines()) if line and not line.endswith(":"))
    return next(lines, type(error).__name__)


def open_engine(
    ref: str | os.PathLike[str],
    *,
    revision: str | None = None,
    precision: str = "auto",
    device: str = "auto",
) -> Engine:
    """The engine of a MODEL argument, or of an exported file.

    Args:
        ref: a MODEL argument, an exported file (`.onnx`, `.xml`), or a folder with one.
        revision: of a hub id.
        precision: `auto`, `fp32` or `bf16`.
        device: `auto`, or a torch device; exported files run on the CPU.

    Raises:
        CheckpointError: as `from_pretrained`.
        UserError: as `TorchEngine`, or as `open_exported`.
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
    """The name of a MODEL argument: of a file or folder its own, without those above it; else a hub id."""
    text = os.fspath(ref)
    for path in (Path(os.path.expanduser(part)) for part in (text, text.partition(":")[2]) if part):
        if path.exists():
            return path.resolve().name
    return text
