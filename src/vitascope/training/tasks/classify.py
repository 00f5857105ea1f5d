"""Classification of images, also by a teacher (Touvron et al. 2021, DeiT, section 4)."""

import dataclasses

import torch
from torch import Tensor, nn

from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet, absent_classes, check_every_class
from vitascope.data.targets import ClassIndices, Targets, shares_of
from vitascope.errors import UserError, check_choice, printable
from vitascope.models.engines.engine import Answers, Engine, TorchEngine
from vitascope.models.heads import DistilledHead, predicted, scores
from vitascope.models.preprocess import Preprocess
from vitascope.models.vision_model import VisionModel, evaluation_mode
from vitascope.models.vit import VisionTransformer
from vitascope.training.distributed import gather, print_first
from vitascope.training.evaluation.calibrate import calibrate_model
from vitascope.training.evaluation.measure import Evaluation, measure
from vitascope.training.evaluation.novelty import Novelty
from vitascope.training.options.groups import Balance, Distillation
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.tasks.losses import LOSSES, Criterion, Losses
from vitascope.training.tasks.task import Examples, Finished, Monitor, Sums
from vitascope.training.tasks.teachers import Teacher


class ModuleEngine(Engine):
    """A module in training, which may be sharded or return other dtypes: it is only called."""

    def __init__(
        self,
        module: nn.Module,
        preprocess: Preprocess,
        targets: Targets,
        device: torch.device,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self.module, self.preprocess, self.device, self.precision = module, preprocess, device, precision
        self.class_names, self.num_classes = targets.class_names, len(targets.class_names)
        self.meaning, self.thresholds = targets.outputs, targets.even_thresholds
        self.description = f"a module in training, on {device}"

    def answers(self, pixels: Tensor) -> Answers:
        """As `Engine.answers`."""
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            logits = self.module(self.preprocess.normalize(pixels.to(self.device))).float()
        return Answers(logits, scores(logits, self.meaning))


def engine_of(model: VisionModel, config: TrainConfig) -> TorchEngine:
    """The engine with which `vitascope evaluate` measures a finished model, on its device.

    The precision is the run's, but for fp16, which is for training.
    """
    asked = config.execution.precision
    precision = "auto" if asked == "fp16" else asked
    return TorchEngine(model, precision=precision, device=str(next(model.parameters()).device))


@dataclasses.dataclass(frozen=True)
class Classify:
    """Cross-entropy with label smoothing (Szegedy et al. 2016), binary cross-entropy, or one of the losses
    that weaken what is easy, which are not smoothed.

    With several classes per image, labels are bool (B, K) instead of int64 (B,).
    """

    preprocess: Preprocess
    criterion: Criterion = dataclasses.field(default_factory=Criterion)
    class_weights: Tensor | None = None
    """Of one class per image: weights of the images' losses by class, (K,), with the mean 1 over the training
    images. Of several: weights of the classes that apply, against 1 for those that do not."""
    kind: Losses = LOSSES[ClassIndices]
    """The losses of the kind of labels."""
    unknown: bool = False
    """Whether it may be unknown if an image has a class; such labels are -1 or, mixed, NaN."""
    balance: Tensor | None = None
    """Of one class per image: what its images count for in training, (K,), by their weights or by how often
    they are drawn. The loss that selects weights counts them so too."""

    @property
    def monitor(self) -> Monitor:
        """The validation value that selects weights."""
        return self.kind.monitor(self.balance)

    def module(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def loss(self, module: nn.Module, examples: Examples) -> tuple[Tensor, Sums]:
        """The mean loss, a scalar with gradients, and sums over the images: `loss`, `accuracy`, `count`."""
        logits = module(self.inputs(examples)).float()  # (B, K)
        loss = self.weighted_mean(self.label_losses(logits, examples.targets), examples.targets)
        return loss, classified(loss, logits, examples.labels)

    def inputs(self, examples: Examples) -> Tensor:
        """The module's input: normalized images, (B, C, H, W)."""
        return self.preprocess.normalize_(examples.images)

    def label_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each image, (B,), for logits (B, K) and labels (B,) or probabilities (B, K)."""
        known = None
        if self.unknown:
            targets = shares_of(targets)  # (B, K)
            known, targets = ~targets.isnan(), targets.nan_to_num()
        return self.kind.losses(self.criterion, logits, targets, self.class_weights, known)

    def weighted_mean(self, losses: Tensor, targets: Tensor) -> Tensor:
        """The mean of losses (B,) by the weights of the classes; see `Losses.weighted_mean`."""
        return self.kind.weighted_mean(losses, targets, self.class_weights)

    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """Cross-entropy without smoothing, without and with weights, and what `Task.validate` lists."""
        images = loader.images
        engine = ModuleEngine(module, self.preprocess, images.truth, loader.device, precision)
        with evaluation_mode(module):
            measured = measure(engine, loader, gather)
        return self.validated(measured)

    def validated(self, measured: Evaluation) -> dict[str, float]:
        """What `validate` returns, from the predictions of a split."""
        more = self.kind.validated(measured, self.balance)
        return {"loss": measured.loss, "accuracy": measured.accuracy, **more}

    def calibrate(self, finished: Finished) -> list[Novelty]:
        """Set the temperature, and of several classes per image the thresholds of the highest F1; else what
        the model knows about its answers."""
        model, config = finished.model, finished.config
        calibration = calibrate_model(
            model, lambda: engine_of(model, config), finished.val_loader, finished.train_loader, gather
        )
        print_first("answers " + "\n        ".join(calibration.lines()))
        return list(calibration.novelties)

    def test(self, finished: Finished) -> Evaluation:
        """Evaluate the finished model and print the result."""
        tested = measure(engine_of(finished.model, finished.config), finished.loader, gather)
        if tested.fitted:
            tested = dataclasses.replace(tested, fitted_to=len(tested.indices))
        score = tested.score
        lines = [
            f"{tested.split:<6} {score.result()}, after {finished.seconds:.1f} s of training",
            score.compared(),
            "" if tested.targets.trusted else tested.fitted_in_words(),  # the line above has thresholds
            score.warning(finished.run.better_start),
            absent_classes(finished.loader.images),
            *(f"left out: {printable(reason)}" for reason in tested.unreadable),
        ]
        print_first("\n       ".join(filter(None, lines)))
        return tested


def class_weights_of(balance: Balance, images: ImageSet) -> Tensor | None:
    """The weights (K,) of the training images' classes; None without any.

    Raises:
        UserError: a class that the images do not have; with `balanced`, one without images.
    """
    if balance.balances_loss:
        return balanced_weights(images)
    named = balance.weights_by_class()
    for name in named:
        check_choice("class", name, images.class_names)
    if not named:
        return None
    return torch.tensor([named.get(name, 1.0) for name in images.class_names])


def balanced_weights(images: ImageSet, option: str = "class_weights=balanced") -> Tensor:
    """The weight of each of K classes with n_c of N images, (K,): N / (K n_c), scikit-learn's "balanced".

    With several classes per image it is (N - n_c) / n_c: the images without the class over those with it.
    Errors name the option.

    Raises:
        UserError: a class without images.
    """
    check_every_class(images, option)
    return torch.from_numpy(images.truth.balanced_weights).float()


def right(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether an image's classes are predicted exactly, (B,), from logits (B, K); -1 labels do not count."""
    if labels.ndim == 1:
        return predicted(logits) == labels
    agrees = (logits > 0) == (labels > 0)
    return (agrees | (labels < 0) if labels.dtype == torch.int8 else agrees).all(dim=1)


def classified(loss: Tensor, logits: Tensor, labels: Tensor) -> Sums:
    """Sums over images from their mean loss, logits (B, K) and labels (B,) or, of several classes, (B, K)."""
    count = torch.full((), float(len(labels)), device=loss.device)  # a copy from the CPU would have to wait
    correct = right(logits, labels).sum()
    return {"loss": loss.detach() * count, "accuracy": correct, "count": count}


# Distillation: a teacher trains a second token


class BothHeads(nn.Module):
    """A student with separate outputs: images (B, C, H, W) -> logits (B, K) of both heads."""

    def __init__(self, body: VisionTransformer) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the class head and of the distillation head."""
        assert isinstance(self.body.head, DistilledHead)
        return self.body.head.both(self.body.embed(images))


class MeanOfHeads(nn.Module):
    """The mean of both heads' logits, (B, K); it only calls the module, which may be sharded."""

    def __init__(self, both: nn.Module) -> None:
        super().__init__()
        self.both = both

    def forward(self, images: Tensor) -> Tensor:
        """The mean of both heads' logits."""
        by_label, by_teacher = self.both(images)
        return (by_label + by_teacher) / 2


@dataclasses.dataclass(frozen=True)
class Distill(Classify):
    """Labels train the class token, a teacher the distillation token, with the same augmented images.

    The teacher's decision is never smoothed (section 4, "Hard-label distillation").
    """

    options: Distillation = dataclasses.field(kw_only=True)
    teacher: Teacher = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        theirs, ours = self.teacher.preprocess.channels, self.preprocess.channels
        if theirs != ours:
            raise UserError(
                f"teacher {self.teacher.name} takes images of {_channels(theirs)}, the student of "
                f"{_channels(ours)}: both must take the same"
            )

    def module(self, model: nn.Module) -> nn.Module:
        """The model with separate outputs; UserError if it does not have two heads."""
        assert isinstance(model, VisionTransformer)
        return BothHeads(model)

    def loss(self, module: nn.Module, examples: Examples) -> tuple[Tensor, Sums]:
        """(1 - w) label_loss(class head) + w L: L is that of equation 3 if hard, of equation 2 if soft.

        Class weights apply to both terms, as balanced sampling would; of several classes per image, to the
        first one.
        The sum `agree` counts how often the distillation head and the teacher predict the same class.
        """
        by_label, by_teacher = module(self.preprocess.normalize(examples.images))  # (B, K) each
        by_label, by_teacher = by_label.float(), by_teacher.float()
        taught = self.teacher(examples.images)  # (B, K)
        from_labels = self.label_losses(by_label, examples.targets)  # (B,)
        weight = self.options.distill_weight
        decided = self.kind.decided(taught)  # (B, K) or (B,)
        if self.options.distill == "soft":
            from_teacher = self.kind.divergence(by_teacher, taught, self.options.temperature)  # (B,)
        else:
            from_teacher = self.kind.of_decisions(by_teacher, decided)  # (B,)
        loss = self.weighted_mean((1 - weight) * from_labels + weight * from_teacher, examples.targets)
        sums = classified(loss, (by_label + by_teacher) / 2, examples.labels)
        return loss, sums | {"agree": right(by_teacher, decided).sum()}

    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """Cross-entropy and accuracy of both heads' mean; the teacher is not used."""
        return super().validate(MeanOfHeads(module), loader, precision)


def _channels(count: int) -> str:
    return {1: "1 channel (grey)", 3: "3 channels (colour)"}.get(count, f"{count} channels")
