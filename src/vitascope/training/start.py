"""`weights=auto`: the start of a run, chosen by the training images and the time.

The bodies at hand are compared by the cross-validated accuracy, or mAP, of logistic regression on frozen
features. Then a rule decides what of the best one is trained, or that random weights are better. Its numbers
come from benchmarks/results/2026-11-28-weights-auto.md, and the three results that it names.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from vitascope.data.datasets import greatest_value
from vitascope.data.features.embed import with_progress
from vitascope.data.features.stream import FeatureStream
from vitascope.data.folds import Division, division_of
from vitascope.data.measures import Score
from vitascope.data.splits import ImageSet
from vitascope.errors import UserError
from vitascope.formatting import canonical, counted, duration
from vitascope.models.config import ViTConfig
from vitascope.models.engines.compute import Compute
from vitascope.models.engines.engine import Engine
from vitascope.models.engines.features import OWN
from vitascope.models.sizes import ModelConfig
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.hub import cached_models, is_hub_id
from vitascope.models.weights.identification import pretrained_config
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.models.weights.transfer import check_single
from vitascope.training.evaluation.calibration import sharpness
from vitascope.training.linear.classifiers import STRENGTHS, Features, Floats, LogisticRegression
from vitascope.training.linear.selection import cross_validated, in_words
from vitascope.training.options.recipes import BUILT_IN, FEW_TO_START, FEW_TO_TUNE, TrainConfig
from vitascope.training.plan import Start, tuned
from vitascope.training.tasks.classify import engine_of

PUBLIC = {"facebook/deit-tiny-patch16-224": "23 MB, Apache 2.0", "facebook/dinov2-small": "88 MB, Apache 2.0"}
"""Small models of the hub, which are fetched where there is a network, with their size and licence."""
MOST_COMPARED = 2_000
"""Training images that bodies are compared on: the interval of an accuracy is then about 2 points wide."""
COMPARING = 0.25
"""The largest share of the minutes in which bodies are compared."""
TIMED = 8
"""Images of which a body's speed is measured."""
PASSES = 3
"""The time of a training step over that of a forward pass."""
SMALL_BODY = 5_000_000
"""Parameters below which `small-finetune` tunes a body better than `finetune`."""
TO_TUNE_SMALL, TO_ADAPT, TO_TUNE = 4_000, 10_000, 40_000
"""Images, with repetitions, from which on something is better than what is cheaper: tuning a small body, at 9
epochs of 450, which LoRA did not reach in that time; LoRA of others, at 20 epochs of 500; random weights and
large bodies, at 40 epochs of 1,000."""
SOLVED, HALF = 0.85, 0.5
"""Shares of the way from guessing to no error. Tuning on 500 images did not improve a body whose features go
0.87 of it; with one at 0.51, random weights were as good from 1,000 images on."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BodyScore:
    """A body (a MODEL argument), and how well its frozen features tell the training images' classes apart."""

    name: str
    config: ModelConfig
    score: Score
    guessing: float
    """The accuracy, or mAP, of an answer that is the same for all images."""
    seconds: float
    """For one forward pass, per image."""

    @property
    def value(self) -> float:
        """The cross-validated accuracy, or mAP."""
        return self.score.value_and_limits[0]

    @property
    def share(self) -> float:
        """The share of the way from guessing to no error."""
        return (self.value - self.guessing) / (1 - self.guessing)


def best_start(
    asked: TrainConfig, images: ImageSet, total: int, *, named: bool, device: str, began: float
) -> Start:
    """Compare the bodies at hand on the training images, and decide how a run starts.

    Args:
        asked: the options, with `weights=auto`.
        images: the training images, which alone choose.
        total: the number of images that are given to train on, with those drawn from them for other splits.
        named: whether the options name what is trained: a recipe, LoRA, the head alone, a teacher.
        device: that computes the features.
        began: the start of the run, in seconds of `time.monotonic`; the comparison counts as a part of it.

    Without a body that can read the images in time, the run starts as without `weights=auto`.

    Raises:
        UserError: a local body of `bodies` that cannot be loaded;
            one class, labels that are unknown, or images that cannot be divided into two folds.
    """
    if images.truth.partial:
        raise UserError(
            "weights=auto compares bodies on complete labels, and some of these are unknown: name the "
            f"weights, such as weights={BUILT_IN}, or set weights=none for random weights"
        )
    minutes = asked.optimization.minutes
    end = math.inf if minutes is None else began + 60 * minutes
    scores = list(_compared(asked, images, device, end))
    if not scores:
        plain = BUILT_IN if named or total <= FEW_TO_START else None
        recipe = None if named else "small-data" if plain is None else tuned(total)
        reason = "the usual start: no body at hand can compute the features of these images in time"
        log.warning(
            "weights=auto takes %s; more minutes, or another one of bodies, allow a comparison", reason
        )
        return Start(weights=plain, recipe=recipe, reasons=(reason,))
    best = max(scores, key=lambda body: body.value)  # the first of equals
    among = "the only body compared" if len(scores) == 1 else f"the best of {len(scores):,} bodies"
    chosen = (
        f"weights={best.name}, {among}: {in_words(best.score)} of the training images in cross-validation of "
        "logistic regression on frozen features"
    )
    if named:
        return Start(weights=best.name, recipe=None, reasons=(chosen,))
    quickest = min(body.seconds for body in scores)
    shown = max(0.0, end - time.monotonic()) / PASSES
    rare = images.truth.strata is not None and len(_foldable(division_of(images))) < len(images)
    fits = not rare and not asked.balance.balances
    start = decide(best, images.class_names, total, shown=shown, quickest=quickest, fits=fits)
    return start if start.weights is None else dataclasses.replace(start, reasons=(chosen, *start.reasons))


