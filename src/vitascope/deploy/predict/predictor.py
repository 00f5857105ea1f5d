"""`Predictor`: pictures or folders of any size in, class names and probabilities out."""

import base64
import dataclasses
import html
import io
import itertools
import logging
import os
from collections.abc import Generator, Iterable, Iterator, Sequence, Sized
from contextlib import closing
from pathlib import Path
from typing import Any, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vitascope.arguments import checked
from vitascope.data.listing import images_below
from vitascope.data.pictures import PictureBatch, stream, through_device
from vitascope.data.reading import ImageReader
from vitascope.data.stored import ImageFile, TableImage, as_pictures, fetched_ahead, stored_images
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions, is_table
from vitascope.deploy.predict.explanation import Explanation, explain_framed
from vitascope.errors import UserError, nearest_path
from vitascope.formatting import counted
from vitascope.models import decoding
from vitascope.models.engines.compute import BatchSize, Views, Workers
from vitascope.models.engines.engine import Engine, stacks
from vitascope.models.engines.runtimes import as_engine, open_engine
from vitascope.models.engines.selection import REASONS, ClassSelection, Unknown, Verdict
from vitascope.models.preprocess import Preprocess
from vitascope.models.vision_model import VisionModel
from vitascope.remote import StoredImage, url_name

T = TypeVar("T", bound=Sized)
log = logging.getLogger(__name__)

BATCH_SIZE = 32
"""On a CPU."""
THUMBNAIL = 240
"""Largest side, in pixels, of a picture in a notebook."""


@dataclasses.dataclass(frozen=True, repr=False)
class Prediction:
    """One class and its probability."""

    label: str
    """The class name; the index as text if the model has no names."""
    index: int
    """The model's output."""
    score: float
    """The probability."""

    def __repr__(self) -> str:
        return f"Prediction({self.label!r}, {self.index}, {self.score:.3f})"


class PicturePredictions(list[Prediction]):
    """The predictions of one picture, most probable first; a notebook shows it with a bar per class."""

    best: Prediction
    """The most probable class; not among the predictions if it is below its threshold."""
    probabilities: npt.NDArray[np.float32]
    """Of every class, (K,)."""
    verdict: Verdict
    """Whether the model knows the class of the picture."""

    def __init__(
        self, result: "ImageResult", image: decoding.ImageSource, levels: decoding.Levels | None = None
    ) -> None:
        super().__init__(result.predictions)
        assert result.best is not None  # as of every picture that can be read
        assert result.probabilities is not None
        assert result.verdict is not None
        self.best, self.probabilities, self.verdict = result.best, result.probabilities, result.verdict
        self.image, self.levels = image, levels

    @property
    def unknown(self) -> Unknown | None:
        """Why the class is not known, `ambiguous`, `unfamiliar` or `unchecked`; None if it is."""
        return self.verdict.unknown

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(prediction.label)}</td><td>{prediction.score:.1%}</td>"
            f'<td><meter value="{prediction.score:.4f}"></meter></td></tr>'
            for prediction in self
        )
        if self.unknown in REASONS:
            rows += f"<tr><td colspan=2>{REASONS[self.unknown]}</td></tr>"
        if not self:
            rows = f"<tr><td>{html.escape(none_of(self.best.label, self.best.score))}</td></tr>"
        try:
            shown = decoding.read_image(self.image, levels=self.levels).convert("RGB")
        except decoding.ImageError:  # the file is gone since, or was a stream
            return f"<table>{rows}</table>"
        shown.thumbnail((THUMBNAIL, THUMBNAIL))
        file = io.BytesIO()
        shown.save(file, "JPEG")
        data = base64.b64encode(file.getvalue()).decode("ascii")
        return f'<img src="data:image/jpeg;base64,{data}"><table>{rows}</table>'


def none_of(label: str, score: float) -> str:
    """The prediction of no class in words, with the most probable one."""
    return f"none of the classes; the most probable one is {label}, {score:.2%}"


