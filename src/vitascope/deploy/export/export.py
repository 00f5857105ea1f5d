"""`export`: a model as one file for another runtime, compared with the model before it gets its name."""

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import torch
from jinja2 import Environment, StrictUndefined
from torch import Tensor

from vitascope.analysis.explain.lens import lens
from vitascope.analysis.explain.methods import heatmap
from vitascope.arguments import checked
from vitascope.data.splits import ImageSet
from vitascope.data.stored import as_pictures
from vitascope.deploy.export.formats import EXPLAIN, FORMATS, WholeModel, check_path, move_beside, traced
from vitascope.errors import UserError, check_choice
from vitascope.models.decoding import ImageSource
from vitascope.models.engines import runtimes
from vitascope.models.engines.compute import Views
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.heads import predicted, scores
from vitascope.models.preprocess import Preprocess
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.sizes import ModelConfig
from vitascope.models.trust import FAMILIAR, PredictionSets, Trust
from vitascope.models.views import mean_of_views, views_of
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.agreement import TOLERANCE, Agreement, Compared, agreement
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.storage import check_room, make_folder, temporary_folder
from vitascope.training.run.run import Run, load_with_run

Item = TypeVar("Item")

COMPARED = 32
"""Images of a run on which the file and the model are compared."""
TOLERANCES = {"tensors": TOLERANCE, "pictures": 1e-2}
"""The largest difference of outputs that counts as rounding, as a share of the largest one, by input mode.

Pixels that a resize rounds the other way make about 1e-4.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ExportResult:
    """The files of an exported model, and how its outputs agree with the model's."""

    files: list[Path]
    """The file to open, and those beside it: OpenVINO's weights, or those of an ONNX file above 2 GB."""
    model: VisionModel
    """The model that was exported, on the CPU in float32."""
    input: runtimes.InputMode
    """`pictures` or `tensors`."""
    dynamic_resolution: bool
    """Whether it takes tensors of other sizes too."""
    agreement: Agreement
    """The file in its own runtime against the model in torch."""
    compared_on: str
    """The pictures of `agreement`, in words."""
    features: bool = False
    """Whether the file returns features instead of probabilities."""
    explain: str | None = None
    """The method of the heatmap that it returns too."""
    views: int = 1
    """Views of a picture whose probabilities are averaged."""
    heatmaps: Agreement | None = None
    """Its heatmaps against the model's; None without."""

    @property
    def path(self) -> Path:
        """The file to open."""
        return self.files[0]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def takes(self) -> str:
        """The input in words."""
        preprocess = preprocess_of(self.model)
        if self.input == "pictures":
            return f"pictures of any size, uint8 (batch, height, width, {preprocess.channels})"
        height, width = ("height", "width") if self.dynamic_resolution else preprocess.image_size
        return f"tensors, uint8 (batch, {height}, {width}, {preprocess.channels})"

    @property
    def returns(self) -> str:
        """The output in words."""
        config = self.model.config
        heatmap = (
            ""
            if self.explain is None
            else f", and a heatmap by {self.explain}, float32 (batch, rows, columns)"
        )
        if self.features:
            return f"features, float32 (batch, {config.feature_dim}){heatmap}"
        independent = " of independent classes" * bool(config.decision_thresholds)
        trust = self.model.trust if self.views == 1 else None
        averaged = f" (the mean of {self.views} views)" * (self.views > 1)
        known = "" if trust is None or trust.familiarity is None else ", and familiarity, float32 (batch)"
        shape = f"float32 (batch, {config.num_classes})"
        return f"probabilities{independent}{averaged} and logits, {shape}{known}{heatmap}"

    @property
    def program(self) -> str:
        """A Python program that uses the file without vitascope."""
        preprocess, config = preprocess_of(self.model), self.model.config
        trust = self.model.trust if self.views == 1 else None
        options = {"features": self.features, "explains": self.explain is not None}
        return usage(self.path, preprocess, config, self.input, trust=trust, **options)

    def __repr__(self) -> str:
        return f"ExportResult({self.path}, {self.size / 1e6:,.1f} MB: {self.agreement.summary})"


