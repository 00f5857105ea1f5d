"""`Predictor`: a trained model that takes pictures as they come and answers with class names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import torch

from vitascope.data.preprocess import ImageSource, Preprocess
from vitascope.deploy.engine import Engine, open_engine
from vitascope.errors import UserError


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
        engine: what answers: `TorchEngine` of a model, or an exported file's.
        batch_size: pictures at a time.

    Raises:
        UserError: a batch of nothing.
    """

    def __init__(self, engine: Engine, *, batch_size: int = 32) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, not {batch_size}")
        self.engine = engine
        self.batch_size = batch_size

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

        Args:
            ref: a MODEL argument.
            revision: of a hub id.
            precision: `auto`, `fp32` or `bf16`; `auto` chooses by hardware, shape and batch.
            device: `auto`, or a torch device.
            batch_size: pictures at a time.

        Raises:
            CheckpointError: as `from_pretrained`.
            UserError: a model without a head, a device that is not there.
        """
        engine = open_engine(ref, revision=revision, precision=precision, device=device)
        return cls(engine, batch_size=batch_size)

    @property
    def preprocess(self) -> Preprocess:
        """From any picture to the model's pixels."""
        return self.engine.preprocess

    def __call__(self, images: Sequence[ImageSource], top_k: int = 5) -> list[list[Prediction]]:
        """The `top_k` most probable classes of each picture, most probable first.

        Args:
            images: paths, encoded files' bytes, Pillow images, or uint8 arrays (H, W) or (H, W, C).
            top_k: classes an image; at most all there are.

        Raises:
            ImageError: a picture that cannot be read; names it.
            UserError: `top_k` below 1.
        """
        check_top_k(top_k)
        answers = []
        for start in range(0, len(images), self.batch_size):
            pictures = [self.engine.pixels(image) for image in images[start : start + self.batch_size]]
            answers += self.rank(self.engine.answer(pictures), top_k)
        return answers

    def probabilities(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 pixels (B, C, H, W) of the model's size to probabilities (B, K), float32, on the CPU."""
        return self.engine.probabilities(pixels)

    def rank(self, probabilities: torch.Tensor, top_k: int) -> list[list[Prediction]]:
        """The `top_k` most probable classes of each row of (B, K), most probable first."""
        scores, indices = probabilities.topk(min(top_k, probabilities.shape[1]), dim=1)
        return [
            [Prediction(self.engine.label(index), index, score) for score, index in zip(*row, strict=True)]
            for row in zip(scores.tolist(), indices.tolist(), strict=True)
        ]


def check_top_k(top_k: int) -> None:
    """Refuse to name fewer classes than one."""
    if top_k < 1:
        raise UserError(f"top_k must be at least 1, not {top_k}")
