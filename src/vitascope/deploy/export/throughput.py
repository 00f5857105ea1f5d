"""Timing of engines in turns, so that a machine that slows down meanwhile slows down all of them alike."""

import time
from collections.abc import Callable, Sequence

import torch

from vitascope.models.engines.engine import Engine

Step = Callable[[], object]
"""A function to time."""


def timed_step(engine: Engine, batch_size: int) -> Step:
    """From a batch of random pixels, bytes on the CPU, to outputs there; other pixels take as long."""
    shape = (batch_size, engine.preprocess.channels, *engine.preprocess.image_size)
    pixels = torch.randint(256, shape, dtype=torch.uint8)
    return lambda: engine.outputs(pixels)


def take_turns(steps: Sequence[Step], *, rounds: int, seconds: float | None = None) -> list[list[float]]:
    """Seconds of each call of each step, in rounds of one call per step, after a call to warm up.

    With `seconds` in all, a step repeats for its equal part of each round; when they are over, none repeats.
    """
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step()  # one-time initialization
    over = float("inf") if seconds is None else time.perf_counter() + seconds
    for _ in range(rounds):
        for step, found in zip(steps, times, strict=True):
            begun = time.perf_counter()
            if found and begun >= over:
                continue
            end = begun + (seconds or 0) / (rounds * len(steps))
            while True:
                start = time.perf_counter()
                step()
                now = time.perf_counter()
                found.append(now - start)
                if now >= end:
                    break
    return times
