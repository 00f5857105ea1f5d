"""`Predictor`: a trained model that takes pictures as they come and answers with class names."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence

import numpy as np
import torch

from vitascope.data.preprocess import ImageSource, Preprocess
from vitascope.errors import UserError
from vitascope.model.classifier import Classifier
from vitascope.model.hardware import resolve_device, resolve_precision
from vitascope.weights.store import load_pretrained


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One class of an answer."""

    label: str
    """Its name; the index as text where the model has no names."""
    index: int
    """Its output of the model."""
    score: float
    """Its probability."""


class Predictor:
    """Pictures in, class names and probabilities out.

    Args:
        model: a classifier (its head is not "none").
        preprocess: the preprocessing that it was trained with.
        precision: `auto`, `fp32` or `bf16`; `auto` chooses by hardware, shape and batch.
        device: `auto`, or a torch device.
        batch_size: pictures at a time.

    Raises:
        UserError: a model without a head, a device that is not there.
    """

    def __init__(
        self,
        model: Classifier,
        preprocess: Preprocess,
        *,
        precision: str = "auto",
        device: str = "auto",
        batch_size: int = 32,
    ) -> None:
        if not model.config.gives_classes:
            raise UserError("this model has no head: it gives features, not classes; use `model.embed`")
        self.preprocess = preprocess
        self.precision = precision
        self.batch_size = batch_size
        self.device = resolve_device(device)
        self.config = model.config
        self._models: dict[torch.dtype, Classifier] = {
            torch.float32: model.eval().to(self.device, torch.float32)
        }

    @classmethod
    def from_pretrained(
        cls,
        ref: str | os.PathLike[str],
        *,
        revision: str | None = None,
        precision: str = "auto",
        device: str = "auto",
        batch_size: int = 32,
    ) -> Predictor:
        """The predictor of a MODEL argument.

        Raises:
            CheckpointError: as `from_pretrained`.
        """
        loaded = load_pretrained(ref, revision)
        return cls(loaded.model, loaded.preprocess, precision=precision, device=device, batch_size=batch_size)

    def __call__(self, images: Sequence[ImageSource], top_k: int = 5) -> list[list[Prediction]]:
        """The `top_k` most probable classes of each picture, most probable first.

        Args:
            images: paths, encoded files' bytes, Pillow images, or uint8 arrays (H, W) or (H, W, C).
            top_k: classes an image; at most all there are.

        Raises:
            ImageError: a picture that cannot be read; names it.
            UserError: `top_k` below 1.
        """
        if top_k < 1:
            raise UserError(f"top_k must be at least 1, not {top_k}")
        answers = []
        for start in range(0, len(images), self.batch_size):
            batch = images[start : start + self.batch_size]
            pixels = np.stack([self.preprocess.pixels(image) for image in batch])  # (B, C, H, W)
            scores, indices = self.probabilities(torch.from_numpy(pixels)).topk(
                min(top_k, self.config.num_classes), dim=1
            )
            for row in zip(scores.tolist(), indices.tolist(), strict=True):
                answers.append(
                    [Prediction(self._name(index), index, score) for score, index in zip(*row, strict=True)]
                )
        return answers

    @torch.inference_mode()
    def probabilities(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 pixels (B, C, H, W) of the model's size to probabilities (B, K), float32, on the CPU."""
        model, dtype = self._model_for(len(pixels))
        images = self.preprocess.normalize(pixels.to(self.device)).to(dtype)
        return model(images).float().softmax(dim=1).cpu()

    def _model_for(self, batch_size: int) -> tuple[Classifier, torch.dtype]:
        """The model in the precision for a batch; a copy in another precision is made once and kept."""
        dtype = resolve_precision(self.precision, self.config, self.device, batch_size, training=False)
        if dtype not in self._models:
            self._models[dtype] = copy.deepcopy(self._models[torch.float32]).to(dtype)
        return self._models[dtype], dtype

    def _name(self, index: int) -> str:
        return self.config.class_names[index] if self.config.class_names else str(index)