def decide(
    best: BodyScore,
    class_names: tuple[str, ...],
    images: int,
    *,
    shown: float,
    quickest: float,
    fits: bool = True,
) -> Start:
    """The start of a run from the best body, or from random weights.

    Args:
        best: of the bodies at hand.
        class_names: of the training images.
        images: their number.
        shown: the seconds for forward passes that the run has; infinite without a limit.
        quickest: the seconds for an image of the fastest body, for which those of a new small model count.
        fits: whether logistic regression can fit the head: it counts all images alike, and cross-validation
            needs two of every class.
    """
    most, small = shown / best.seconds, best.config.num_parameters < SMALL_BODY
    few, is_vit = images <= FEW_TO_START, isinstance(best.config, ViTConfig)
    known = set(map(canonical, class_names)) <= set(map(canonical, best.config.class_names))
    way = f"its features go {best.share:.0%} of the way from guessing ({best.guessing:.1%}) to no error"
    if few:
        against = f"{images:,} images, and up to {FEW_TO_START:,} are too few for them"
    elif known:
        against = "the body knows all classes"
    elif best.share > HALF:
        against = f"{way}, and they are better up to {HALF:.0%}"
    elif shown < TO_TUNE * quickest:
        against = f"there is time for {shown / quickest:,.0f} images, and they need {TO_TUNE:,}"
    else:
        reason = f"random weights: {images:,} images, and of the best body, {best.name}, {way}"
        return Start(weights=None, recipe="small-data", reasons=(reason,))
    time_for = "no limit of time" if math.isinf(most) else f"time for {most:,.0f} images, with repetitions"
    recipe, fits_head = "finetune", False
    if fits and few and (known or best.share >= SOLVED):
        why = "the body knows all classes" if known else way
        fits_head, reason = True, f"the head alone: {why}, and tuning on few images adds nothing then"
    elif fits and most < (least := TO_TUNE_SMALL if small else TO_ADAPT):
        fits_head, reason = True, f"the head alone: {time_for}, and more needs {least:,}"
    elif is_vit and not small and (few or most < TO_TUNE):
        parameters = f"{best.config.num_parameters / 1e6:.1f} M parameters"
        why = "few images" if few else f"less than {TO_TUNE:,} images, with repetitions,"
        recipe, reason = "lora", f"LoRA: {why} for {parameters}; {time_for}"
    else:
        recipe = "small-finetune" if small and images > FEW_TO_TUNE else recipe
        least = TO_TUNE_SMALL if small else TO_TUNE
        reason = f"the whole body is tuned, by {recipe}: {time_for}, and it needs {least:,}"
    alone = "not the head alone, whose fit counts all images alike and needs two of every class"
    reasons = (f"not random weights: {against}", *(() if fits else (alone,)), reason)
    return Start(weights=best.name, recipe=recipe, reasons=reasons, fits_head=fits_head)


def fitted_head(model: VisionModel, images: ImageSet, options: TrainConfig) -> tuple[Floats, Floats]:
    """The head of a body by logistic regression, whose strength cross-validation chooses, at the confidence
    that fits the images that a fold holds out: weight (K, D) and bias (K,)."""
    known, features, number, held_out = _fit(model, images, division_of(images), options)
    targets = known.targets
    ((weight, bias),) = LogisticRegression().only(number).fit(features, targets).maps
    factor = sharpness(targets, targets.logits(held_out))
    score = in_words(targets.score(held_out))
    print(f"head   logistic regression, C = {STRENGTHS[number]:g}, cross-validated: {score}", flush=True)
    return factor * weight, factor * bias


def _fit(
    model: VisionModel, images: ImageSet, division: Division, options: TrainConfig
) -> tuple[Division, Features, int, Features]:
    """Logistic regression on the body's own features, cross-validated: the images that can be read, their
    features (N, D), the number of the chosen strength, and their probabilities (N, K) when held out."""
    engine, compute = engine_of(model, options), Compute(workers=options.execution.workers)
    rows = list(with_progress(FeatureStream(engine, [OWN], images.sources, compute)))
    known = division.take(np.concatenate([block.indices for block in rows]))
    features = np.concatenate([block.features[0] for block in rows])  # (N, D)
    folds = known.folds(seed=options.seed)
    return known, features, *cross_validated(LogisticRegression(), features, known.targets, folds)


