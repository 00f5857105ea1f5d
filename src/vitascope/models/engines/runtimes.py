"""Exported models in ONNX Runtime, OpenVINO and torch.export, and `open_engine`, which opens any model."""

import functools
import hashlib
import json
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope._version import __version__
from vitascope.arguments import check_value
from vitascope.errors import UserError, check_choice
from vitascope.layout import EXPORTED_SUFFIXES
from vitascope.models.config import ViTConfig
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.engine import Answers, Engine, TorchEngine
from vitascope.models.hardware import PRECISIONS
from vitascope.models.options import Outputs as Meaning
from vitascope.models.preprocess import Pixels, Preprocess
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.sizes import ModelConfig, architecture_of
from vitascope.models.trust import COVERAGE, FAMILIAR, PredictionSets, Trust
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.hub import CONFIG
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.stored_model import local_model
from vitascope.remote import url_name

InputMode = Literal["pictures", "tensors"]
INPUT_MODES = ("pictures", "tensors")
INPUT = "pixels"  # names in the graph
OUTPUTS_OF_CLASSIFIER, OUTPUTS_OF_BODY = ("probabilities", "logits", "familiarity"), ("features",)
HEATMAP = "heatmap"  # an output and a key of the metadata, of files that explain
VIEWS = "views"  # a key of the metadata, of files that average views
FORMAT_VERSION = 1
KEYS: dict[str, Any] = {
    "format": int,
    "preprocess": Mapping,
    "class_names": tuple[str, ...],
    "num_classes": int,
    "outputs": Meaning,
    "thresholds": tuple[float, ...],
    "sets": Mapping,
    "input": InputMode,
    "model": Mapping,
    "precision": str,
    "body_digest": str,
    "vitascope": str,
}
"""Of the metadata, with their types."""
SECTION = "vitascope"  # of OpenVINO's `rt_info`, for all keys; ONNX has them in its metadata

Batch = npt.NDArray[np.uint8]  # (B, H, W, C)
Outputs = npt.NDArray[np.float32]  # (B, K), or features (B, D)


class ExportedModelError(UserError):
    """An exported model that cannot be used; the message names the file."""


def metadata_of(
    config: ModelConfig,
    preprocess: Preprocess,
    input: InputMode,
    *,
    body_digest: str = "",
    trust: Trust | None = None,
) -> dict[str, str]:
    """The metadata of an exported model, each value as JSON in ASCII, which every format can hold.

    Of a calibrated model, `sets` are its `PredictionSets` with the limits at the default rates.
    A file that returns features has the `body_digest` of its model's engine, and no classes.
    """
    values = {
        "preprocess": preprocess.to_dict(),
        "class_names": config.class_names,
        "num_classes": config.num_classes,
        "outputs": config.outputs,
        "thresholds": config.decision_thresholds,
        "sets": {} if trust is None else sets_of(trust),
        "input": input,
        "model": config.to_dict(),
        "precision": "fp32",
        "vitascope": __version__,
        "format": FORMAT_VERSION,
        "body_digest": "",
    }
    if body_digest:
        no_classes = {"class_names": (), "num_classes": 0, "thresholds": (), "sets": {}}
        values |= {**no_classes, "outputs": "embedding", "body_digest": body_digest}
    return {key: json.dumps(value) for key, value in values.items()}


