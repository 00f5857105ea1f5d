"""`Engine`: from pixels to probabilities, with a model in torch or an exported one in its own runtime.

`Predictor`, the server and every measurement work with an engine and know no runtime.
"""

import copy
import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.features import OWN, FeatureSpec, features_of
from vitascope.models.engines.transfer import is_asynchronous, to_device
from vitascope.models.hardware import images_per_batch, resolve_device, resolve_precision, without_tf32
from vitascope.models.heads import scores
from vitascope.models.options import Outputs
from vitascope.models.packed import predicting_copy
from vitascope.models.preprocess import Pixels, Preprocess
from vitascope.models.sizes import architecture_of
from vitascope.models.trust import CrossFamiliarity, Familiarity, PredictionSets
from vitascope.models.views import mean_of_views, views_of
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.preprocess import preprocess_of

_OPTIONS_OF_HEAD = {
    *("num_classes", "class_names", "outputs", "thresholds", "head", "projection", "init"),
    *("head_init", "dropout", "attention_dropout", "drop_path", "patch_dropout"),
}
"""Options that features do not depend on: those of the head and of training."""


class Answers(NamedTuple):
    """What a classifier computes for B images, float32 on the engine's device."""

    logits: Tensor
    """(B, K)."""
    probabilities: Tensor
    """(B, K)."""
    familiarity: Tensor | None = None
    """(B,), see `Familiarity`; None for a model that does not know it."""

    def known(self) -> list[Tensor]:
        """Those that the model knows."""
        return [tensor for tensor in self if tensor is not None]


class Engine(ABC):
    """Computes probabilities from pixels."""

    name = ""
    """Name of the model's file or folder, or its hub id; empty for a model that was not opened by a name."""
    description: str
    """The runtime, precision and device, for people: `torch, auto precision, on cpu`."""
    preprocess: Preprocess
    """From any picture to the model's pixels."""
    class_names: tuple[str, ...]
    """Names of the K classes; empty if they have none."""
    num_classes: int
    """K; 0 for a model without classes."""
    meaning: Outputs = "exclusive"
    """The meaning of the classes' outputs."""
    thresholds: tuple[float, ...] = ()
    """The probability from which on each of the K classes applies, where any may; empty where one does."""
    sets: PredictionSets | None = None
    """The sets of classes, where one applies; None for a model that was not calibrated."""
    familiar_images: int = 0
    """Validation images that tell what is familiar; 0 for a model that does not know it."""
    views: int = 1
    """Views of a picture whose probabilities are averaged, see `views_of`."""
    device = torch.device("cpu")
    """Where it computes."""
    own_pixels = False
    """Whether `pixels` differs from `preprocess.pixels`, which other processes can run too."""

    @functools.cached_property
    def architecture(self) -> str:
        """Its named size, or a phrase; empty if unknown."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name or self.architecture}: {self.description})"

    @property
    def reader(self) -> Callable[[ImageSource], Pixels]:
        """The function behind `pixels`. It can be pickled and needs no model: other processes can call it."""
        return self.preprocess.pixels

    @property
    def digest(self) -> str:
        """SHA-256 of the weights in hexadecimal, computed on first use; empty without weights."""
        return ""

    @property
    def body_digest(self) -> str:
        """SHA-256 of everything that features depend on but preprocessing and precision: of a model in torch
        its weights and options without the head, so that models that differ in it alone share features."""
        return self.digest

    def pixels(self, image: ImageSource) -> Pixels:
        """A picture as `probabilities` takes it, uint8 (C, H, W)."""
        return self.reader(image)

    @abstractmethod
    def answers(self, pixels: Tensor) -> Answers:
        """The answers for uint8 (B, C, H, W), on the engine's device.

        They are not copied to the CPU, because each copy waits for the accelerator.

        Raises:
            UserError: a model without classes.
        """

    def probabilities(self, pixels: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to probabilities (B, K), float32, on the CPU."""
        return self.answers(pixels).probabilities.cpu()

    def outputs(self, pixels: Tensor) -> Tensor:
        """Probabilities (B, K), or features (B, D) of a model without classes."""
        return self.probabilities(pixels)

    def precision_for(self, batch_size: int) -> str:
        """The precision of a batch of this size: `fp32`, `bf16`, or an exported model's own."""
        return self.description

    def batch_size(self, asked: int | None, on_cpu: int) -> int:
        """The number of images per batch: the one that is asked for, or one that suits the device."""
        return on_cpu if asked is None else asked

    def warm_up(self, batch_size: int) -> None:
        """Have a GPU classify black images, so that it loads what it needs; does not wait for it."""
        if is_asynchronous(self.device):
            shape = (batch_size, self.preprocess.channels, *self.preprocess.image_size)
            self.answers(torch.zeros(shape, dtype=torch.uint8, device=self.device))

    def resolved(self, spec: FeatureSpec) -> FeatureSpec:
        """A representation with its defaults filled in for this model.

        Raises:
            UserError: a model that does not have it; an exported classifier, which returns no features.
        """
        if self.num_classes:
            raise UserError(
                f"{self.name or 'this exported model'} returns probabilities and no features: give the model "
                "that it was exported from, or a file of `vitascope export --features`"
            )
        if not spec.is_own:
            raise UserError("an exported model has one representation: leave out layer and pool")
        return spec

    def features(
        self, pixels: Tensor, specs: Sequence[FeatureSpec] = (OWN,), *, batch_size: int | None = None
    ) -> list[Tensor]:
        """uint8 (B, C, H, W) to the representations `specs`, float32 (B, D) each, on the engine's device.

        `batch_size` is that of which this is the rest: its precision is used. Raises as `resolved`.
        """
        return [self.outputs(pixels) for _ in map(self.resolved, specs)]

    def features_of_pictures(
        self, pictures: Sequence[Pixels], specs: Sequence[FeatureSpec] = (OWN,)
    ) -> list[Tensor]:
        """As `features`, of at least one picture; pictures of one size share a batch."""
        batches = stacks(pictures)
        return in_order(batches, [self.features(stack, specs) for _, stack in batches])  # (B, D) each

    def check_classes(self) -> None:
        """Reject a model without classes."""
        if not self.num_classes:
            raise UserError(
                "this model has no head for classes: it returns features (`model.embed`), not classes"
            )

    def label(self, index: int) -> str:
        """A class's name, or its index as text."""
        return self.class_names[index] if self.class_names else str(index)

    def predict(self, pictures: Sequence[Pixels]) -> Answers:
        """The answers for at least one picture, on the CPU; those of one size share a batch."""
        batches = stacks(pictures)
        computed = in_order(batches, [self.answers(stack).known() for _, stack in batches])
        return Answers(*(column.cpu() for column in computed))


