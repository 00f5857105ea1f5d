"""The lines that a run prints at its start: its data, its model, its length."""

import logging

import numpy as np
from torch import nn

from vitascope.data.datasets import class_counts, described, find_copies, sampled_sizes
from vitascope.data.leaks import seen_in_words
from vitascope.data.splits import ImageSet, Splits, absent_classes
from vitascope.errors import printable
from vitascope.formatting import counted
from vitascope.training import distributed
from vitascope.training.loop import Trainer
from vitascope.training.options.groups import Balance
from vitascope.training.options.recipes import BUILT_IN
from vitascope.training.run.run import LARGER_START

log = logging.getLogger(__name__)

ALL = 0.995
"""The share of a picture from which on nothing is said about the rest."""
MOST = 0.75
"""The share of a picture below which another fit is recommended."""


def announce_data(trainer: Trainer) -> None:
    """Print the data and the model, and the options that were chosen by the data."""
    if not distributed.is_first():
        return
    config, splits = trainer.config, trainer.splits
    copies = find_copies(splits)
    lines = [*described(splits), *copies.described(), *seen_in_words(splits)]
    if config.task == "classify" and splits.train.uneven:
        lines.append(_uneven(splits.train, config.balance))
    model = [f"{_parameters(trainer.module)}: {trainer.model_config.summary}", *trainer.plan.explained()]
    for name, texts in (("data ", [f"{config.data}: {lines[0]}", *lines[1:]]), ("model", model)):
        print(f"{name}  " + "\n       ".join(texts), flush=True)
    if seen := _seen(trainer):
        print(f"fit    {seen}", flush=True)
    for warning in copies.warnings(labelled=config.task == "classify"):
        log.warning("%s", warning)
    for images, consequence in (
        ((splits.train, "learned"), (splits.val, "validated")) if config.task == "classify" else ()
    ):
        if absent := absent_classes(images):
            log.warning("%s; a class without images is not %s", absent, consequence)


def announce_run(trainer: Trainer) -> None:
    """Print the folder and the length of the run, and how it is computed."""
    start = "" if trainer.step == 0 else f", from step {trainer.step:,}"
    several = f", {distributed.world_size()} processes" if distributed.world_size() > 1 else ""
    parts = trainer.parts
    in_parts = f", each batch of {trainer.batch_size:,} images in {parts} parts" if parts > 1 else ""
    distributed.print_first(
        f"run    {trainer.run.ref}: {_length(trainer)}"
        f"{start}, {str(trainer.precision).removeprefix('torch.')} on {trainer.device}{several}{in_parts}"
        f"{', compiled' if trainer.compiled else ''}"
    )


def _seen(trainer: Trainer) -> str:
    """How much the model sees of the median picture, and of the one that it sees least of; empty for all."""
    sizes, seen = sampled_sizes(trainer.splits.train), trainer.preprocess.share_seen
    shares = np.array([seen(width, height) for height, width in sizes.tolist()])
    height, width = map(int, np.median(sizes, axis=0))
    share, least = seen(width, height), float(shares.min())
    if min(share, least) > ALL:
        return ""
    text = f"the model sees {share:.0%} of a picture of {height}x{width} pixels, its centre"
    if least < min(share, MOST):
        high, wide = sizes[shares.argmin()].tolist()
        few = int((shares < MOST).sum())
        text += (
            f"; of {few} of {len(sizes)} less than {MOST:.0%}, down to {least:.0%} of {high}x{wide} pixels"
        )
    if min(share, least) >= MOST or trainer.config.fit == "crop":
        return text
    return f"{text}: fit=pad or fit=squash shows it the whole picture"


def _parameters(module: nn.Module) -> str:
    """The number of parameters, and of those that are trained if some are frozen."""
    parameters = list(module.parameters())
    count = f"{sum(p.numel() for p in parameters) / 1e6:.2f} M parameters"
    trained = [p for p in parameters if p.requires_grad]
    if len(trained) == len(parameters):
        return count
    return f"{count}, {sum(p.numel() for p in trained):,} of them trained"


def _uneven(images: ImageSet, balance: Balance) -> str:
    """The numbers of images of the smallest and the largest class, and the options that balance them."""
    counts = {name: count for name, count in class_counts(images).items() if count}
    fewest, most = (choose(counts, key=counts.__getitem__) for choose in (min, max))
    advice = "class_weights=balanced or sampling=balanced would balance them"
    if balance.class_weights:
        advice = f"class_weights={' '.join(balance.class_weights)}"
    elif balance.sampling == "balanced":
        advice = "sampling=balanced"
    images_per_class = f"{counts[fewest]:,} ({fewest}) to {counts[most]:,} ({most}) training images per class"
    return printable(f"uneven: {images_per_class}; {advice}")


def _length(trainer: Trainer) -> str:
    """The length of a run in words, and a warm-up that was shortened for it."""
    schedule, options = trainer.schedule, trainer.config.optimization
    per_epoch = counted(trainer.steps_per_epoch, "step")
    if options.epochs is not None and not options.lengths:
        words = f"{counted(options.epochs, 'epoch')} of {per_epoch}"
    else:
        total = schedule.total(trainer.step)
        words = f"{counted(total, 'step')} ({total / trainer.steps_per_epoch:.3g} epochs of {per_epoch})"
    if options.minutes is not None:
        minutes = f"{options.minutes:g} minute{'s' * (options.minutes != 1)}"
        words = f"about {words} in {minutes}, corrected by the measured speed"
    if schedule.warmup < schedule.asked_warmup:
        words += (
            f"; the warm-up of {counted(schedule.asked_warmup, 'step')} is shortened to {schedule.warmup:,}, "
            "a quarter of the run"
        )
    return words


def other_starts(splits: Splits) -> list[str]:
    """Lines about the built-in body, about the images that choose and measure, and about other ways."""
    body = (
        f"{BUILT_IN} is small, and was taught pictures of 32x32 pixels; with a network, a larger body that "
        f"was taught photographs is a better start: --weights {LARGER_START}"
    )
    images = counted(len(splits.train), "training image")
    others = (
        f"`vitascope probe {BUILT_IN} --data DATA` takes seconds, and measures on all images; {images}: few "
        "for random weights (--weights none)"
    )
    total, parts = len(splits.train), []
    for name, does in (("val", "choose the epoch"), ("test", "measure it")):
        if name in splits.drawn:
            total += len(splits.parts[name])
            parts.append(f"{counted(len(splits.parts[name]), f'{name} image')} {does}")
    few = f"{' and '.join(parts)}; --folds 3 measures on all {total:,}, and its ensemble had a lower log loss"
    return [body, few, others] if parts else [body, others]