@dataclasses.dataclass(frozen=True)
class ImageResult:
    """The predictions of one image file, or the reason why it could not be read."""

    image: str
    """Path of the file."""
    predictions: list[Prediction]
    """Most probable first; empty if the file could not be read, or if every class is below its threshold."""
    error: str | None = None
    """The reason; names the file."""
    best: Prediction | None = None
    """The most probable class; None if the file could not be read."""
    probabilities: npt.NDArray[np.float32] | None = dataclasses.field(default=None, repr=False, compare=False)
    """Of every class, (K,); None if the file could not be read."""
    verdict: Verdict | None = None
    """Whether the model knows the class; None if the file could not be read."""
    cells: tuple[str, ...] = ()
    """Of the file's row in a table, where they are kept."""


class Predictor:
    """Predicts the classes of pictures.

    Args:
        model: a MODEL reference (a run, a model folder or file, a hub id), an exported model, a model with
            `preprocess`, or an `Engine`.
        precision: `auto`, `fp32` or `bf16`; `auto` chooses by hardware, shape and batch.
        device: `auto`, or a torch device.
        batch_size: pictures per batch; by default 32, and on a GPU as many as keep it busy, see
            `model.hardware.images_per_batch`.
        views: 1, or the views of each picture whose probabilities are averaged: 2 with the mirror image, 6
            also with both shifted twice. There are no sets of classes and no familiarity then.

    Raises:
        CheckpointError: as `from_pretrained`.
        UserError: `batch_size` below 1; a model without a head; an unknown device; a
            precision, device or views for an engine, which has its own; views of an exported model.
    """

    @checked
    def __init__(
        self,
        model: Engine | VisionModel | str | os.PathLike[str],
        *,
        precision: str = "auto",
        device: str = "auto",
        batch_size: BatchSize = None,
        views: Views = 1,
    ) -> None:
        self.engine = as_engine(model, precision=precision, device=device, views=views)
        self.engine.check_classes()
        self.batch_size = self.engine.batch_size(batch_size, BATCH_SIZE)
        self.engine.warm_up(self.batch_size)

    @classmethod
    @checked
    def from_pretrained(
        cls,
        ref: str | os.PathLike[str],
        *,
        revision: str | None = None,
        precision: str = "auto",
        device: str = "auto",
        batch_size: BatchSize = None,
        views: Views = 1,
    ) -> Self:
        """`Predictor(ref)`, with the revision of a hub id."""
        engine = open_engine(ref, revision=revision, precision=precision, device=device, views=views)
        return cls(engine, batch_size=batch_size)

    def __repr__(self) -> str:
        return f"Predictor({self.engine!r})"

    @property
    def preprocess(self) -> Preprocess:
        """The preprocessing from a picture to the model's pixels."""
        return self.engine.preprocess

    @overload
    def __call__(  # type: ignore[overload-overlap] # a str is a sequence of str too, and means one path
        self,
        images: decoding.ImageSource,
        top_k: int | None = ...,
        *,
        threshold: float | None = ...,
        coverage: float | None = ...,
        familiar: float | None = ...,
    ) -> PicturePredictions: ...

    @overload
    def __call__(
        self,
        images: Iterable[decoding.ImageSource],
        top_k: int | None = ...,
        *,
        threshold: float | None = ...,
        coverage: float | None = ...,
        familiar: float | None = ...,
    ) -> list[PicturePredictions]: ...

    @checked
    def __call__(
        self,
        images: decoding.ImageSource | Iterable[decoding.ImageSource],
        top_k: int | None = None,
        *,
        threshold: float | None = None,
        coverage: float | None = None,
        familiar: float | None = None,
    ) -> PicturePredictions | list[PicturePredictions]:
        """Predict the classes of one picture or of several.

        A model of one class per image predicts its most probable classes. A model of several predicts those
        whose probability is at least their threshold, maybe none.

        Args:
            images: one picture, or an iterable of pictures. A picture is a path, an encoded file's bytes, a
                Pillow image, or one array or tensor of pixels: uint8, or floats in [0, 1]; (H, W), (H, W, C)
                or (C, H, W). Normalized tensors are for the model: `model(images)`.
            top_k: the most classes per picture; by default 5, or with several classes per image no limit.
            threshold: the threshold of every class, for a model of several classes per image; by default its
                own thresholds.
            coverage, familiar: see `ClassSelection`; for a calibrated model.

        Returns:
            The predictions of one picture, most probable first; for several pictures, a list of these.

        Raises:
            ImageError: a picture cannot be read (the message names it), or has another type or shape.
            UserError: `top_k` is below 1; a `threshold` that is no probability, or for a model of one class
                per image.
        """
        if isinstance(images, str | os.PathLike) and os.path.isdir(images):
            raise UserError(
                f"{os.fspath(images)} is a folder, not a picture: predict_folder reads its pictures"
            )
        selection = self._selection(top_k, threshold, coverage, familiar)
        predictions = list[PicturePredictions]()
        pictures = iter(as_pictures(images))
        batches = iter(lambda: list(itertools.islice(pictures, self.batch_size)), [])
        read = (PictureBatch(batch, stacks(list(map(self.engine.pixels, batch))), {}) for batch in batches)
        for batch, results in self._predicted(read, selection):
            predictions += [
                PicturePredictions(result, picture, self.preprocess.levels)
                for picture, result in zip(batch.items, results, strict=True)
            ]
        return predictions[0] if decoding.is_one_picture(images) else predictions

    @overload
    def explain(  # type: ignore[overload-overlap] # as above
        self, images: decoding.ImageSource, *, method: str = ..., target: int | str | None = ...
    ) -> Explanation: ...

    @overload
    def explain(
        self, images: Iterable[decoding.ImageSource], *, method: str = ..., target: int | str | None = ...
    ) -> list[Explanation]: ...

    @checked
    def explain(
        self,
        images: decoding.ImageSource | Iterable[decoding.ImageSource],
        *,
        method: str = "integrated-gradients",
        target: int | str | None = None,
    ) -> Explanation | list[Explanation]:
        """Explain the prediction of one picture or of several.

        Args:
            images: as for a call.
            method: a name in `vitascope.explain.METHODS`; by default `vitascope.explain.DEFAULT_METHOD`.
            target: the class to explain, by name or index; None is the most probable one.

        Returns:
            A heatmap with its picture; for several pictures, a list of these.

        Raises:
            ImageError: as for a call.
            UserError: an exported model; an unknown method or class, or a method that this model does not
                support.
        """
        explanations = [
            explain_framed(self.engine, self.engine.preprocess.framed(picture), method, target)
            for picture in as_pictures(images)
        ]
        return explanations[0] if decoding.is_one_picture(images) else explanations

    @checked
    def predict_folder(
        self,
        folder: str | os.PathLike[str],
        top_k: int | None = None,
        *,
        threshold: float | None = None,
        coverage: float | None = None,
        familiar: float | None = None,
        workers: Workers = None,
    ) -> Generator[ImageResult, None, None]:
        """Yield the result of each image file below a folder, of any size, in the order of the names.

        Files are found, read and predicted as results are taken. A file that cannot be read is a result with
        an `error`.

        Args:
            folder: image files at any depth; hidden files and those without an image's suffix are skipped.
            top_k, threshold, coverage, familiar: as for a call.
            workers: processes that read while the model computes; 0 reads in this process, None means one
                per core.

        Raises:
            UserError: no such folder; a reading process was killed; as for a call.
        """
        rates = {"coverage": coverage, "familiar": familiar}
        return self.stream(find_images([folder]), top_k, threshold=threshold, **rates, workers=workers)

    @checked
    def stream(
        self,
        paths: str | os.PathLike[str] | StoredImage | Iterable[str | os.PathLike[str] | StoredImage],
        top_k: int | None = None,
        *,
        threshold: float | None = None,
        coverage: float | None = None,
        familiar: float | None = None,
        workers: Workers = None,
    ) -> Generator[ImageResult, None, None]:
        """As `predict_folder`, for one file or for the files in `paths`, taken a few batches ahead; those in
        a store, from `find_images`, are fetched further ahead."""
        selection = self._selection(top_k, threshold, coverage, familiar)
        several = [paths] if isinstance(paths, str | os.PathLike | StoredImage) else paths
        files = (file if isinstance(file, StoredImage) else os.fspath(file) for file in several)
        return self._results(files, selection, workers)

    def _results(
        self, files: Iterator[ImageFile], selection: ClassSelection, workers: int | None
    ) -> Generator[ImageResult, None, None]:
        with closing(fetched_ahead(files)) as fetched:
            batches = iter(lambda: list(itertools.islice(fetched, self.batch_size)), [])
            reader = ImageReader(None, self.engine.preprocess)
            with closing(stream(self.engine, reader, batches, self.batch_size, workers)) as read:
                for _, results in self._predicted(read, selection):
                    yield from results

    def _selection(self, *chosen: Any) -> ClassSelection:
        selection = ClassSelection(*chosen)
        selection.check(self.engine)
        return selection

    def _predicted(
        self, read: Iterable[PictureBatch[T]], selection: ClassSelection
    ) -> Iterator[tuple[PictureBatch[T], Iterator[ImageResult]]]:
        """Batches with the results of their pictures; a GPU computes the next ones meanwhile."""

        def answers(pixels: Tensor) -> list[Tensor]:
            return self.engine.answers(pixels).known()[1:]

        for batch, columns in through_device(read, answers, self.engine.device):
            yield batch, self._described(batch, columns, selection)

    def _described(
        self, batch: PictureBatch[Any], answers: Sequence[Tensor], selection: ClassSelection
    ) -> Iterator[ImageResult]:
        """The result of each picture, from the readable ones' probabilities (m, K), and familiarity (m,)."""
        predicted: Iterator[tuple[Any, ...]] = iter(())
        if answers:
            probabilities, *known = answers
            chosen = selection.of(self.engine, probabilities)
            best = (column.tolist() for column in probabilities.max(dim=1))
            verdicts = selection.judged(self.engine, probabilities, known[0] if known else None)
            predicted = zip(chosen, *best, probabilities.numpy(), verdicts, strict=True)
        for place, image in enumerate(batch.items):
            path = str(image) if isinstance(image, str | StoredImage) else ""
            cells = image.cells if isinstance(image, TableImage) else ()
            if (error := batch.faults.get(place)) is not None:
                yield ImageResult(path, [], error, cells=cells)
                continue
            classes, score, index, row, verdict = next(predicted)
            predictions = [self._named(*label) for label in classes]
            yield ImageResult(path, predictions, None, self._named(index, score), row, verdict, cells)

    def _named(self, index: int, score: float) -> Prediction:
        return Prediction(self.engine.label(index), index, score)


