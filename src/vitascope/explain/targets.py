"""What an explanation is about: a class, one class against another, or likeness in feature space.

A gradient or an occlusion explains a number. A `Target` makes that number of a model's answer.
"""

from __future__ import annotations

import dataclasses
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.errors import UserError, nearest
from vitascope.model.sizes import ModelConfig

MAX_DIGITS = 18
"""Digits of a class number given as text: int() rejects text that is long enough."""
MAX_ECHO = 200
"""Characters of an unknown class name in the message about it."""


class Target(ABC):
    """A number for each image, from a model's answer to it."""

    @abstractmethod
    def score(self, pooled: Tensor, logits: Tensor) -> Tensor:
        """(B, D) as `embed` gives it and (B, K) -> (B,), differentiable."""

    @abstractmethod
    def of(self, image: int) -> Target:
        """The same question about one image of the batch, to ask of any number of its variants."""

    @abstractmethod
    def check(self, config: ModelConfig, images: int) -> None:
        """Refuse what cannot be asked of a model about so many images.

        Raises:
            UserError: as `as_target` says.
        """


@dataclasses.dataclass(frozen=True)
class ClassScore(Target):
    """The logit of a class."""

    classes: Tensor
    """int64 (B,), one an image; or (1,), the same for all."""

    def score(self, pooled: Tensor, logits: Tensor) -> Tensor:
        """The logits (B,) of the classes."""
        return _chosen(logits, self.classes)

    def of(self, image: int) -> ClassScore:
        """The class of one image."""
        return ClassScore(_only(self.classes, image))

    def check(self, config: ModelConfig, images: int) -> None:
        """Refuse classes that the model has not, and another number of them than there are images."""
        _check_classes("classes", self.classes, config, images)


@dataclasses.dataclass(frozen=True)
class ClassDifference(Target):
    """How far the logit of one class is above that of another: why this, and not that."""

    classes: Tensor
    """int64 (B,) or (1,): the classes that are asked for."""
    versus: Tensor
    """int64 (B,) or (1,): those that they are compared with."""

    def score(self, pooled: Tensor, logits: Tensor) -> Tensor:
        """The differences (B,)."""
        return _chosen(logits, self.classes) - _chosen(logits, self.versus)

    def of(self, image: int) -> ClassDifference:
        """The two classes of one image."""
        return ClassDifference(_only(self.classes, image), _only(self.versus, image))

    def check(self, config: ModelConfig, images: int) -> None:
        """Refuse classes that the model has not, and another number of them than there are images."""
        _check_classes("classes", self.classes, config, images)
        _check_classes("versus", self.versus, config, images)


@dataclasses.dataclass(frozen=True)
class FeatureCosine(Target):
    """The cosine between an image's representation and a given one: why these two are alike.

    Works for models without classes too. Of another image, `model.embed` gives the representation.
    """

    features: Tensor
    """(B, D), one an image, or (1, D), the same for all; D as `model.embed` gives it."""

    def score(self, pooled: Tensor, logits: Tensor) -> Tensor:
        """The cosines (B,)."""
        if self.features.shape[1] != pooled.shape[1]:
            raise UserError(
                f"a cosine target takes features (B, {pooled.shape[1]}), as `model.embed` gives them, "
                f"not {tuple(self.features.shape)}"
            )
        return F.cosine_similarity(pooled.float(), self.features.to(pooled.device).float(), dim=1)

    def of(self, image: int) -> FeatureCosine:
        """The features of one image."""
        return FeatureCosine(_only(self.features, image))

    def check(self, config: ModelConfig, images: int) -> None:
        """Refuse features that are no batch, and another number of them than there are images."""
        if self.features.ndim != 2:
            raise UserError(
                "a cosine target takes features (B, D), as `model.embed` gives them, "
                f"not {tuple(self.features.shape)}"
            )
        _check_number("features", len(self.features), images)


TargetLike: TypeAlias = "Target | int | str | Sequence[int | str] | Tensor | None"
"""A class by number or name, one for each image, a `Target`, or None: the class that the model predicts."""


def as_target(target: TargetLike, config: ModelConfig, logits: Tensor) -> Target:
    """The `Target` that an argument means.

    Args:
        target: see `TargetLike`.
        config: the model's.
        logits: the model's answer (B, K) to the images as they are.

    Raises:
        UserError: no such class, naming the valid ones; as many classes as there are no images; classes of
            a model without a head.
    """
    if isinstance(target, Target):
        target.check(config, len(logits))
        return target
    _check_gives_classes(config)
    if target is None:
        return ClassScore(logits.detach().argmax(dim=1))
    asked = target.tolist() if isinstance(target, Tensor) else target
    several = list(asked) if isinstance(asked, Iterable) and not isinstance(asked, str) else [asked]
    indices = [class_index(one, config) for one in several]
    _check_number("classes", len(indices), len(logits))
    return ClassScore(torch.tensor(indices, device=logits.device))


def class_index(label: object, config: ModelConfig) -> int:
    """The number of a class that is given by number or name.

    Raises:
        UserError: no such class, naming the range or the nearest name; neither a number nor a name.
    """
    names = config.class_names
    if isinstance(label, str) and label in names:
        return names.index(label)
    if isinstance(label, str) and not (label.isdecimal() and len(label) <= MAX_DIGITS):
        near = nearest(label[:MAX_ECHO], names) if names else ""
        raise UserError(f"no class {label[:MAX_ECHO]!r}{near}; {_known(config)}")
    if not isinstance(label, str | SupportsIndex) or isinstance(label, bool):
        raise UserError(f"a class is a whole number or a name, not {label!r}; {_known(config)}")
    index = int(label) if isinstance(label, str) else operator.index(label)
    if not 0 <= index < config.num_classes:
        raise UserError(f"no class {index}; {_known(config)}")
    return index


def _check_gives_classes(config: ModelConfig) -> None:
    if not config.gives_classes:
        raise UserError(
            "this model has no head: it gives features, not classes; explain a `FeatureCosine` target"
        )


def _check_classes(name: str, classes: Tensor, config: ModelConfig, images: int) -> None:
    """Refuse what are no classes (B,) or (1,) of a model and so many images."""
    _check_gives_classes(config)
    if classes.ndim != 1 or classes.dtype != torch.int64:
        raise UserError(f"{name} must be int64 (B,) or (1,), not {classes.dtype} {tuple(classes.shape)}")
    _check_number(name, len(classes), images)
    for index in classes.tolist():
        class_index(index, config)


def _check_number(name: str, given: int, images: int) -> None:
    if given not in (1, images):
        raise UserError(f"{given} {name} for {images} images: give one for all, or one an image")


def _known(config: ModelConfig) -> str:
    """Which classes a model has, for messages."""
    text = f"the model has {config.num_classes}, 0 to {config.num_classes - 1}"
    names = config.class_names
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return f"{text}: {shown}" if names else text


def _chosen(logits: Tensor, classes: Tensor) -> Tensor:
    """One logit of each image: (B, K), (B,) or (1,) -> (B,)."""
    index = classes.to(logits.device).clone()  # one of inference mode cannot be kept for a gradient
    return logits.gather(1, index.expand(len(logits))[:, None])[:, 0]


def _only(values: Tensor, image: int) -> Tensor:
    """The row of one image, or the one row that all share: (B, ...) -> (1, ...)."""
    return values if len(values) == 1 else values[image : image + 1]
