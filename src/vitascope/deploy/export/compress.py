"""`compress`: smaller and faster models by token merging and pruning, with their cost and gain.

The result is an ordinary model whose configuration describes it: it can be saved, served, exported, explained
and trained like any other.
"""

import dataclasses
import logging
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from torch import Tensor

from vitascope.analysis.evaluate import MAX_DROP, splits_of_data, splits_of_run
from vitascope.arguments import Range, checked
from vitascope.data.datasets import open_for_evaluation
from vitascope.data.loading import Loader
from vitascope.data.measures import PairedMeasure
from vitascope.data.splits import ImageSet
from vitascope.deploy.export.pruning import merge_tokens, prune
from vitascope.deploy.export.throughput import take_turns, timed_step
from vitascope.errors import UserError
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.hardware import resolve_device
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.storage import check_new_folder, new_folder
from vitascope.training.evaluation.measure import batches_of, measure
from vitascope.training.run.predictions import paired
from vitascope.training.run.run import Run, load_with_run

EXAMPLES_AT_ONCE = 32
ROUNDS = 7

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a model, and its accuracy."""

    parameters: int
    flops: int
    """Floating-point operations per image, a multiply-add counting as 2."""
    images_per_second: float
    """Of the median batch."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CompressionResult:
    """A compressed model, and its cost before and after."""

    folder: Path
    """The model folder."""
    before: Cost
    after: Cost
    batch_size: int
    """Images per batch of the speeds."""
    paired: PairedMeasure | None
    """The accuracy of both on the readable images that were measured, or their mean average precision if
    these have several classes each; None without labelled images."""
    measured_on: str
    """Name of these images."""
    data: str | None
    """DATA to continue training on, if known."""
    pruned: bool
    """Whether continued training is advisable."""

    def __repr__(self) -> str:
        faster = self.after.images_per_second / self.before.images_per_second
        smaller = self.after.parameters / self.before.parameters
        text = f"{self.folder}: {faster:.2f} times as fast, {smaller:.0%} of the parameters"
        if self.paired is not None:
            (before, _), (after, _) = self.paired.rows()
            text += f", {self.paired.name} {after}, before {before}"
        return f"CompressionResult({text})"


@checked
def compress(
    model: VisionModel | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    merge: int | None = None,
    heads: int | None = None,
    mlp_ratio: float | None = None,
    data: str | os.PathLike[str] | None = None,
    num_images: Annotated[int, Range(ge=1)] = 512,
    batch_size: Annotated[int, Range(ge=1)] = 8,
    precision: str = "auto",
    device: str = "auto",
) -> CompressionResult:
    """Merge tokens, prune heads and MLPs, write a model folder, and compare cost and accuracy.

    Merging needs no training. Continue training after pruning.

    Args:
        model: a Vision Transformer, or a MODEL reference.
        out: the new model folder.
        merge: patches that every block merges, see `merge_tokens`; 0 removes merging.
        heads: attention heads to keep in every block, see `prune`.
        mlp_ratio: width of the MLPs' hidden layers to keep, over `embed_dim`.
        data: DATA with the model's classes: its training images decide what is pruned, its test images
            measure the accuracy. By default the run's own and, if its test images are few, its validation
            images.
        num_images: training images that pruning uses.
        batch_size: images per batch when speed is measured.
        precision: `auto`, `fp32` or `bf16`, for speed and accuracy.
        device: `auto`, or a torch device.

    Raises:
        CheckpointError: as `from_pretrained`.
        UserError: nothing to do; a folder that is not empty; pruning without data; as `merge_tokens` and
            `prune`.
    """
    data = None if data is None else os.fspath(data)
    pruned = heads is not None or mlp_ratio is not None
    if not pruned and merge is None:
        raise UserError("nothing to compress: give merge, heads or mlp_ratio")
    out = Path(out)
    check_new_folder(out)
    model, run = load_with_run(model)
    if pruned and data is None and run is None:
        raise UserError(
            "pruning needs labelled images, and the model is not a run, whose images could be used: give data"
        )
    train, images = _examples_and_test(
        run, data, model.config.class_names, pruned
    )  # before anything is written
    for each in (train, images):
        if each is not None:
            each.truth.check_outputs(model.config.outputs, each.noun)
    smaller: VisionModel = model
    if pruned:
        assert train is not None
        model = model.to(resolve_device(device))
        examples = _examples(model, train, num_images)
        smaller = prune(model, examples, num_heads=heads, mlp_ratio=mlp_ratio)
    if merge is not None:
        smaller = merge_tokens(smaller, merge)
    with new_folder(out):
        save_pretrained(smaller, out)
    engines = [
        TorchEngine(each, precision=precision, device=device) for each in (model, from_pretrained(out))
    ]
    before, after = _costs(engines, batch_size)
    found = None if images is None else _compared(engines, images)
    if images is not None and found is not None and (doubt := found.doubt(MAX_DROP, images.noun)):
        log.warning("%s", doubt)
    return CompressionResult(
        folder=out,
        before=before,
        after=after,
        batch_size=batch_size,
        paired=found,
        measured_on="" if images is None else images.name,
        data=str(run.config["data"]) if data is None and run is not None else data,
        pruned=pruned,
    )


def _examples_and_test(
    run: Run | None, data: str | None, class_names: tuple[str, ...], pruned: bool
) -> tuple[ImageSet | None, ImageSet | None]:
    """The images that decide what is pruned, and those to measure on; None where there are none."""
    if data is None:
        return (None, None) if run is None else splits_of_run(run, class_names)
    if not pruned:
        return None, open_for_evaluation(data, class_names)
    # Split with the run's seed, so that only images that the run was trained on decide.
    return splits_of_data(data, class_names, seed=0 if run is None else int(run.config["seed"]))


def _examples(model: VisionModel, train: ImageSet, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalized training images and their targets, shares of the classes, on the model's device."""
    some = train.subset("train", train.order(0, 0)[:count])
    device, preprocess = next(model.parameters()).device, preprocess_of(model)
    for batch in Loader(some, preprocess, EXAMPLES_AT_ONCE, device=device).epoch():
        yield preprocess.normalize(batch.pixels), some.truth.shares(batch.targets)


def _costs(engines: Sequence[TorchEngine], batch_size: int) -> list[Cost]:
    """The cost of each engine; all are timed in turns, so that the machine's changes affect all alike."""
    times = take_turns([timed_step(engine, batch_size) for engine in engines], rounds=ROUNDS)
    return [
        Cost(
            parameters=engine.config.num_parameters,
            flops=engine.config.flops,
            images_per_second=batch_size / statistics.median(seconds),
        )
        for engine, seconds in zip(engines, times, strict=True)
    ]


def _compared(engines: Sequence[TorchEngine], images: ImageSet) -> PairedMeasure:
    """Compare two models with the same preprocessing on the readable images."""
    batches = batches_of(engines[0], images)
    first, second = (measure(engine, batches) for engine in engines)
    return paired(first, second)
