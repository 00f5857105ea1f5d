"""Targets: the number per image, from a model's output, that a gradient or an occlusion explains."""

import dataclasses
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Self, SupportsIndex, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.analysis.explain.inputs import as_images, pooled_and_logits
from vitascope.errors import UserError, suggestion
from vitascope.formatting import canonical
from vitascope.models.heads import predicted
from vitascope.models.sizes import ModelConfig
from vitascope.models.vision_model import VisionModel

MAX_DIGITS = 18
"""Digits of a class number given as text: int() rejects very long text."""
MAX_ECHO = 200
"""Characters of an unknown class name that its error repeats."""


@dataclasses.dataclass(frozen=True)
class Target(ABC):
    """A number per image, computed from a model's output; fields are tensors of B rows, or of one for all."""

    @abstractmethod
    def score(self, pooled: Tensor, logits: Tensor) -> Tensor:
        """From `embed`'s output (B, D) and the logits (B, K) to (B,); differentiable."""

    def select(self, image: int) -> Self:
        """The target of one image of the batch, for any number of its variants."""
        rows = (
            values if len(values) == 1 else values[image : image + 1] for values in self._tensors().values()
        )
        return type(self)(*rows)

    def check(self, config: ModelConfig, images: int) -> None:
        """Reject a target that does not suit a model and a number of images."""
        for name, values in self._tensors().items():
            _check_number(name, len(values), images)

    def _tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class _ClassTarget(Target):
    """A target about classes."""

    classes: Tensor
    """int64 (B,), one per image; or (1,), the same for all."""

    def check(self, config: ModelConfig, images: int) -> None:
        _check_gives_classes(config)
        for classes in self._tensors().values():
            for label in classes.tolist():
                class_index(label, config)
        super().check(config, images)


@dataclasses.dataclass(frozen=True)
class ClassScore(_ClassTarget):
    """The logit of a class."""

    def score(self, pooled: Tensor, logits: Tensor) -> Tensor:
        return _chosen(logits, self.classes)


@dataclasses.dataclass(frozen=True)
class ClassDifference(_ClassTarget):
    """The logit of one class minus the logit of another: the reason for the first rather than the second."""

    versus: Tensor
    """int64 (B,) or (1,): the classes to compare `classes` with."""

    def score(self, pooled: Tensor, logits: Tensor) -> Tensor:
        return _chosen(logits, self.classes) - _chosen(logits, self.versus)


@dataclasses.dataclass(frozen=True)
class FeatureCosine(Target):
    """The cosine between an image's representation and a given one: the likeness of two images.

    Works for models without classes too. `model.embed` returns the representation of another image.
    """

    features: Tensor
    """(B, D), one per image, or (1, D), the same for all; D as in `model.embed`."""

    def score(self, pooled: Tensor, logits: Tensor) -> Tensor:
        return F.cosine_similarity(pooled.float(), self.features.to(pooled.device).float(), dim=1)

    def check(self, config: ModelConfig, images: int) -> None:
        if self.features.shape[1:] != (config.feature_dim,):
            raise UserError(
                f"a cosine target needs features (B, {config.feature_dim}) from `model.embed`, "
                f"not {tuple(self.features.shape)}"
            )
        super().check(config, images)


TargetLike: TypeAlias = Target | int | str | Sequence[int | str] | Tensor | np.ndarray[Any, Any] | None
"""A class by number or name, one per image, a `Target`, or None: the predicted class."""


def as_target(target: TargetLike, config: ModelConfig, logits: Tensor) -> Target:
    """Make a `Target` of a target argument; `logits` (B, K) are the model's, for the unchanged images."""
    if isinstance(target, Target):
        target.check(config, len(logits))
        return target
    _check_gives_classes(config)
    if target is None:
        return ClassScore(predicted(logits.detach()))
    labels = target.tolist() if isinstance(target, Tensor | np.ndarray) else target
    labels = list(labels) if isinstance(labels, Iterable) and not isinstance(labels, str) else [labels]
    indices = [class_index(label, config) for label in labels]
    _check_number("classes", len(indices), len(logits))
    return ClassScore(torch.tensor(indices, device=logits.device))


def as_classes(target: TargetLike, config: ModelConfig, logits: Tensor) -> ClassScore:
    """As `as_target`, for measures of one class per image; any other `Target` is a `UserError`."""
    classes = as_target(target, config, logits)
    if not isinstance(classes, ClassScore):
        raise UserError(f"give one class per image by number or name, not a {type(classes).__name__}")
    return classes


def score_gradient(model: VisionModel, states: Tensor, pooled: Tensor, target: TargetLike) -> Tensor:
    """The gradient of the target's score by the states that the pooled features (B, D) follow from."""
    logits = model.head(pooled)
    score = as_target(target, model.config, logits).score(pooled, logits)
    return torch.autograd.grad(score.sum(), states)[0]


def question(
    model: VisionModel, target: TargetLike = None, *, versus: int | str | None = None, like: Any = None
) -> TargetLike:
    """The target for a class, for a class rather than another (`versus`), or for the likeness to a picture or
    image (1, C, H, W) (`like`)."""
    if like is not None:
        if target is not None:
            raise UserError("target and like exclude each other: give one of them")
        return FeatureCosine(pooled_and_logits(model, as_images(model, like))[0])
    if versus is None:
        return class_index(target, model.config) if isinstance(target, str) else target
    if target is None:
        raise UserError("versus needs the class to compare with it: add target")
    both = (torch.tensor([class_index(name, model.config)]) for name in (target, versus))
    return ClassDifference(*both)


def class_index(label: object, config: ModelConfig) -> int:
    """The number of a class given by number or name; an unknown one raises UserError with the valid ones."""
    _check_gives_classes(config)
    names = tuple(map(canonical, config.class_names))
    if isinstance(label, str) and canonical(label) in names:
        return names.index(canonical(label))
    if isinstance(label, str):
        index = int(label) if label.isdecimal() and len(label) <= MAX_DIGITS else -1
    elif isinstance(label, SupportsIndex) and not isinstance(label, bool):
        index = operator.index(label)
    else:
        raise UserError(f"a class is a whole number or a name, not {label!r}; {_known(config)}")
    if not 0 <= index < config.num_classes:
        text = str(label)[:MAX_ECHO]
        shown = repr(text) if isinstance(label, str) else text
        raise UserError(f"no class {shown}{suggestion(text, names) if names else ''}; {_known(config)}")
    return index


def _check_gives_classes(config: ModelConfig) -> None:
    if not config.gives_classes:
        raise UserError(
            "this model has no head for classes, so there is no class to explain: explain a `FeatureCosine` "
            "target (the likeness to another picture), or use attention or rollout"
        )


def _check_number(name: str, count: int, images: int) -> None:
    if count not in (1, images):
        raise UserError(f"{count} {name} for {images} images: give one for all, or one per image")


def _known(config: ModelConfig) -> str:
    text = f"the model has {config.num_classes}, 0 to {config.num_classes - 1}"
    names = config.class_names
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return f"{text}: {shown}" if names else text


def _chosen(logits: Tensor, classes: Tensor) -> Tensor:
    """One logit per image: (B, K), (B,) or (1,) -> (B,)."""
    # A copy, because an inference tensor cannot be saved for a gradient.
    index = classes.to(logits.device, torch.int64, copy=True)
    return logits.gather(1, index.expand(len(logits))[:, None])[:, 0]