WHOLE_PICTURES = 32
"""The most pictures of their own size in memory at once: a photograph takes 36 MB."""


def in_order(
    batches: Sequence[tuple[list[int], Tensor]], columns: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """What was computed of each of the `stacks`, columns of (b, ...), for all pictures, in their order."""
    if len(batches) == 1:
        return list(columns[0])
    rows = torch.tensor([place for places, _ in batches for place in places]).argsort()
    return [torch.cat(column)[rows] for column in zip(*columns, strict=True)]


def stacks(pictures: Sequence[Pixels]) -> list[tuple[list[int], Tensor]]:
    """Batches of pictures that may differ in size: the places of those of one size, and their pixels."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for place, picture in enumerate(pictures):
        by_shape.setdefault(picture.shape, []).append(place)
    return [
        (places, torch.stack([torch.from_numpy(pictures[place]) for place in places]))  # (b, C, H, W)
        for places in by_shape.values()
    ]


class TorchEngine(Engine):
    """A model in torch; precision `auto` suits the hardware, the shape and the batch.

    A model without classes returns features and no probabilities. The engine keeps digests of the weights and
    copies in other precisions: a model whose weights have changed needs a new engine.

    The mean of several views has no sets of classes and no familiarity, which are calibrated on one.
    """

    def __init__(
        self, model: VisionModel, *, precision: str = "auto", device: str = "auto", views: int = 1
    ) -> None:
        gives_classes = model.config.gives_classes
        self.preprocess = preprocess_of(model)
        self.config = model.config
        self.class_names = model.config.class_names if gives_classes else ()
        self.num_classes = model.config.num_classes if gives_classes else 0
        self.meaning, self.thresholds = model.config.outputs, model.config.decision_thresholds
        self.precision, self.views = precision, views
        self.device = resolve_device(device)
        without_tf32(self.device)
        averaged = f", the mean of {views} views" if views > 1 else ""
        self.description = f"torch, {precision} precision, on {self.device}{averaged}"
        self.model = model.eval().to(self.device, torch.float32)
        self.familiarity: Familiarity | CrossFamiliarity | None = None
        if gives_classes and model.trust is not None and views == 1:
            self.sets = model.trust.sets
            if model.trust.familiarity is not None:
                self.familiarity = copy.deepcopy(model.trust.familiarity).to(self.device)
                self.familiar_images = int(self.sets.counts.sum())
        self._in_dtype: dict[torch.dtype, VisionModel] = {torch.float32: self.model}

    def with_model(self, model: VisionModel) -> Self:
        """The engine of another model of the same kind, on the same device, in float32."""
        other = copy.copy(self)
        other.model, other.precision, other._in_dtype = model, "fp32", {torch.float32: model}
        return other

    @functools.cached_property
    def architecture(self) -> str:
        """As `architecture_of`, which compares the model with every named size."""
        return architecture_of(self.config)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over name, shape and float32 bytes of the tensors, sorted by name: equal in any file."""
        return _digest(self.model)

    @functools.cached_property
    def body_digest(self) -> str:
        """SHA-256 of the options and weights below the head."""
        options = {
            name: value for name, value in self.config.to_dict().items() if name not in _OPTIONS_OF_HEAD
        }
        digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
        digest.update(_digest(self.model, without="head.").encode())
        return digest.hexdigest()

    def precision_for(self, batch_size: int) -> str:
        """`fp32` or `bf16`, by the hardware, the shape and the batch with precision `auto`."""
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}[self._dtype(batch_size)]

    def batch_size(self, asked: int | None, on_cpu: int) -> int:
        """As `Engine.batch_size`, by `images_per_batch`."""
        return images_per_batch(self.config, self.device, on_cpu) if asked is None else asked

    def resolved(self, spec: FeatureSpec) -> FeatureSpec:
        """As `FeatureSpec.resolved`."""
        return spec.resolved(self.config)

    @torch.inference_mode()
    def features(
        self, pixels: Tensor, specs: Sequence[FeatureSpec] = (OWN,), *, batch_size: int | None = None
    ) -> list[Tensor]:
        """As `Engine.features`, from one forward pass."""
        model, images = self._prepared(pixels, batch_size)
        return [features.float() for features in features_of(model, images, specs)]

    @torch.inference_mode()
    def answers(self, pixels: Tensor) -> Answers:
        """As `Engine.answers`."""
        self.check_classes()
        model, images = self._prepared(pixels)
        features = model.embed(views_of(images, self.views))  # (V B, D)
        logits = mean_of_views(model.head(features).float(), self.views, self.meaning)
        familiarity = None if self.familiarity is None else self.familiarity(features.float())
        return Answers(logits, scores(logits, self.meaning), familiarity)

    def outputs(self, pixels: Tensor) -> Tensor:
        """Probabilities (B, K), or features (B, D) of a model without classes."""
        return self.probabilities(pixels) if self.num_classes else self.embed(pixels)

    def embed(self, pixels: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to the pooled representation (B, D), float32, on the CPU."""
        return self.features(pixels)[0].cpu()

    def _dtype(self, batch_size: int) -> torch.dtype:
        return resolve_precision(self.precision, self.config, self.device, batch_size, training=False)

    def _prepared(self, pixels: Tensor, batch_size: int | None = None) -> tuple[VisionModel, Tensor]:
        """The model in the precision for this batch or `batch_size`, and the batch, normalized, in it too."""
        dtype = self._dtype(len(pixels) if batch_size is None else batch_size)
        if dtype not in self._in_dtype:  # a copy in another precision is made once and kept
            self._in_dtype[dtype] = predicting_copy(self.model, dtype)
        return self._in_dtype[dtype], self.preprocess.normalize(to_device(pixels, self.device)).to(dtype)


def _digest(model: VisionModel, without: str | None = None) -> str:
    """SHA-256 in hexadecimal of a model's tensors, except those whose names begin with `without`."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if without is None or not name.startswith(without):
            digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()
