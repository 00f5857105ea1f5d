"""The features of a frozen body, computed once where no option changes the images from epoch to epoch."""

from __future__ import annotations

import dataclasses
import time

import torch
from tqdm import tqdm

from vitascope.data.loading import KeptFeatures, check_unreadable
from vitascope.data.splits import ImageSet, Splits
from vitascope.formatting import counted
from vitascope.model.vision_model import VisionModel, evaluation_mode
from vitascope.options.recipes import TrainConfig
from vitascope.predict.compute import Compute
from vitascope.predict.engine import Engine
from vitascope.predict.feature_stream import BATCH_SIZE, FeatureStream
from vitascope.predict.features import OWN
from vitascope.training import distributed
from vitascope.training.placement import Placement
from vitascope.training.plan import image_options
from vitascope.training.tasks.classify import engine_of

LIMIT_GB = 4.0
"""Features of more gigabytes are not kept in memory: the body is computed in every epoch."""
TIMED = 8
"""Images of which the body's speed is measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BodyFeatures:
    """The features of `model.embed` of the images that a run reads in every epoch."""

    train: KeptFeatures
    val: KeptFeatures
    seconds_per_image: float
    """Of reading an image and computing the body, measured for runs with a budget of minutes, else 0."""


def trains_on_features(options: TrainConfig, model: VisionModel, splits: Splits) -> bool:
    """Whether a run trains the head on features that are computed once; if its body is frozen, and they are
    not, the reason is printed."""
    if not options.optimization.freeze:
        return False
    if needed := image_options(options):
        reason = f"for {', '.join(needed)}; the recipe linear-probe trains on features that are computed once"
    else:
        size = 4 * width_of(model) * (len(splits.train) + len(splits.val)) / 1e9
        if size <= LIMIT_GB:
            return True
        reason = f"because all features take {size:,.1f} GB, and at most {LIMIT_GB:g} GB are kept in memory"
    distributed.print_first(f"body   computed in every epoch, {reason}")
    return False


@torch.inference_mode()
def width_of(model: VisionModel) -> int:
    """The numbers in a feature of `model.embed`, D."""
    config, device = model.config, next(model.parameters()).device
    with evaluation_mode(model):
        return model.embed(torch.zeros(1, config.in_channels, *config.image_hw, device=device)).shape[1]


def body_features(
    options: TrainConfig, model: VisionModel, splits: Splits, placement: Placement
) -> BodyFeatures:
    """Compute the features of the training and validation images, but those in the cache, and print how many.

    Each of several processes computes a part, and has all of them in the end.

    Raises:
        UserError: too many unreadable images; features that are not finite.
    """
    engine = engine_of(model, options)
    batch_size = min(
        engine.batch_size(None, BATCH_SIZE), max(1, options.option("batch_size") // placement.parts)
    )
    workers, width = options.execution.workers, width_of(model)
    found, computed, images = [], 0, 0
    for part in (splits.train, splits.val):
        features, new = _features_of(engine, part, width, batch_size, workers)
        found.append(features)
        computed, images = computed + new, images + len(part) - len(features.unreadable)
    cached = {0: "none", images: "all"}.get(images - computed, f"{images - computed:,}")
    distributed.print_first(
        f"body   computed once: features of {counted(images, 'image')}, {cached} of them cached"
    )
    timed = options.optimization.minutes is not None
    seconds = seconds_per_image(engine, splits.val) if timed else 0.0
    return BodyFeatures(train=found[0], val=found[1], seconds_per_image=seconds)


def _features_of(
    engine: Engine, images: ImageSet, width: int, batch_size: int, workers: int | None
) -> tuple[KeptFeatures, int]:
    """The features of a split, and how many were computed."""
    cuts = [len(images) * part // distributed.world_size() for part in range(distributed.world_size() + 1)]
    begin, end = cuts[distributed.rank()], cuts[distributed.rank() + 1]
    compute = Compute(batch_size=batch_size, workers=workers)
    stream = FeatureStream(engine, [OWN], images.sources[begin:end], compute)
    values = torch.zeros(len(images), width)  # (N, D)
    hidden = None if distributed.is_first() else True  # None: only in a terminal

    def fill() -> None:
        with tqdm(
            total=end - begin, desc=images.name, unit=" images", delay=3, leave=False, disable=hidden
        ) as bar:
            for rows in stream:
                values[begin + torch.from_numpy(rows.indices)] = torch.from_numpy(rows.features[0])
                bar.update(int(rows.indices[-1]) + 1 - bar.n)
                reasons = list(stream.unreadable.values())
                check_unreadable(len(reasons), len(images), images.name, reasons)

    distributed.by_all(fill)
    distributed.add_up(values)  # the rows of the others are zero
    by_process = distributed.gather(
        ({begin + row: why for row, why in stream.unreadable.items()}, stream.computed)
    )
    unreadable = {index: why for part, _ in by_process for index, why in part.items()}
    return KeptFeatures(values, unreadable), sum(count for _, count in by_process)


def seconds_per_image(engine: Engine, images: ImageSet) -> float:
    """Seconds for an image of the final test, without the cache; the first images warm up."""
    sources = images.sources[:TIMED]
    for _ in range(2):
        began = time.monotonic()
        stream = FeatureStream(
            engine, [OWN], sources, Compute(batch_size=len(sources), workers=0, cache=False)
        )
        for _ in stream:
            pass
    return (time.monotonic() - began) / len(sources)
