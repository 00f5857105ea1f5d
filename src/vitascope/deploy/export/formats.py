"""`WholeModel`, the exported graph from raw pixels to the outputs, and the formats it is written in."""

import dataclasses
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitascope.analysis.explain.attention import AttentionStream, attending, to_heatmap
from vitascope.analysis.explain.heatmaps import to_unit
from vitascope.analysis.explain.lens import read_patches
from vitascope.analysis.explain.methods import METHODS
from vitascope.analysis.explain.rollout import next_flow
from vitascope.data.rows.cells import check_absent
from vitascope.deploy.export.resampling import Resize
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.engines import runtimes
from vitascope.models.ensemble import Ensemble
from vitascope.models.heads import predicted, scores
from vitascope.models.preprocess import Preprocess
from vitascope.models.views import mean_of_views, views_of
from vitascope.models.vision_model import VisionModel
from vitascope.storage import flush

OPSET = 20
"""Of ONNX: the first with GELU as one operation; ONNX Runtime reads it since 1.17."""
TALKATIVE = ("torch.onnx", "torch.__trace", "onnxscript", "onnx_ir", "nncf")
"""Loggers of exporters and quantizers."""


class WholeModel(nn.Module):
    """uint8 (B, H, W, C), as NumPy has pictures, to probabilities and logits, both (B, K) float32, and of a
    calibrated model the familiarity, (B,).

    With `views` above 1, the probabilities are the mean of those of as many views, see `views_of`.
    With `features` to `model.embed`, (B, D) float32, instead. With `explain`, the last output is the heatmap
    of that method, (B, grid_h, grid_w) float32.
    Pictures have any size, and the graph crops and resizes them; tensors have the model's size.
    """

    pixel_mean: Tensor  # ONNX has one namespace, and exporters name intermediate values `mean`
    pixel_std: Tensor

    def __init__(
        self,
        model: VisionModel,
        preprocess: Preprocess,
        input: runtimes.InputMode,
        *,
        features: bool = False,
        explain: str | None = None,
        views: int = 1,
    ) -> None:
        super().__init__()
        if not features and not model.config.gives_classes:
            raise UserError("this model has no head for classes; its features can be exported: set features")
        config = model.config
        self.input, self.features, self.explain, self.views = input, features, explain, views
        self.model = model
        self.patch = config.patch_stride if isinstance(config, ViTConfig) else (1, 1)
        """Pixels from one patch to the next, down and across: the steps in which the input size may grow."""
        self.resize: nn.Module = Resize(preprocess) if input == "pictures" else nn.Identity()
        for name, numbers in (("pixel_mean", preprocess.mean), ("pixel_std", preprocess.std)):
            self.register_buffer(name, torch.tensor(numbers).view(-1, 1, 1), persistent=False)
        trust = None if features or views > 1 else model.trust
        self.familiarity = None if trust is None else trust.familiarity

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Crop, resize, normalize, classify or embed."""
        pictures = pixels.permute(0, 3, 1, 2).float()  # (B, C, H, W), in [0, 255]
        images = (self.resize(pictures) / 255 - self.pixel_mean) / self.pixel_std
        heatmap: list[Tensor] = []
        if self.explain is None:
            features = self.model.embed(views_of(images, self.views))  # (V B, D)
        else:
            features, *heatmap = embed_and_explain(self.model, images, self.explain)
        if self.features:
            return (features, *heatmap)
        logits = mean_of_views(self.model.head(features), self.views, self.model.config.outputs)  # (B, K)
        answers = scores(logits, self.model.config.outputs), logits
        known = () if self.familiarity is None else (self.familiarity(features),)
        return *answers, *known, *heatmap


EXPLAIN = (*(name for name, method in METHODS.items() if not method.has_target), "lens")
"""The heatmaps that a graph can hold: of one pass, without a gradient."""


def embed_and_explain(model: VisionModel, images: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """`model.embed` of images (B, C, H, W), and a heatmap (B, gh, gw) from the same pass.

    By `explain.attention` or `explain.rollout`, or the share of the predicted class by `explain.lens`, after
    the last layer. Of an ensemble, the mean of its members' maps, as in `explain.heatmap`.
    """
    if isinstance(model, Ensemble):
        if method == "lens":
            raise UserError("the lens reads the class of one model, and this is an ensemble: use rollout")
        parts = [embed_and_explain(member, images, method) for member in model.members]
        pooled, maps = zip(*parts, strict=True)
        return torch.cat(pooled, dim=1), to_unit(torch.stack(maps).mean(dim=0))
    model = attending(model)
    if method == "lens":
        tokens = model.forward_features(images)
        features = model.pool_features(tokens)
        classes = predicted(model.head(features))  # (B,)
        shares = scores(read_patches(model, tokens), model.config.outputs)  # (B, N, K)
        chosen = shares.gather(2, classes.view(-1, 1, 1).expand(-1, shares.shape[1], 1))
        return features, chosen[..., 0].unflatten(1, model.grid_of(images))
    flow: Tensor | None = None  # (B, Q, T)

    def add_layer(weights: Tensor) -> None:  # (B, heads, Q, T)
        nonlocal flow
        fused = weights.float().mean(dim=1)
        flow = next_flow(flow, fused) if method == "rollout" else fused

    tokens = model.forward_features(images, AttentionStream(add_layer), model.pool.queries)
    assert flow is not None
    return model.pool_features(tokens), to_heatmap(model, images, flow)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A file format."""

    suffix: str
    beside: tuple[str, ...] = ()
    """Suffixes of the files that may lie beside such a file and belong to it."""
    write: Callable[[ExportedProgram, Path, Mapping[str, str]], None]
    """Writes a traced `WholeModel` with its metadata."""
    open: Callable[[Path], runtimes.ExportedEngine]
    """Opens a file in its runtime, as exactly as that can compute."""