def find_images(
    places: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    table: TableOptions = AS_RECOGNIZED,
    *,
    keep: bool = False,
) -> Iterator[ImageFile]:
    """Image files, and those below folders that have an image's suffix and are not hidden, as they are found.

    A folder's files come first, then its folders, each by name. Links to folders are entered, but not those
    that lead back to a folder above them. A table stands for the images of its rows, in their order, with
    their cells to `keep` as `TableImage`s. A place may be the URL of a store.
    """
    if table.about_images:
        option = table.about_images[0]
        raise UserError(
            f"{option} does not apply to predict, which has a result for every image: leave it out"
        )
    several = [places] if isinstance(places, str | os.PathLike) else places
    images = [_images_at(os.fspath(place), table, keep) for place in several]
    return _counting_pages(itertools.chain.from_iterable(images))


def _counting_pages(files: Iterable[ImageFile]) -> Iterator[ImageFile]:
    """The files; a warning after the last counts those of several pages."""
    several = 0
    for file in files:
        several += isinstance(file, str) and decoding.has_pages(file)
        yield file
    if several:
        log.warning("%s of several pages or frames: the first counts", counted(several, "image"))


def _images_at(place: str, table: TableOptions, keep: bool) -> Iterable[ImageFile]:
    if is_table(place) and url_name(place):
        raise UserError(f"{place}: a table in a store: copy it to this machine, with its images")
    if (stored := stored_images(place)) is not None:
        return stored
    if os.path.isdir(place):
        return (entry.path for entry in images_below(place, _unlisted))
    if os.path.isfile(place) and is_table(place):
        from vitascope.data.formats.table import images_of_table  # which most predictions do not need

        return images_of_table(Path(place), table, keep=keep)
    if os.path.exists(place):
        return [place]
    raise UserError(f"{place}: no such file or folder{nearest_path(str(place))}")


def _unlisted(folder: str, error: OSError) -> None:
    """Reject a folder that cannot be listed, unless it has vanished."""
    if not isinstance(error, FileNotFoundError):
        raise UserError(f"{folder}: cannot be listed: {error.strerror}") from error
