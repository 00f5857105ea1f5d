"""The fingerprint of a result file: everything that its predictions depend on, checked before a resume."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vitascope.predict.engine import Engine
from vitascope.predict.selection import ClassSelection

FULL = 64
"""Images of a full batch, whose precision a file names."""
TEST_IMAGES = 16
NAMED = 3
"""Changes of class names, and of thresholds, that are listed."""
TOLERANCE = 0.01
"""The largest difference of a test image's probability: bf16 differs by this much between processors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Options of a prediction, and an engine recognized by its predictions of synthetic images."""

    engine: str
    """Description of the engine, for people; a different one may resume."""
    top_k: int | None
    """The most classes per image; None for no limit."""
    thresholds: list[float] = dataclasses.field(default_factory=list)
    """Of each class; empty where one class applies, and in files of earlier versions."""
    probabilities: bool = False
    """Whether each row has the probabilities of all classes."""
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    """The columns of a table that each row has too, with a digest of their cells each."""
    num_classes: int
    class_names: list[str]
    preprocess: dict[str, Any]
    test_answers: list[list[Any]]
    """The most probable class of each test image, and its probability."""

    def __post_init__(self) -> None:
        """Raise a ValueError or TypeError for values of a damaged file, which `of` cannot compute."""
        are_lists = isinstance(self.class_names, list) and isinstance(self.thresholds, list)
        are_objects = isinstance(self.preprocess, dict) and isinstance(self.kept, dict)
        fits = are_lists and are_objects and len(self.test_answers) == TEST_IMAGES
        classes = range(self.num_classes)
        for index, score in self.test_answers:
            fits = fits and isinstance(index, int) and index in classes and isinstance(score, float)
        if not fits:
            raise ValueError("not the values of a fingerprint")

    @classmethod
    def of(
        cls, engine: Engine, selection: ClassSelection, *, probabilities: bool, kept: Mapping[str, str]
    ) -> Fingerprint:
        """Compute the fingerprint; the engine predicts `TEST_IMAGES` images."""
        scores, indices = _probabilities_of_waves(engine).max(dim=1)
        return cls(
            engine=engine.description.replace(
                "auto precision", f"auto precision ({engine.precision_for(FULL)})"
            ),
            top_k=selection.limit(engine),
            thresholds=list(selection.thresholds(engine)),
            probabilities=probabilities,
            kept=dict(kept),
            num_classes=engine.num_classes,
            class_names=list(engine.class_names),
            preprocess=engine.preprocess.to_dict(),
            test_answers=[list(pair) for pair in zip(indices.tolist(), scores.tolist(), strict=True)],
        )

    def differences(
        self, engine: Engine, selection: ClassSelection, *, probabilities: bool, kept: Mapping[str, str]
    ) -> list[str]:
        """List what differs, such as `top_k was 5, not 3`; empty if nothing does."""
        before: dict[str, Any] = {"top_k": self.top_k, "probabilities": self.probabilities}
        now = {"top_k": selection.limit(engine), "probabilities": probabilities}
        others = [name for name in kept if self.kept.get(name, kept[name]) != kept[name]]
        found = [
            *_changes(before, now),
            *_changes({"columns kept": list(self.kept)}, {"columns kept": list(kept)}),
            *(f"the column {name} had other cells" for name in others[:NAMED]),
            *_changes({"num_classes": self.num_classes}, {"num_classes": engine.num_classes}),
            *_changes(self.preprocess, engine.preprocess.to_dict()),
            *_some_changes("class", "class names", self.class_names, engine.class_names),
            *_some_changes("threshold", "thresholds", self.thresholds, selection.thresholds(engine)),
        ]
        if found:
            return found
        for row, (index, score) in zip(
            _probabilities_of_waves(engine).tolist(), self.test_answers, strict=True
        ):
            if abs(row[index] - score) > TOLERANCE:
                label = engine.label(index)
                return [f"its model gave class {label} {score:.1%} on a test image, not {row[index]:.1%}"]
        return []


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            yield f"{name} was {before.get(name)!r}, not {now.get(name)!r}"


def _some_changes(one: str, many: str, before: Sequence[Any], now: Sequence[Any]) -> list[str]:
    """The first changes of values of each class, and the number of the others."""
    changes = list(
        _changes(*({f"{one} {k}": value for k, value in enumerate(each)} for each in (before, now)))
    )
    more = [f"{len(changes) - NAMED:,} more {many} differ"] if len(changes) > NAMED else []
    return changes[:NAMED] + more


def _probabilities_of_waves(engine: Engine) -> Tensor:
    """Probabilities of the test images, (TEST_IMAGES, K)."""
    return engine.predict([engine.pixels(waves(number)) for number in range(TEST_IMAGES)])


def waves(number: int, size: int = 64) -> npt.NDArray[np.uint8]:
    """An image of coloured waves, different for each number, uint8 (size, size, 3)."""
    y, x = np.mgrid[:size, :size] / size
    planes = [
        np.sin(2 * math.pi * ((number % 4 + channel) * x + (number // 4 + 1) * y) + number * (channel + 1))
        for channel in range(3)
    ]
    return np.rint(127.5 + 127.5 * np.stack(planes, axis=2)).astype(np.uint8)
