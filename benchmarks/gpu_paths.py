"""Run the GPU's paths without a GPU: training steps, predictions, features and heatmaps of fake tensors.

    python benchmarks/gpu_paths.py --out
    python benchmarks/gpu_paths.py --compile

The first command needs torch's CUDA build, a C compiler and no card. `pretended_cuda.c` takes the place of
the CUDA runtime and driver, with the properties of an H100, and computes nothing. Every tensor of the device
is a fake one, a shape, a dtype and a device without numbers: code that asks for the device takes the GPU's
branch, torch chooses the H100's kernels, and operands on two devices are an error. A tensor that arrives on
the CPU is full of zeros. A number that is read is 0, and a truth value true; in steps, predictions and
features it is an error, as everything else for which this process would wait.

Beside the driver, torch has three patches, because its own code knows fake tensors: `Module.to` keeps or
moves parameters (torch swaps fake ones), a storage's address is that of its description, and foreach
operations take fake tensors as they take real ones.

The prediction adds up the time of each operation in which the H100 multiplies (989 TFLOP/s in bf16, 67 in
fp32) or moves (3.35 TB/s) at the speed of its data sheet, whichever takes longer. The second command only
lists graph breaks and recompilations, which need no CUDA.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import ablation
import vitascope as vs
from conditions import Conditions
from gpu_parts import RESNET, STARTED, Sizes, noise, train, training
from graph_breaks import graph_breaks
from reports import command_line, markdown_table, note, publish
from vitascope.analysis.explain.methods import heatmap, methods_for
from vitascope.data.features.stream import FeatureStream
from vitascope.data.loading import Loader
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.features import OWN, FeatureSpec
from vitascope.models.vision_model import build
from vitascope.training.checkpoint.folders import load_checkpoint
from vitascope.training.loop import Trainer
from vitascope.training.options.recipes import BUILT_IN, RECIPES

GPU = torch.device("cuda", 0)
DRIVER = Path(__file__).with_name("pretended_cuda.c")
aten = torch.ops.aten

FLOPS = {torch.bfloat16: 989e12, torch.float16: 989e12}
"""Operations per second of an H100 SXM, dense; FLOPS_FP32 for other types."""
FLOPS_FP32, BYTES = 67e12, 3.35e12
SELECTING = {aten.index.Tensor, aten.gather.default, aten.index_select.default, aten.embedding.default}
"""Operations that read no more of their source than they return."""
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
ALLOCATING = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
}
READ: dict[Any, Callable[[Tensor], Any]] = {
    aten._local_scalar_dense.default: lambda tensor: number_of(tensor),
    aten.item.default: lambda tensor: number_of(tensor),
    aten.is_nonzero.default: lambda tensor: tensor.dtype == torch.bool,
    aten.nonzero.default: lambda tensor: tensor.new_empty((0, tensor.ndim), dtype=torch.int64),
}
"""Operations for whose result this process waits, and what they return here."""

SMALL, PHOTO = Sizes(batch=512, image=32), Sizes(batch=256, image=224)
PHOTOS = ("base", "paper-pretrain", "paper-pretrain-jft", "paper-pretrain-imagenet", "deit", "deit3", "plain")
"""Recipes that are for photographs, as `masked` and `mae` are."""
MORE: dict[str, dict[str, Any]] = {
    "small-data, fp16": {"precision": "fp16"},
    "small-data, streamed": {"crop_scale": 0.5},
    "small-data, kept once read": {},
    "deit, in 4 parts": {"accumulate": 4},
}
"""Steps beside those of the recipes; the recipe is the first word."""

NOTES = """\
"operations": of aten in one step or on one batch, without views; one of foreach starts a few kernels.
"casts": operations that only change the dtype, of tensors in the shape of a weight, and of others. "copies":
to the device and from it. "waits": copies that are not asynchronous, and numbers that are read. "attention":
the kernel that torch chose, forward. Steps, predictions and features with a wait fail; heatmaps check that
their numbers are finite, and a validation and a checkpoint end with numbers."""
PREDICTED = """\
Predicted and never measured. "bare products" is the time of the products alone at 989 TFLOP/s, "eager" that
with every operation reading and writing the memory at 3.35 TB/s, as without torch.compile. Neither has the
time to start a kernel, so that a step of many small operations takes longer than both."""


# The device


class FakeMode(FakeTensorMode):
    """Fake tensors beside a driver that has to stay untouched."""

    avoid_device_init = True


@dataclasses.dataclass
class Counts:
    """What was sent to the device."""

    operations: int = 0
    of_weights: int = 0
    """Casts of tensors in the shape of a weight, or of its gradient."""
    of_others: int = 0
    to_device: int = 0
    from_device: int = 0
    waits: list[str] = dataclasses.field(default_factory=list)
    attention: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    flops: float = 0.0
    moved: float = 0.0
    """Bytes between the device and its memory."""
    bare_seconds: float = 0.0
    """Of the products alone."""
    seconds: float = 0.0


class PretendedGPU(TorchDispatchMode):
    """Fake tensors on the device beside real ones on the CPU, and what is done with them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self.weights: set[torch.Size] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if operation is torch.ops.prim.device.default:
            return args[0].fake_device
        if operation in READ and on_gpu(args[0]):
            self.counts.waits.append(operation._overloadpacket.__name__)
            return READ[operation](args[0])
        with self:  # operations of inference tensors come here before they are taken apart
            parts = operation.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) or leaf == GPU for leaf in leaves if is_placed(leaf)):
            with unset_fake_temporarily():
                return operation(*args, **kwargs)
        if operation is aten.record_stream.default:
            return None
        if operation is aten._to_copy.default:
            source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
            late = kwargs.get("non_blocking", False)
            if source.device.type != target.type:
                self._copied(source, target, late)
            if target.type == "cpu":
                return zeros_of(source, kwargs.get("dtype"), pinned=late)
        if operation is aten.empty_like.default and torch.device(kwargs.get("device") or GPU).type == "cpu":
            return zeros_of(args[0], kwargs.get("dtype"), pinned=bool(kwargs.get("pin_memory")))
        if operation is aten.copy_.default and args[0].device.type != args[1].device.type:
            late = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._copied(args[1], args[0].device, late and (on_gpu(args[0]) or is_pinned(args[0])))
            if not on_gpu(args[0]):
                return args[0]
        if operation in INDEXING and any(isinstance(at, Tensor) and not on_gpu(at) for at in args[1]):
            self.counts.waits.append("indices on the CPU")
        result = operation(*args, **kwargs)
        if not operation.is_view and operation not in ALLOCATING:
            self._count(operation, args, kwargs, result)
        return result

    def _copied(self, source: Tensor, target: torch.device, late: bool) -> None:
        to_device = target.type == "cuda"
        self.counts.to_device += to_device
        self.counts.from_device += not to_device
        if not late or (to_device and not is_pinned(source)):
            self.counts.waits.append(f"copy {'to' if to_device else 'from'} the device")

    def _count(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        counts, packet = self.counts, operation._overloadpacket
        counts.operations += 1
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if on_gpu(leaf)]
        results = [leaf for leaf in pytree.tree_leaves(result) if on_gpu(leaf)]
        if operation is aten._to_copy.default and on_gpu(args[0]) and args[0].dtype != result.dtype:
            if args[0].shape in self.weights:
                counts.of_weights += 1
            else:
                counts.of_others += 1
        name = packet.__name__
        if "scaled_dot_product" in name and "backward" not in name:
            counts.attention[name.removeprefix("_scaled_dot_product_").removesuffix("_attention")] += 1
        flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        read = results if operation in SELECTING else tensors
        moved = sum(map(bytes_of, [*read, *results]))
        dtype = tensors[0].dtype if tensors else torch.float32
        bare = flops / FLOPS.get(dtype, FLOPS_FP32)
        counts.flops += flops
        counts.moved += moved
        counts.bare_seconds += bare
        counts.seconds += max(bare, moved / BYTES)