@checked
def export(
    model: VisionModel | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    format: str = "onnx",
    input: runtimes.InputMode = "pictures",
    dynamic_resolution: bool = False,
    images: ImageSource | Iterable[ImageSource] | None = None,
    features: bool = False,
    explain: str | None = None,
    views: Views = 1,
) -> ExportResult:
    """Write a model as a file that takes raw pixels and returns probabilities, or features.

    The preprocessing becomes part of the graph. The file is written to a temporary folder, opened by its own
    runtime and compared with the model on real pictures; it gets its name only if all outputs agree.

    Args:
        model: a classifier, with `features` any model, or a MODEL reference.
        path: a new file with the format's suffix: `.onnx`, `.xml` or `.pt2`. By default
            `RUN/export/model.onnx` for a run, and else the model's name in the working directory; with
            `features` the name ends in `-features`.
        format: `onnx`, `openvino` or `torch`.
        input: `pictures` of any size, or `tensors` (uint8 as well) of the model's size.
        dynamic_resolution: with `tensors`, accept any height and width that patches tile.
        images: one picture or several to compare on; by default test images of the run, and without a run
            parts of scikit-learn's two photographs.
        features: return the features of `model.embed` instead of probabilities.
        explain: return a heatmap too, float32 (B, grid_h, grid_w), compared with ours as well: `attention` of
            the last layer, attention `rollout`, or the `lens` after it, the share of the predicted class.
        views: above 1, return the mean of the probabilities of as many views, see `Predictor`.

    Raises:
        CheckpointError: as `from_pretrained`.
        UserError: a model that cannot be exported, or not with its heatmaps, a file that exists, a runtime
            that is not installed, a picture that cannot be read, or outputs that differ.
    """
    check_choice("format", format, FORMATS)
    check_choice("input", input, runtimes.INPUT_MODES)
    if explain is not None:
        check_choice("explain", explain, EXPLAIN)
        if features and explain == "lens":
            raise UserError("the lens reads classes, which features leave out: omit one")
    if views > 1 and (features or explain is not None):
        asked = "features" if features else "explain"
        raise UserError(f"{asked} is of one view of a picture, and views={views} averages classes: omit one")
    if views == 6 and dynamic_resolution:
        raise UserError("the shifts of views=6 need a graph for each resolution: set views=2, or omit one")
    kind = FORMATS[format]
    suffix = "-features" * features + kind.suffix
    path = default_path(model, suffix) if path is None else Path(path)
    check_path(path, kind.suffix, *kind.beside)
    given = model
    model, run = load_with_run(given)
    if model is given:  # the caller's own stays on its device and in its precision
        model = copy.deepcopy(model)
    sources, compared_on = images_to_compare(images, lambda: own_tests(run))
    if dynamic_resolution:
        check_dynamic(model, input, format)
    preprocess = preprocess_of(model)
    module = WholeModel(
        model.eval().cpu().float(), preprocess, input, features=features, explain=explain, views=views
    ).eval()
    body_digest = TorchEngine(model, device="cpu").body_digest if features else ""
    trust = model.trust if views == 1 else None
    metadata = runtimes.metadata_of(model.config, preprocess, input, body_digest=body_digest, trust=trust)
    metadata |= {} if explain is None else {runtimes.HEATMAP: json.dumps(explain)}
    metadata |= {} if views == 1 else {runtimes.VIEWS: json.dumps(views)}
    decoded = [preprocess.whole_pixels(image) for image in sources]  # upright, in the model's colours
    pictures = [planes[0] if len(planes) == 1 else planes.transpose(1, 2, 0) for planes in decoded]
    make_folder(path.parent)
    check_room(path, 4 * model.config.num_parameters)
    with temporary_folder(path.parent) as aside:
        written = aside / path.name
        with explained_in_one_line(path.name, format, dynamic_resolution):
            kind.write(traced(module, preprocess, dynamic_resolution), written, metadata)
            engine = kind.open(written)
            found = compare_outputs(engine, model, preprocess, pictures)
            if dynamic_resolution:
                (height, width), (down, across) = preprocess.image_size, module.patch
                other = (height + 2 * down, width + across)
                elsewhere = compare_outputs(engine, model, preprocess.at_size(other), pictures[:4])
                check_agreement(elsewhere, f"{path.name}, at {other[0]}x{other[1]} pixels,")
            maps = None if explain is None else compare_heatmaps(engine, model, preprocess, pictures, explain)
        check_agreement(found, path.name)
        if maps is not None:
            check_agreement(maps, path.name)
        files = move_beside(aside, path)
    return ExportResult(
        files=files,
        model=model,
        input=input,
        dynamic_resolution=dynamic_resolution,
        agreement=found,
        compared_on=compared_on,
        features=features,
        explain=explain,
        views=views,
        heatmaps=maps,
    )


