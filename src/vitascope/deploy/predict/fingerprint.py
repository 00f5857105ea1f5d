"""What made a file of answers, so that nothing else goes on with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vitascope.deploy.predict.engine import Engine

TEST_PICTURES = 16
TOLERANCE = 0.01
"""How far the probability of a test picture may be off: bf16 differs by this much between processors."""


def origin_of(engine: Engine, top_k: int) -> dict[str, Any]:
    """Plain values: what answers depend on, and `engine`, what gave them, for people.

    An engine is known by its answers to made-up pictures, whatever it runs in: the most probable class of
    each and its probability.
    """
    scores, indices = _test_probabilities(engine).max(dim=1)
    return {
        "engine": engine.description,
        "top_k": top_k,
        "num_classes": engine.num_classes,
        "class_names": list(engine.class_names),
        "preprocess": engine.preprocess.to_dict(),
        "test_answers": [list(pair) for pair in zip(indices.tolist(), scores.tolist(), strict=True)],
    }


def differences(origin: Mapping[str, Any], engine: Engine, top_k: int) -> list[str]:
    """In what an origin differs from what would go on, in words: `top_k was 5, not 3`; empty in nothing."""
    names = list(_changes(_numbered(origin["class_names"]), _numbered(engine.class_names)))
    more = [f"{len(names) - 3:,} more class names differ"] if len(names) > 3 else []
    numbers = {"top_k": top_k, "num_classes": engine.num_classes}
    found = [
        *_changes({name: origin[name] for name in numbers}, numbers),
        *_changes(origin["preprocess"], engine.preprocess.to_dict()),
        *(names[:3] + more),
    ]
    return found or _other_answers(origin["test_answers"], engine)


def _other_answers(known: Sequence[tuple[int, float]], engine: Engine) -> list[str]:
    probabilities = _test_probabilities(engine)
    for row, (index, score) in zip(probabilities.tolist(), known, strict=True):
        if abs(row[index] - score) > TOLERANCE:
            return [f"its model gave class {engine.label(index)} {score:.1%} in a test, not {row[index]:.1%}"]
    return []


def _numbered(names: Sequence[str]) -> dict[str, str]:
    return {f"class {number}": name for number, name in enumerate(names)}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            yield f"{name} was {before.get(name)!r}, not {now.get(name)!r}"


def _test_probabilities(engine: Engine) -> Tensor:
    """Probabilities of the test pictures, (TEST_PICTURES, K)."""
    return engine.predict([engine.pixels(waves(number)) for number in range(TEST_PICTURES)])


def waves(number: int, size: int = 64) -> npt.NDArray[np.uint8]:
    """A picture of three colours in waves, another for each number, uint8 (size, size, 3)."""
    y, x = np.mgrid[:size, :size] / size
    planes = [
        np.sin(2 * math.pi * ((number % 4 + channel) * x + (number // 4 + 1) * y) + number * (channel + 1))
        for channel in range(3)
    ]
    return np.rint(127.5 + 127.5 * np.stack(planes, axis=2)).astype(np.uint8)