def zeros_of(tensor: Tensor, dtype: torch.dtype | None, *, pinned: bool) -> Tensor:
    """What arrives of a tensor in the memory of the CPU."""
    with unset_fake_temporarily():
        return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, pin_memory=pinned)


def number_of(tensor: Tensor) -> bool | int | float:
    """A number that is read: 0, or True, as of checks that everything is finite."""
    return True if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0


def is_placed(leaf: object) -> bool:
    """Whether an argument is a tensor or a device."""
    return isinstance(leaf, Tensor | torch.device)


def on_gpu(value: object) -> bool:
    """Whether a value is a tensor of the device."""
    return isinstance(value, FakeTensor) and value.fake_device.type == "cuda"


def is_pinned(tensor: Tensor) -> bool:
    """Whether a tensor of the CPU is in page-locked memory."""
    with unset_fake_temporarily():
        return tensor.is_pinned()


def bytes_of(tensor: Tensor) -> int:
    """The memory of a tensor, which an expanded one shares."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def keep_or_move(parameter: Tensor, moved: Tensor) -> None:
    """In place of torch's swap of fake parameters, which fails: as `Module.to` does with real ones."""
    if (parameter.device, parameter.dtype) != (moved.device, moved.dtype):
        parameter.data = moved.data


@contextlib.contextmanager
def pretended_gpu() -> Iterator[PretendedGPU]:
    """Within the context, the device `GPU` has fake tensors."""
    address = torch.UntypedStorage.data_ptr

    def address_of(storage: torch.UntypedStorage) -> int:
        return address(storage) if storage.device.type == "cpu" else storage._cdata

    foreach = [*_foreach_utils._foreach_supported_types, FakeTensor]
    with (
        mock.patch.object(torch.utils, "swap_tensors", keep_or_move),
        mock.patch.object(torch.UntypedStorage, "data_ptr", address_of),
        mock.patch.object(_foreach_utils, "_foreach_supported_types", foreach),
        FakeMode(allow_non_fake_inputs=True),
        PretendedGPU() as gpu,
    ):
        yield gpu


