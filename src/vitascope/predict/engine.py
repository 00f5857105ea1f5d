"""`Engine`: from pixels to probabilities, with a model in torch or an exported one in its own runtime.

`Predictor`, the server and every measurement work with an engine and know no runtime.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from vitascope.data.decoding import ImageError, ImageSource
from vitascope.data.preprocess import Pixels, Preprocess
from vitascope.errors import UserError
from vitascope.model.hardware import resolve_device, resolve_precision
from vitascope.model.heads import scores
from vitascope.model.options import EVEN, Outputs
from vitascope.model.packed import predicting_copy
from vitascope.model.sizes import architecture_of
from vitascope.model.vision_model import VisionModel
from vitascope.weights.preprocess import preprocess_of


class Engine(ABC):
    """Computes probabilities from pixels."""

    name = ""
    """Name of the model's file or folder, or its hub id; empty for a model that was not opened by a name."""
    architecture = ""
    """Its named size, or a phrase; empty if unknown."""
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
    own_thresholds: tuple[float, ...] = ()
    """The probability from which on each class applies, where any may; empty for 0.5."""
    device = torch.device("cpu")
    """Where it computes."""
    own_pixels = False
    """Whether `pixels` differs from `preprocess.pixels`, which other processes can run too."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name or self.architecture}: {self.description})"

    @property
    def reader(self) -> Callable[[ImageSource], Pixels]:
        """The function behind `pixels`. It can be pickled and needs no model: other processes can call it."""
        return self.preprocess.pixels

    @property
    def several(self) -> bool:
        """Whether any number of classes may apply to an image, rather than one."""
        return self.meaning == "independent"

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The probability from which on each of the K classes applies, where any may."""
        return self.own_thresholds or (EVEN,) * self.num_classes

    @property
    def digest(self) -> str:
        """SHA-256 of the weights in hexadecimal, computed on first use; empty without weights."""
        return ""

    def pixels(self, image: ImageSource) -> Pixels:
        """A picture as `probabilities` takes it, uint8 (C, H, W)."""
        return self.reader(image)

    def read(self, sources: Sequence[ImageSource]) -> tuple[list[Pixels], dict[int, str]]:
        """The pixels of readable pictures, and by place the errors of the others."""
        pictures: list[Pixels] = []
        errors: dict[int, str] = {}
        for place, source in enumerate(sources):
            try:
                pictures.append(self.pixels(source))
            except ImageError as error:
                errors[place] = str(error)
        return pictures, errors

    @abstractmethod
    def answers(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (B, C, H, W) to logits and probabilities, float32 (B, K) each, on the engine's device.

        They are not copied to the CPU, because each copy waits for the accelerator.

        Raises:
            UserError: a model without classes.
        """

    def probabilities(self, pixels: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to probabilities (B, K), float32, on the CPU."""
        return self.answers(pixels)[1].cpu()

    def outputs(self, pixels: Tensor) -> Tensor:
        """Probabilities (B, K), or features (B, D) of a model without classes."""
        return self.probabilities(pixels)

    def check_classes(self) -> None:
        """Reject a model without classes."""
        if not self.num_classes:
            raise UserError(
                "this model has no head for classes: it returns features (`model.embed`), not classes"
            )

    def label(self, index: int) -> str:
        """A class's name, or its index as text."""
        return self.class_names[index] if self.class_names else str(index)

    def predict(self, pictures: Sequence[Pixels]) -> Tensor:
        """Probabilities (B, K) of pictures that may differ in size; those of one size share a batch."""
        found = torch.empty(len(pictures), self.num_classes)
        for places, stack in stacks(pictures):
            found[places] = self.probabilities(stack)
        return found


def stacks(pictures: Sequence[Pixels]) -> Iterator[tuple[list[int], Tensor]]:
    """Batches of pictures that may differ in size: the places of those of one size, and their pixels."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for place, picture in enumerate(pictures):
        by_shape.setdefault(picture.shape, []).append(place)
    for places in by_shape.values():
        yield places, torch.stack([torch.from_numpy(pictures[place]) for place in places])  # (b, C, H, W)


class TorchEngine(Engine):
    """A model in torch; precision `auto` suits the hardware, the shape and the batch.

    A model without classes returns features and no probabilities.
    """

    def __init__(self, model: VisionModel, *, precision: str = "auto", device: str = "auto") -> None:
        gives_classes = model.config.gives_classes
        self.preprocess = preprocess_of(model)
        self.config = model.config
        self.architecture = architecture_of(model.config)
        self.class_names = model.config.class_names if gives_classes else ()
        self.num_classes = model.config.num_classes if gives_classes else 0
        self.meaning, self.own_thresholds = model.config.outputs, model.config.thresholds
        self.precision = precision
        self.device = resolve_device(device)
        self.description = f"torch, {precision} precision, on {self.device}"
        self.model = model.eval().to(self.device, torch.float32)
        self._in_dtype: dict[torch.dtype, VisionModel] = {torch.float32: self.model}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over name, shape and float32 bytes of the tensors, sorted by name: equal in any file."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            found.update(f"{name} {tuple(tensor.shape)}\n".encode())
            found.update(tensor.cpu().contiguous().numpy().data)
        return found.hexdigest()

    @torch.inference_mode()
    def answers(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (B, C, H, W) to logits and probabilities, float32 (B, K) each, on the device."""
        self.check_classes()
        model, images = self._prepared(pixels)
        logits = model(images).float()
        return logits, scores(logits, self.meaning)

    def outputs(self, pixels: Tensor) -> Tensor:
        """Probabilities (B, K), or features (B, D) of a model without classes."""
        return self.probabilities(pixels) if self.num_classes else self.embed(pixels)

    @torch.inference_mode()
    def embed(self, pixels: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to the pooled representation (B, D), float32, on the CPU."""
        model, images = self._prepared(pixels)
        return model.embed(images).float().cpu()

    def _prepared(self, pixels: Tensor) -> tuple[VisionModel, Tensor]:
        """The model in the precision for this batch, and the normalized batch in the same precision."""
        dtype = resolve_precision(self.precision, self.config, self.device, len(pixels), training=False)
        if dtype not in self._in_dtype:  # a copy in another precision is made once and kept
            self._in_dtype[dtype] = predicting_copy(self.model, dtype)
        return self._in_dtype[dtype], self.preprocess.normalize(pixels.to(self.device)).to(dtype)