def default_path(model: VisionModel | str | os.PathLike[str], suffix: str) -> Path:
    """The path of an export without one: in the run folder, or in the working directory."""
    if not isinstance(model, str | os.PathLike):
        raise UserError("a model without a name needs a path to export it to")
    ref = Path(model)
    if Run(ref).exists:
        return ref / "export" / f"model{suffix}"
    return Path(ref.expanduser().resolve().name + suffix)


def own_tests(run: Run | None) -> ImageSet | None:
    """The test images of a run; None without a run, or if its data are gone."""
    with suppress(UserError):
        return None if run is None else run.test_images()
    return None


def images_to_compare(
    images: ImageSource | Iterable[ImageSource] | None, tests: Callable[[], ImageSet | None]
) -> tuple[Sequence[ImageSource], str]:
    """The pictures on which file and model are compared, and what they are in words."""
    if images is not None and (given := as_pictures(images)):
        return given, "the given pictures"
    if (found := tests()) and (own := evenly_spaced(found.sources)):
        return own, "the run's own test images"
    return sample_pictures(), "parts of scikit-learn's photographs"


def evenly_spaced(items: Sequence[Item], most: int = COMPARED) -> list[Item]:
    """At most `most` items, from all parts of a sequence."""
    count = min(len(items), most)
    return [items[place * len(items) // count] for place in range(count)]


def check_dynamic(model: VisionModel, input: runtimes.InputMode, format: str) -> None:
    """Reject models and formats whose graph holds for one resolution only."""
    if input == "pictures":
        raise UserError("pictures are resized to the model's own size; other resolutions need input=tensors")
    if format == "torch":
        raise UserError(
            "a program of torch.export has one resolution; the formats onnx and openvino support others"
        )
    config = model.config
    if (
        isinstance(config, ResNetConfig)
        or config.embedding.stem == "resnet"
        or config.block.attention != "global"
        or config.embedding.relative
    ):
        raise UserError("a ResNet, windows and relative positions need a graph for each resolution")
    if config.remainder == "cut":
        (height, width), (rows, columns) = config.image_hw, config.tiled_hw(config.image_hw)
        raise UserError(
            f"of images of {height}x{width} the model cuts all but {rows}x{columns}, and a graph of other "
            f"resolutions needs images that patches tile: model.resize(({rows}, {columns})) before the export"
        )


def check_agreement(found: Agreement, name: str) -> None:
    """Reject an exported model whose outputs differ from its model's."""
    if not found.is_rounding:
        raise UserError(
            f"{name} is not kept, because its outputs differ from the model's: {found.summary}; differences "
            f"of up to {found.tolerance * found.scale:.2g} are allowed"
        )


@torch.inference_mode()
def compare_outputs(
    engine: runtimes.ExportedEngine,
    model: VisionModel,
    preprocess: Preprocess,
    pictures: Sequence[ImageSource],
) -> Agreement:
    """Compare an exported model with the model in torch, picture by picture; the first also twice at once."""
    classifies = engine.num_classes > 0

    def own_outputs(images: Tensor) -> Tensor:
        if not classifies:
            return model.embed(images)
        return mean_of_views(model(views_of(images, engine.views)), engine.views, model.config.outputs)

    def outputs(given: Tensor) -> Tensor:
        return engine.answers(given)[0] if classifies else engine.outputs(given)

    own, other = [], []
    for images, given in inputs_of(engine, preprocess, pictures):
        own.append(own_outputs(images))  # (1, K) or (1, D)
        other.append(outputs(given))
        if len(own) == 1 and not torch.allclose(
            outputs(given.expand(2, -1, -1, -1)), other[0].expand(2, -1), atol=1e-4, rtol=1e-4
        ):
            raise UserError(
                f"{engine.path.name} is not kept, because a batch of two gets other outputs than one picture"
            )
    compared: Compared = "logits" if classifies else "features"
    return agreement(torch.cat(own), torch.cat(other), TOLERANCES[engine.input], compared)


@torch.inference_mode()
def compare_heatmaps(
    engine: runtimes.ExportedEngine,
    model: VisionModel,
    preprocess: Preprocess,
    pictures: Sequence[ImageSource],
    method: str,
) -> Agreement:
    """Compare the heatmaps of an exported model with those of `explain`, picture by picture."""
    inputs = list(inputs_of(engine, preprocess, pictures))
    own = torch.cat([heatmap_of(model, images, method) for images, _ in inputs])
    other = torch.cat([engine.heatmaps(given) for _, given in inputs])
    return agreement(own, other, TOLERANCES[engine.input], "heatmaps")


def heatmap_of(model: VisionModel, images: Tensor, method: str) -> Tensor:
    """The heatmap (B, gh, gw) in torch that a file has by one of `EXPLAIN`."""
    if method != "lens":
        return heatmap(model, images, method)
    found = lens(model, images)
    classes = predicted(found.logits[-1]).view(-1, 1, 1, 1).expand(*found.patches.shape[1:4], 1)
    return scores(found.patches[-1], model.config.outputs).gather(3, classes)[..., 0]


def inputs_of(
    engine: runtimes.ExportedEngine, preprocess: Preprocess, pictures: Sequence[ImageSource]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each picture as the model and as an exported file take it: floats (1, C, h, w), uint8 (1, C, H, W)."""
    for picture in pictures:
        ready = torch.from_numpy(preprocess.pixels(picture))[None]  # (1, C, h, w)
        whole = engine.input == "pictures"
        given = torch.from_numpy(preprocess.whole_pixels(picture))[None] if whole else ready
        yield preprocess.normalize(ready), given


def sample_pictures() -> list[ImageSource]:
    """The two photographs in scikit-learn and parts of them, 16 uint8 (H, W, C) of 8 sizes."""
    from sklearn.datasets import load_sample_images

    found: list[ImageSource] = []
    for photograph in load_sample_images().images:  # a temple and a flower, (427, 640, 3)
        H, W = photograph.shape[:2]
        quarters = [
            photograph[top : top + H // 2, left : left + W // 2]
            for top in (0, H // 2)
            for left in (0, W // 2)
        ]
        middle, strip = photograph[:, W // 4 : W // 4 + H], photograph[H // 3 : 2 * H // 3]
        small = photograph[H // 2 : H // 2 + 90, W // 3 : W // 3 + 120]  # below most models' input size
        found += [photograph, *quarters, middle, strip, small]
    return found


@contextmanager
def explained_in_one_line(name: str, format: str, dynamic_resolution: bool) -> Iterator[None]:
    """Turn whatever an exporter or a runtime raises into one line."""
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
        graph = "graph of dynamic resolution" if dynamic_resolution else "graph"
        way_out = "export without dynamic resolution, or try" if dynamic_resolution else "try"
        raise UserError(
            f"{name}: {format} has no {graph} for this model ({runtimes.first_line(reason)}); "
            f"{way_out} format {others}"
        ) from error


def usage(
    path: Path,
    preprocess: Preprocess,
    config: ModelConfig,
    input: runtimes.InputMode,
    *,
    features: bool = False,
    explains: bool = False,
    trust: Trust | None = None,
) -> str:
    """A program without vitascope that prints the class of `cat.jpg`, its classes if it has several, or the
    shape of its features; of a calibrated model also the set of classes, and whether it is unfamiliar. It
    reads pictures as `data.decoding` does."""
    several = bool(config.decision_thresholds)
    keys = [] if features else ["class_names"] * bool(config.class_names) + ["thresholds"] * several
    sets = {} if features or trust is None else runtimes.sets_of(trust)
    keys += ["sets"] * bool(sets)
    low, high = preprocess.levels or (0, '(65535 if picture.mode[0] == "I" else 1)')
    environment = Environment(undefined=StrictUndefined, trim_blocks=True)
    environment.filters["repr"] = repr
    template = environment.from_string(files(__package__).joinpath("program.jinja").read_text("utf-8"))
    return template.render(
        path=str(path),
        suffix=path.suffix,
        library={".onnx": "onnxruntime", ".xml": "openvino", ".pt2": "torch"}[path.suffix],
        keys=keys,
        preprocess=preprocess,
        levels=f"{low}, {high}",
        grey=preprocess.channels == 1,
        tensors=input == "tensors",
        config=config,
        features=features,
        explains=explains,
        sets=sets,
        checked=trust is not None and int(trust.sets.counts.sum()) >= PredictionSets.needed(FAMILIAR),
    )
