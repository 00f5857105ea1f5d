"""`Predictor`: a trained model that takes pictures as they come and answers with class names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Iterable
from typing import overload

import torch

from vitascope.data.decoding import ImageSource, as_pictures, is_one_picture
from vitascope.data.preprocess import Preprocess
from vitascope.deploy.predict.engine import Engine
from vitascope.deploy.predict.image_files import answer_all, find_images
from vitascope.deploy.predict.runtimes import open_engine
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


@dataclasses.dataclass(frozen=True)
class ImageResult:
    """What is in a picture file, or why it could not be read."""

    image: str
    """Its path."""
    predictions: list[Prediction]
    """Most probable first; none of a file that could not be read."""
    error: str | None = None
    """Why it could not be read; names the file."""


class Predictor:
    """Pictures in, class names and probabilities out.

    Args:
        engine: what answers: `TorchEngine` of a model, or an exported file's.
        batch_size: pictures at a time.

    Raises:
        UserError: `batch_size` is below 1, or the model has no head.
    """

    def __init__(self, engine: Engine, *, batch_size: int = 32) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, not {batch_size}")
        engine.check_classes()
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

    @overload
    def __call__(  # type: ignore[overload-overlap] # a str is a sequence of str too, and means one path
        self, images: ImageSource, top_k: int = 5
    ) -> list[Prediction]: ...

    @overload
    def __call__(self, images: Iterable[ImageSource], top_k: int = 5) -> list[list[Prediction]]: ...

    def __call__(
        self, images: ImageSource | Iterable[ImageSource], top_k: int = 5
    ) -> list[Prediction] | list[list[Prediction]]:
        """Return the `top_k` most probable classes of one picture, or of each of several.

        Args:
            images: one picture, or an iterable of pictures. A picture is a path, an encoded file's bytes, a
                Pillow image, or a uint8 array (H, W) or (H, W, C); so one array is one picture.
            top_k: classes per picture; at most all there are.

        Returns:
            For one picture its predictions, most probable first; for several, one such list per picture.

        Raises:
            ImageError: a picture cannot be read (the message names it), or has another type or shape.
            UserError: `top_k` is below 1.
        """
        check_top_k(top_k)
        pictures = as_pictures(images)
        answers: list[list[Prediction]] = []
        for start in range(0, len(pictures), self.batch_size):
            batch = [self.engine.pixels(picture) for picture in pictures[start : start + self.batch_size]]
            answers += self.rank(self.engine.predict(batch), top_k)
        return answers[0] if is_one_picture(images) else answers

    def predict_folder(
        self, folder: str | os.PathLike[str], top_k: int = 5, *, workers: int | None = None
    ) -> Generator[ImageResult, None, None]:
        """An answer for each picture below a folder, in the order of the names, however many there are.

        Files are found, read and answered as the answers are taken; a file that cannot be read is an answer
        with an `error`.

        Args:
            folder: of pictures at any depth; hidden files, and those not named like pictures, are left out.
            top_k: classes an image; at most all there are.
            workers: processes that read while the model computes; 0 reads in this one, None takes one a core.

        Raises:
            UserError: no such folder, `top_k` below 1; a process that reads was killed.
        """
        if not os.path.isdir(folder):
            raise UserError(f"{os.fspath(folder)}: no such folder")
        return self.stream(find_images([folder]), top_k, workers=workers)

    def stream(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        top_k: int = 5,
        *,
        workers: int | None = None,
    ) -> Generator[ImageResult, None, None]:
        """As `predict_folder`, of one file or the files that `paths` gives, taken a few batches ahead."""
        check_top_k(top_k)
        check_workers(workers)
        files = [paths] if isinstance(paths, str | os.PathLike) else paths
        return self._stream((os.fspath(path) for path in files), top_k, workers)

    def _stream(
        self, paths: Iterable[str], top_k: int, workers: int | None
    ) -> Generator[ImageResult, None, None]:
        for batch, probabilities, faults in answer_all(self.engine, paths, self.batch_size, workers):
            ranked = iter(self.rank(probabilities, top_k))
            for place, path in enumerate(batch):
                if place in faults:
                    yield ImageResult(path, [], faults[place])
                else:
                    yield ImageResult(path, next(ranked))

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


def check_workers(workers: int | None) -> None:
    """Refuse fewer processes than none."""
    if workers is not None and workers < 0:
        raise UserError(f"workers must not be negative, not {workers}")