def _compared(asked: TrainConfig, images: ImageSet, device: str, end: float) -> Iterator[BodyScore]:
    """The scores of the bodies at hand, those that need no download first; a line says how each did, or why
    it is left out. `end` is that of the run."""
    from huggingface_hub import constants

    for name in asked.bodies:
        if not is_hub_id(name):
            pretrained_config(name)  # an error comes before anything that takes time
    some, division = _sample(images, asked.seed)
    targets, greatest = division.targets, greatest_value(some) if asked.levels is None else None
    guessing = targets.guessed
    present = (*asked.bodies, BUILT_IN, *cached_models())
    compared_until = time.monotonic() + COMPARING * (end - time.monotonic())
    for name in dict.fromkeys([*present, *(() if constants.HF_HUB_OFFLINE else PUBLIC)]):
        try:
            if time.monotonic() > compared_until:
                raise UserError(f"{COMPARING:.0%} of the minutes are over")
            if name not in present:
                print(f"body   {name} from the hub: {PUBLIC[name]}", flush=True)
            model, began = _prepared(name, asked, greatest).to(device), time.monotonic()
            reading = _seconds_per_image(engine_of(model, asked), some)  # and a forward pass
            if reading * len(some) > compared_until - began or reading * len(images) > end - began:
                whole = duration(reading * len(images))
                raise UserError(f"the features of {counted(len(images), 'image')} take {whole}, too long")
            known, _, _, held_out = _fit(model, some, division, asked)
        except UserError as error:
            log.warning("body %s is left out: %s", name, str(error).removeprefix(f"{name}: "))
            continue
        score, took = known.targets.score(held_out), duration(time.monotonic() - began)
        print(
            f"body   {name}: {in_words(score)} of {counted(len(some), 'training image')}, {took}", flush=True
        )
        seconds = _forward_seconds(model, asked)
        yield BodyScore(name=name, config=model.config, score=score, guessing=guessing, seconds=seconds)


def _prepared(name: str, asked: TrainConfig, greatest: int | None) -> VisionModel:
    """A body with the rule for pictures that the run would have; UserError if it reads no pictures."""
    model = from_pretrained(name)
    check_single("it", model.config)
    if model.config.in_channels not in (1, 3):
        raise UserError(f"pictures have 1 or 3 channels, and it reads {model.config.in_channels}")
    own = preprocess_of(model)
    own = own if asked.fit is None else own.fitted(asked.fit)
    levels = asked.levels or own.levels or ((0, greatest) if greatest else None)
    model.preprocess = dataclasses.replace(own, levels=levels)
    return model


def _seconds_per_image(engine: Engine, images: ImageSet) -> float:
    """Seconds to read an image and compute the body, without the cache; the first images warm up."""
    sources = images.sources[:TIMED]
    for _ in range(2):
        began = time.monotonic()
        stream = FeatureStream(
            engine, [OWN], sources, Compute(batch_size=len(sources), workers=0, cache=False)
        )
        for _ in stream:
            pass
    return (time.monotonic() - began) / len(sources)


def _forward_seconds(model: VisionModel, asked: TrainConfig) -> float:
    """Seconds of a forward pass, per image, in a batch as large as a training's unless that takes long."""
    engine, seconds = engine_of(model, asked), 0.0
    for count in (8, 64):
        size = (count, model.config.in_channels, *model.config.image_hw)
        pixels = torch.zeros(size, dtype=torch.uint8, device=engine.device)
        for _ in range(2):  # the first one warms up
            began = time.monotonic()
            engine.features(pixels, [OWN], batch_size=count)[0].cpu()  # waits for the device
            seconds = (time.monotonic() - began) / count
        if 64 * seconds > 1:
            break
    return seconds


def _sample(images: ImageSet, seed: int) -> tuple[ImageSet, Division]:
    """At most `MOST_COMPARED` of the images; of exclusive classes, those that two folds can have."""
    drawn = np.random.default_rng(seed).permutation(len(images))[:MOST_COMPARED]
    some = images.subset(images.name, np.sort(drawn))
    division = division_of(some)
    if division.targets.strata is not None:
        some = some.subset(images.name, _foldable(division))
        division = division_of(some)
    division.fold_count()  # an error comes before anything that takes time
    return some, division


def _foldable(division: Division) -> npt.NDArray[np.int64]:
    """The images of exclusive classes of which two folds can have some, ascending."""
    rows = [own for own in division.targets.by_class() if len(np.unique(division.sets[own])) > 1]
    return np.sort(np.concatenate([np.arange(0), *rows]))