def read_metadata(texts: Mapping[str, str], path: Path) -> dict[str, Any]:
    """The inverse of `metadata_of`; unknown keys are ignored."""
    missing = [key for key in KEYS if key not in texts]
    if missing:
        raise ExportedModelError(
            f"{path}: not written by this `vitascope export`, as it lacks {', '.join(missing)}; export the "
            "model again"
        )
    try:
        values = {key: json.loads(texts[key]) for key in KEYS} | {"views": json.loads(texts.get(VIEWS, "1"))}
        if values["format"] != FORMAT_VERSION:
            raise UserError(
                f"this vitascope reads format {FORMAT_VERSION}, not format {values['format']}; the file was "
                f"written by vitascope {values['vitascope']}"
            )
        for key, kind in {**KEYS, VIEWS: int}.items():
            check_value(key, values[key], kind)
        values["preprocess"] = Preprocess.from_dict(values["preprocess"])
        names, thresholds = tuple(values["class_names"]), tuple(map(float, values["thresholds"]))
        sets = PredictionSets.of_json(values["sets"]) if values["sets"] else None
        if sets is not None:
            sets.check(values["num_classes"])
        values |= {"class_names": names, "thresholds": thresholds, "sets": sets}
        count, outputs, digest = (values[key] for key in ("num_classes", "outputs", "body_digest"))
        of_body = outputs == "embedding"
        fits = (count == 0) == of_body == bool(digest) and len(names) in (0, max(count, 0))
        expected = count if outputs == "independent" else 0
        if (
            not fits
            or len(thresholds) != expected
            or not all(0 <= threshold <= 1 for threshold in thresholds)
        ):
            raise UserError(
                f"{len(names)} class_names, thresholds {list(thresholds)} and body_digest {digest!r} for "
                f"num_classes {count} of {outputs} outputs"
            )
    except (ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:
        raise ExportedModelError(f"{path}: broken metadata: {error}") from error
    return values


def outputs_of(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the graph's outputs; the last may be a heatmap, by the method in the metadata."""
    heatmap = (HEATMAP,) * (HEATMAP in metadata)
    if not json.loads(metadata["num_classes"]):
        return OUTPUTS_OF_BODY + heatmap
    knows = "familiar" in json.loads(metadata["sets"])
    return (OUTPUTS_OF_CLASSIFIER if knows else OUTPUTS_OF_CLASSIFIER[:2]) + heatmap


def sets_of(trust: Trust) -> dict[str, Any]:
    """What a program needs to judge an answer, as values of JSON: the limit of a class's set, one or of each
    class, and the least familiarity, as far as the validation images could tell."""
    limits = trust.sets.limits(COVERAGE)
    values = trust.sets.to_json()
    values |= {} if limits is None else {"coverage": COVERAGE, "limit": limits.tolist()}
    return values | ({} if trust.familiarity is None else {"familiar": round(1 - FAMILIAR, 6)})


class ExportedEngine(Engine):
    """An exported model in its own runtime: a classifier, or a body that returns features."""

    def __init__(self, path: Path, texts: Mapping[str, str]) -> None:
        values = read_metadata(texts, path)
        self.path = path
        self.metadata = dict(texts)
        self.preprocess = values["preprocess"]
        self.class_names = values["class_names"]
        self.num_classes = values["num_classes"]
        self.meaning, self.thresholds, self.sets = (values[key] for key in ("outputs", "thresholds", "sets"))
        self.output_names = outputs_of(texts)
        if self.sets is not None and "familiarity" in self.output_names:
            self.familiar_images = int(self.sets.counts.sum())
        self.views = values["views"]
        self._body_digest: str = values["body_digest"]
        if options := values["model"]:
            kind = ResNetConfig if "layers" in options else ViTConfig
            with suppress(UserError):  # options of a later version
                self.architecture = architecture_of(kind.from_dict(options))
        self.input: InputMode = values["input"]
        self.stored_precision = str(values["precision"])
        self.own_pixels = self.input == "pictures" and not self.preprocess.keeps_own_size

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the file, and of the weights beside it if the format has them there."""
        digest = hashlib.sha256()
        for path in files_of(self.path):
            with open(path, "rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
        return digest.hexdigest()

    @property
    def body_digest(self) -> str:
        """That of the model whose features the file returns, equal to them but for rounding; of a classifier
        the digest of the file."""
        return self._body_digest or self.digest

    @abstractmethod
    def run(self, pixels: Batch) -> Sequence[Outputs]:
        """The outputs `output_names` of uint8 (B, H, W, C)."""

    def answers(self, pixels: Tensor) -> Answers:
        """As `Engine.answers`."""
        self.check_classes()
        outputs = dict(zip(self.output_names, self._run(pixels), strict=True))
        outputs.pop(HEATMAP, None)
        return Answers(**outputs)

    def heatmaps(self, pixels: Tensor) -> Tensor:
        """The heatmaps (B, grid_h, grid_w) of uint8 (B, C, H, W), of a file of `export --explain`."""
        if HEATMAP not in self.output_names:
            raise UserError(f"{self.path} returns no heatmaps: export it with explain")
        return self._run(pixels)[-1]

    def outputs(self, pixels: Tensor) -> Tensor:
        """Probabilities (B, K), or features (B, D) of a model without classes."""
        return self._run(pixels)[0]

    def _run(self, pixels: Tensor) -> list[Tensor]:
        outputs = self.run(np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy()))
        return [torch.from_numpy(output) for output in outputs]

    @property
    def reader(self) -> Callable[[ImageSource], Pixels]:
        """Returns pixels of the model's size, which can share a batch, unless the graph would crop them."""
        return self.preprocess.whole_pixels if self.own_pixels else self.preprocess.pixels


def files_of(path: Path) -> list[Path]:
    """An exported model's file, and the file of weights beside it if there is one."""
    beside = {".xml": path.with_suffix(".bin"), ".onnx": path.with_suffix(".onnx.data")}.get(path.suffix)
    return [path] if beside is None or not beside.exists() else [path, beside]


@contextmanager
def importing(extra: str, libraries: str) -> Iterator[None]:
    """Name the extra to install if a library is missing."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"this needs {libraries}: pip install 'vitascope[{extra}]'") from error


@contextmanager
def rejecting_broken(path: Path, runtime: str) -> Iterator[None]:
    """Turn whatever a runtime raises when it opens a file into one line that names the file."""
    try:
        yield
    except Exception as error:
        raise ExportedModelError(f"{path}: {runtime} cannot read it: {first_line(error)}") from error


class OnnxEngine(ExportedEngine):
    """An ONNX file in ONNX Runtime, on the CPU, with as many threads as torch uses."""

    def __init__(self, path: Path, *, precision: str = "auto") -> None:
        with importing("onnx", "onnxruntime"):
            import onnxruntime
        check_choice("precision", precision, PRECISIONS)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4  # its errors are raised as exceptions too
        with rejecting_broken(path, "ONNX Runtime"):
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        super().__init__(path, self.session.get_modelmeta().custom_metadata_map)
        if precision not in ("auto", self.stored_precision):
            raise UserError(f"{path} computes in {self.stored_precision}; it does not support {precision}")
        self.description = f"ONNX Runtime, {self.stored_precision}, on cpu"

    def run(self, pixels: Batch) -> Sequence[Outputs]:
        """The outputs `output_names` of uint8 (B, H, W, C)."""
        outputs: list[Outputs] = self.session.run(list(self.output_names), {INPUT: pixels})
        return outputs


class OpenVinoEngine(ExportedEngine):
    """An OpenVINO file (`.xml` with its `.bin`), on the CPU, with as many threads as torch uses.

    With precision `auto` the runtime chooses, bf16 if the CPU supports it. It is too coarse for a resize, so
    `pictures` come in the model's size, or the file computes in fp32 if it has to crop them itself.
    """

    def __init__(self, path: Path, *, precision: str = "auto") -> None:
        core = openvino_core()
        check_choice("precision", precision, PRECISIONS)
        texts = {}
        with rejecting_broken(path, "OpenVINO"):
            model = core.read_model(path)
            if model.has_rt_info([SECTION]):
                texts = {key: str(value) for key, value in model.get_rt_info([SECTION]).value.items()}
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
        with rejecting_broken(path, "OpenVINO"):
            if self.input == "pictures" and self.precision != "fp32":
                model.reshape([-1, *self.preprocess.image_size, self.preprocess.channels])
            self.compiled = core.compile_model(model, "CPU", hints)
        self.description = f"OpenVINO, {self.precision} precision, on cpu"
        self._requests = threading.local()

    def run(self, pixels: Batch) -> Sequence[Outputs]:
        """The outputs `output_names` of uint8 (B, H, W, C)."""
        request = getattr(self._requests, "one", None)
        if request is None:  # one per thread: creating it takes longer than running a small model
            request = self._requests.one = self.compiled.create_infer_request()
        outputs = request.infer({INPUT: pixels}, share_inputs=True)
        return [outputs[name] for name in self.output_names]


@functools.cache
def openvino_core() -> Any:
    """OpenVINO's core, one per process, with its CPU plugin loaded for good."""
    with importing("openvino", "openvino"):
        import openvino
    core = openvino.Core()
    # Loads the plugin, which replaces the thread's signal stack and, when unloaded, restores the former one.
    # Plugins that are not unloaded in reverse order leave a freed stack, and Ctrl-C then kills the process.
    core.get_versions("CPU")
    return core


class ProgramEngine(ExportedEngine):
    """A program of torch.export (`.pt2`), in torch, on the CPU, in fp32.

    torch runs code from such a file, so open only files that you trust.
    """

    description = "a torch.export program, fp32, on cpu"

    def __init__(self, path: Path) -> None:
        texts: dict[str, Any] = {"format": ""}  # torch fills no empty dict
        with rejecting_broken(path, "torch"):
            program = torch.export.load(path, extra_files=texts)
        super().__init__(path, texts)
        self.module = program.module()

    @torch.inference_mode()
    def run(self, pixels: Batch) -> Sequence[Outputs]:
        """The outputs `output_names` of uint8 (B, H, W, C)."""
        return [output.numpy() for output in self.module(torch.from_numpy(pixels))]


def first_line(error: BaseException) -> str:
    """The first line of an exception's message that is not a heading."""
    lines = (line for line in map(str.strip, str(error).splitlines()) if line and not line.endswith(":"))
    return next(lines, type(error).__name__)


def open_engine(
    ref: str | os.PathLike[str],
    *,
    revision: str | None = None,
    precision: str = "auto",
    device: str = "auto",
    views: int = 1,
) -> Engine:
    """Open a MODEL reference, an exported model, or a folder with one; `revision` is that of a hub id."""
    asked, ref = ref, local_model(ref)
    file = exported_file_at(ref)
    engine: Engine
    if file is not None:
        if views > 1:
            raise UserError(f"{file}: the views of an exported model are part of it: export it with --views")
        engine = open_exported(file, precision=precision, device=device)
    else:
        model = from_pretrained(ref, revision)
        engine = TorchEngine(model, precision=precision, device=device, views=views)
    engine.name = name_of(asked)
    return engine


def as_engine(
    model: Engine | VisionModel | str | os.PathLike[str],
    *,
    precision: str = "auto",
    device: str = "auto",
    views: int = 1,
) -> Engine:
    """The engine of anything that a MODEL argument of the library may be; an engine stays as it is.

    Raises:
        UserError: a precision, device or views for an engine, which has its own; as `open_engine`.
    """
    if isinstance(model, str | os.PathLike):
        return open_engine(model, precision=precision, device=device, views=views)
    if not isinstance(model, Engine):
        return TorchEngine(model, precision=precision, device=device, views=views)
    if (precision, device, views) != ("auto", "auto", 1):
        raise UserError("an engine has its own precision, device and views: omit these, or give the model")
    return model


def name_of(ref: str | os.PathLike[str]) -> str:
    """The name of a file or folder, without those above it, also of one in a store, or a hub id."""
    text = os.fspath(ref)
    if name := url_name(text):
        return name
    for path in (Path(os.path.expanduser(part)) for part in (text, text.partition(":")[2]) if part):
        if path.exists():
            return path.resolve().name
    return text


def exported_file_at(ref: str | os.PathLike[str]) -> Path | None:
    """The exported model that a MODEL reference means: the file, or the only one in a folder; else None."""
    path = Path(os.path.expanduser(ref))
    if os.path.isfile(path):  # False, not an error, for a path that is too long
        return path if path.suffix in EXPORTED_SUFFIXES else None
    if not os.path.isdir(path) or (path / CONFIG).exists():  # a model folder, whatever else it contains
        return None
    files = sorted(file for file in path.iterdir() if file.suffix in EXPORTED_SUFFIXES)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ExportedModelError(f"{path}: {len(files)} exported models, {names}; name one of them")
    return files[0] if files else None


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
        "was exported from or, if you trust it, vitascope.models.engines.runtimes.ProgramEngine in Python"
    )