def start_with_driver() -> None:
    """Start this process again, with the pretended driver before torch's libraries.

    Raises:
        RuntimeError: torch has no CUDA, or the C compiler failed.
    """
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is built without CUDA: only --compile runs with it")
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        raise RuntimeError("no triton, which has the headers of CUDA")
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    folder = Path(tempfile.mkdtemp())
    library = folder / "libcuda.so.1"
    command = ["cc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers}"]
    subprocess.run([*command, "-o", str(library), str(DRIVER)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(folder)}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


# The paths


@dataclasses.dataclass(kw_only=True)
class Row:
    """A path, with what was counted in its second run."""

    path: str
    counts: Counts = dataclasses.field(default_factory=Counts)
    images: int = 0
    parts: int | None = None
    """Of a batch, as the run chose them for the memory of the device."""
    may_wait: bool = False
    failure: str = ""


Check = Callable[[PretendedGPU, Row], None]


def step_of(recipe: str, options: Mapping[str, Any], budget: int | None, gpu: PretendedGPU, row: Row) -> None:
    """The last step of a run, after its first."""
    photo = recipe in PHOTOS or RECIPES[recipe].task == "masked"
    sizes = PHOTO if photo else SMALL
    model = {"model": RESNET} if recipe == "cnn" else {}
    limit = {} if budget is None else {"memory_budget": budget}
    with (
        mock.patch.dict(Loader.__init__.__kwdefaults__ or {}, limit),
        training(GPU, sizes, recipe, batches=1, workers=0, **model, **options) as trainer,
    ):
        row.images, row.parts = trainer.batch_size, trainer.parts
        train(trainer, 1)
        trainer.step = trainer.schedule.total(trainer.step) - 1  # of images in their whole size
        gpu.weights = {parameter.shape for parameter in trainer.module.parameters()}
        gpu.counts = row.counts
        train(trainer, 1)
        row.failure = not_trained(trainer)


def not_trained(trainer: Trainer) -> str:
    """The reason why the step was not one of a GPU; empty if it was."""
    if trainer.precision == torch.float32:
        return "the precision is float32"
    elsewhere = [name for name, value in trainer.module.named_parameters() if not on_gpu(value)]
    return f"not on the device: {elsewhere[0]}" if elsewhere else ""


def validation(gpu: PretendedGPU, row: Row) -> None:
    """A validation, a checkpoint and its restoration."""
    with training(GPU, SMALL, "small-data", batches=2, workers=0) as trainer:
        train(trainer, 1)
        gpu.counts = row.counts
        trainer.task.validate(trainer.trained, trainer.val_loader, trainer.precision)
        trainer.save()
        trainer.checkpoint_writer.wait()
        with unset_fake_temporarily():  # torch reads nothing for fake tensors
            saved = load_checkpoint(trainer.run.path)
        trainer.restore(saved)
        train(trainer, 1)


def prediction(views: Literal[1, 2, 6], gpu: PretendedGPU, row: Row) -> None:
    predict = vs.Predictor(BUILT_IN, device=str(GPU), batch_size=row.images, views=views)
    pictures = list(noise(row.images, 32))
    predict(pictures)
    gpu.weights = {parameter.shape for parameter in vs.from_pretrained(BUILT_IN).parameters()}
    gpu.counts = row.counts
    predict(pictures)


def features(gpu: PretendedGPU, row: Row) -> None:
    engine = TorchEngine(vs.from_pretrained(BUILT_IN), device=str(GPU))
    compute = vs.Compute(batch_size=row.images, workers=0, cache=False)
    specs, pictures = [OWN, FeatureSpec(1, "mean")], list(noise(row.images, 32))
    list(FeatureStream(engine, specs, pictures, compute))
    gpu.counts = row.counts
    list(FeatureStream(engine, specs, pictures, compute))


def heat(kind: str, method: str, gpu: PretendedGPU, row: Row) -> None:
    """Of normalized pictures that are on the device already."""
    model = explained(kind).to(GPU)
    images = torch.zeros(row.images, 3, 32, 32, device=GPU)
    settings: dict[str, Any] = {"window": 8} if method == "occlusion" else {}
    gpu.weights = {parameter.shape for parameter in model.parameters()}
    heatmap(model, images, method, batch_size=64, **settings)
    gpu.counts = row.counts
    heatmap(model, images, method, batch_size=64, **settings)


def explained(kind: str) -> vs.VisionModel:
    """A ViT or a ResNet in evaluation mode."""
    return (vs.from_pretrained(BUILT_IN) if kind == "ViT" else vs.create_model(RESNET, num_classes=10)).eval()


def paths() -> Iterator[tuple[Row, Check]]:
    """Every row before its run."""
    for recipe in RECIPES:
        yield Row(path=recipe), functools.partial(step_of, recipe, {}, None)
    for name, options in MORE.items():
        budget = 0 if name.endswith(("streamed", "read")) else None
        # torch's scaler reads whether a gradient has overflowed.
        yield (
            Row(path=name, may_wait=name.endswith("fp16")),
            functools.partial(step_of, name.partition(",")[0], options, budget),
        )
    yield Row(path="validation, checkpoint, resumed step", images=512, may_wait=True), validation
    yield Row(path="Predictor", images=512), functools.partial(prediction, 1)
    yield Row(path="Predictor, 2 views", images=512), functools.partial(prediction, 2)
    yield Row(path="features of two layers", images=512), features
    for kind in ("ViT", "ResNet"):
        for method in methods_for(explained(kind)):
            yield (
                Row(path=f"{method}, {kind}", images=8, may_wait=True),
                functools.partial(heat, kind, method),
            )


def run_paths() -> list[Row]:
    """All rows; a failed one has its reason."""
    rows = []
    for row, path in paths():
        with pretended_gpu() as gpu:
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    path(gpu, row)
                if row.counts.waits and not row.may_wait:
                    row.failure = f"waits: {', '.join(sorted(set(row.counts.waits)))}"
            except Exception as error:  # noqa: BLE001 - the next path may tell more
                traceback.print_exc()
                row.failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        note(f"{row.path}: {row.failure or row.counts}")
        rows.append(row)
    return rows


def path_table(rows: list[Row]) -> str:
    header = ("path", "images", "parts", "operations", "casts of weights", "of others", "copies to", "from")
    cells = [
        (
            row.path,
            str(row.images),
            "-" if row.parts is None else str(row.parts),
            f"{row.counts.operations:,}",
            *map(str, (row.counts.of_weights, row.counts.of_others, row.counts.to_device)),
            str(row.counts.from_device),
            str(len(row.counts.waits)),
            ", ".join(f"{count} {name}" for name, count in row.counts.attention.items()) or "-",
            row.failure or "-",
        )
        for row in rows
    ]
    return markdown_table((*header, "waits", "attention", "failure"), cells)


def predicted_table(rows: list[Row]) -> str:
    header = ("step", "images", "TFLOP", "GB moved", "operations", "bare products, ms", "eager, ms")
    cells = [
        (
            row.path,
            str(row.images),
            f"{row.counts.flops / 1e12:.3g}",
            f"{row.counts.moved / 1e9:.3g}",
            f"{row.counts.operations:,}",
            f"{1e3 * row.counts.bare_seconds:.3g}",
            f"{1e3 * row.counts.seconds:.3g}",
            f"{row.images / row.counts.seconds:,.0f}",
        )
        for row in rows
        if row.path in RECIPES and not row.failure
    ]
    return markdown_table((*header, "eager, images/s"), cells)


# Compilation


def option_table() -> tuple[str, bool]:
    """The graph breaks of each change of the ablation's model in training, and whether there are any."""
    cells = []
    for change in ablation.CHANGES:
        model = build(change.model_config()).train()
        breaks = graph_breaks(model, torch.rand(2, model.config.in_channels, *model.config.image_hw))
        cells.append((change.name.replace("|", "/"), str(len(breaks)), "; ".join(breaks) or "-"))
    return markdown_table(("option", "graph breaks", "where"), cells), any(row[1] != "0" for row in cells)


def recompilations(recipe: str) -> tuple[str, str, str, str]:
    """Compile a short run: half of it with smaller images, odd last batches, validations."""
    sizes: list[tuple[int, ...]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        images = [tuple(value.shape) for value in inputs if value.ndim == 4 and not value.requires_grad]
        sizes.append(images[0] if images else ())
        return graph.forward

    tiny = {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 8}
    shape: dict[str, Any] = {} if recipe in STARTED else {"model": RESNET} if recipe == "cnn" else tiny
    shape |= {"decoder_dim": 32} if recipe == "mae" else {}
    shape |= {"compile": "on", "epochs": 2, "precision": "fp32", "workers": 0}
    shape |= {"progressive": 0.5} if RECIPES[recipe].task == "classify" else {}
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_module = functools.partialmethod(nn.Module.compile, backend=record)
    with (
        mock.patch.object(nn.Module, "compile", compile_module),
        training(torch.device("cpu"), Sizes(batch=6, image=32), recipe, batches=2.5, **shape) as trainer,
    ):
        trainer.fit()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    shapes = sorted({f"{size[0]} x {size[-1]} px" for size in sizes if size})
    again = len(sizes) - len(set(sizes))
    return recipe, ", ".join(shapes), str(breaks), str(again)


def recompilation_table() -> tuple[str, bool]:
    """Each recipe with its compiled sizes, and whether one has breaks or was compiled again."""
    with contextlib.redirect_stdout(sys.stderr):
        cells = [recompilations(recipe) for recipe in RECIPES]
    header = ("recipe", "compiled", "graph breaks", "compiled again")
    return markdown_table(header, cells), any(row[2:] != ("0", "0") for row in cells)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--compile", action="store_true", help="only graph breaks and recompilations")
    arguments: argparse.Namespace = parser.parse_args()
    if not arguments.compile and "libcuda" not in os.environ.get("LD_PRELOAD", ""):
        start_with_driver()
    sections = [Conditions.now().heading("The GPU's paths without a GPU")]
    failed = False
    if not arguments.compile:
        rows = run_paths()
        failed = any(row.failure for row in rows)
        sections += [NOTES, path_table(rows)]
        sections += ["## Predicted for an H100", PREDICTED, predicted_table(rows)]
    options, broken = option_table()
    recipes, again = recompilation_table()
    sections += ["## Graph breaks", options, "## Recompilations", recipes]
    publish("gpu_paths", "\n\n".join(sections), arguments)
    sys.exit(failed or broken or again)


if __name__ == "__main__":
    main()
