"""From a plan to the trainer of a run: its model, its task, its place on the device."""

import dataclasses
from typing import cast

import torch

from vitascope.data.splits import Splits
from vitascope.models.config import ViTConfig
from vitascope.models.hardware import reuse_freed_memory, without_tf32
from vitascope.models.lora import add_adapters
from vitascope.models.vision_model import VisionModel, build
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.preprocess import default_preprocess, preprocess_of
from vitascope.models.weights.transfer import transfer
from vitascope.training import distributed
from vitascope.training.announcement import other_starts
from vitascope.training.loop import Trainer
from vitascope.training.optimizers import freeze_body
from vitascope.training.options.recipes import BUILT_IN, FEW_TO_START, TrainConfig
from vitascope.training.placement import Placement, place
from vitascope.training.plan import Plan, Request, Start, inspect, resolve
from vitascope.training.run.run import Run
from vitascope.training.tasks.classify import Classify, Distill, balanced_weights, class_weights_of
from vitascope.training.tasks.losses import LOSSES, Criterion
from vitascope.training.tasks.masked import Masked, MaskedAutoencoding
from vitascope.training.tasks.task import Task
from vitascope.training.tasks.teachers import open_teacher
from vitascope.training.whitening import whiten


@dataclasses.dataclass(frozen=True)
class Opened:
    """A run before its trainer."""

    plan: Plan
    splits: Splits
    weights: VisionModel | None
    """The model to start from; None for random weights."""


def prepare(config: TrainConfig, splits: Splits) -> Opened:
    """Load the weights of a configuration, and make its plan for opened data."""
    return prepare_request(Request.of(config, None, {}), splits)


def prepare_request(request: Request, splits: Splits, start: Start | None = None) -> Opened:
    """Load the weights of a start, by default of those that are named, and make the plan for opened data."""
    source = request.config.weights if start is None else start.weights
    weights = None if source is None else from_pretrained(source)
    facts = inspect(splits, weights, levels=request.config.levels is None)
    return Opened(resolve(request, facts, start), splits, weights)


def build_trainer(run: Run, opened: Opened, device: torch.device) -> Trainer:
    """The trainer of a run before its first step."""
    reuse_freed_memory()
    without_tf32(device)
    plan, splits = opened.plan, opened.splits
    model = start_model(opened).to(device)
    if plan.config.optimization.steps == 0:
        from vitascope.training.linear.head import set_head
        from vitascope.training.start import fitted_head  # scipy delays the start of training

        set_head(model, *distributed.by_first(lambda: fitted_head(model, splits.train, plan.config)))
    placement = place(plan, model, device)
    task = make_task(plan.config, model, splits, placement)
    return Trainer(run, plan, model, task, splits, placement)


def start_model(opened: Opened) -> VisionModel:
    """The model before the first step, random or with trained weights."""
    options, config, weights = opened.plan.config, opened.plan.model, opened.weights
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = build(config)
    if isinstance(model, VisionTransformer):
        model.encoder.checkpointing = options.execution.gradient_checkpointing
    if weights is None:
        ours = default_preprocess(config).fitted(options.fit or "crop")
        model.preprocess = dataclasses.replace(ours, levels=options.levels)
        if options.optimization.whiten == "on":
            whiten(cast("VisionTransformer", model), opened.splits.train)
        return model
    theirs = preprocess_of(weights).at_size(config.image_hw)
    theirs = theirs if options.fit is None else theirs.fitted(options.fit)
    model.preprocess = dataclasses.replace(theirs, levels=options.levels)
    more = any(since for since, _ in options.optimization.lengths[:1])
    source = "its finished model" if more else str(options.weights)
    notes = transfer(weights, model, source)
    if opened.splits.channels == 3 and config.in_channels == 1:
        notes.append("this model is grey: colour images are converted to grey")
    rank = options.optimization.lora
    if rank is not None and isinstance(model, VisionTransformer):
        freeze_body(model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            add_adapters(model.encoder, rank)
    few = len(opened.splits.train) <= FEW_TO_START and options.weights == BUILT_IN
    advice = other_starts(opened.splits) if few and not opened.plan.start and options.fold is None else []
    distributed.print_first(
        f"start  from {source}: {'; '.join(notes)}" + "".join(f"\n       {line}" for line in advice)
    )
    return model


def make_task(options: TrainConfig, model: VisionModel, splits: Splits, placement: Placement) -> Task:
    """The task of a run."""
    preprocess, device = preprocess_of(model), placement.device
    if options.task == "masked":
        kind = MaskedAutoencoding if options.masking.target == "mae" else Masked
        return kind(masking=options.masking, config=cast("ViTConfig", model.config), preprocess=preprocess)
    weights = class_weights_of(options.balance, splits.train)
    weights = None if weights is None else weights.to(device)
    for images in (splits.val, splits.measured):
        images.truth.check_measurable(images.noun)
    truth = splits.train.truth
    balance = weights
    if options.balance.sampling == "balanced":
        balance = balanced_weights(splits.train, "balanced sampling").to(device)
        balance = balance if weights is None else balance * weights
    criterion = Criterion.of(options.optimization)
    common = (preprocess, criterion, weights, LOSSES[type(truth)], truth.partial, balance)
    distillation = options.distillation
    if distillation.teacher is None:
        return Classify(*common)
    teacher = open_teacher(
        distillation.teacher,
        splits.train.class_names,
        outputs=model.config.outputs,
        device=device,
        precision=placement.precision,
    )
    return Distill(*common, options=distillation, teacher=teacher)