@contextmanager
def silenced() -> Iterator[None]:
    """Silence exporters except for errors; then restore the process's logging, warnings and telemetry."""
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in (root, *loggers)]
    filters, handlers = [*root.filters], [*root.handlers]
    ci = os.environ.get("CI")
    os.environ["CI"] = "true"  # without it OpenVINO's converter and NNCF report their use
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip((root, *loggers), levels, strict=True):
            logger.setLevel(level)  # OpenVINO's converter does not restore the root's when it fails
        root.filters[:], root.handlers[:] = filters, handlers
        if ci is None:
            del os.environ["CI"]
        else:
            os.environ["CI"] = ci


def check_path(path: Path, suffix: str, *beside: str) -> None:
    """Reject another suffix, and what exists; files of the suffixes `beside` belong to the new one."""
    if path.suffix != suffix:
        raise UserError(f"{path}: files of this format end in {suffix}: {path.with_suffix(suffix)}")
    check_absent(*(path.with_suffix(each) for each in (suffix, *beside)))


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
        program = torch.export.export(
            module, (example,), dynamic_shapes={runtimes.INPUT: sizes}, strict=False
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names folders of this machine
    return program


def write_onnx(program: ExportedProgram, path: Path, metadata: Mapping[str, str]) -> None:
    """Write an ONNX file; above 2 GB, the limit of one file, with its weights beside it."""
    with runtimes.importing("onnx", "onnxscript"):
        import onnxscript  # noqa: F401 - torch's exporter needs it
    # torch's exporter decomposes attention with a bias into matrix products, whose result has other strides,
    # after it has decided that the result can be flattened without a copy. So copy before flattening.
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
    with silenced():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[runtimes.INPUT],
            output_names=list(runtimes.outputs_of(metadata)),
            opset_version=OPSET,
            verbose=False,
        )
        if exported is None:
            raise RuntimeError("torch's exporter returned no program")
        exported.model.metadata_props.update(metadata)
        for node in exported.model.graph.all_nodes():
            node.metadata_props.clear()  # it names folders of this machine
        exported.save(str(path))


def write_openvino(program: ExportedProgram, path: Path, metadata: Mapping[str, str]) -> None:
    """Write an OpenVINO file and its weights, in float32."""
    with runtimes.importing("openvino", "openvino"):
        import openvino
        from openvino.frontend import OpConversionFailure
    try:
        with silenced():
            model = openvino.convert_model(program)
    except OpConversionFailure as error:
        raise RuntimeError(str(error).split("-- ")[-1].strip()) from None  # the operation that it lacks
    sizes = next(node.meta["val"].shape for node in program.graph.nodes if node.name == runtimes.INPUT)
    model.reshape([side if isinstance(side, int) else -1 for side in sizes])
    for port, name in zip(
        [*model.inputs, *model.outputs], (runtimes.INPUT, *runtimes.outputs_of(metadata)), strict=True
    ):
        port.get_tensor().set_names({name})
    for key, text in metadata.items():
        model.set_rt_info(text, [runtimes.SECTION, key])
    openvino.save_model(model, path, compress_to_fp16=False)


FORMATS = {
    "onnx": Format(suffix=".onnx", beside=(".onnx.data",), write=write_onnx, open=runtimes.OnnxEngine),
    "openvino": Format(
        suffix=".xml",
        beside=(".bin",),
        write=write_openvino,
        open=functools.partial(runtimes.OpenVinoEngine, precision="fp32"),
    ),
    "torch": Format(
        suffix=".pt2",
        write=lambda program, path, metadata: torch.export.save(program, path, extra_files=dict(metadata)),
        open=runtimes.ProgramEngine,
    ),
}
"""By name."""
