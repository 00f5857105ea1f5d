"""Functions for the tests' processes. Imports no torch, because each process imports this module."""

import os
import time

from vitascope.errors import UserError
from vitascope.models.preprocess import Pixels, Preprocess

FIT = Preprocess(image_size=(4, 4), channels=1, mean=(0.5,), std=(0.5,))
ENDLESS = 100
"""The side, and any above it, of pictures whose decoding does not end."""
CRASHES = 50
"""The width of a picture whose decoding crashes."""


def endless_if_large(content: bytes) -> Pixels:
    pixels = FIT.whole_pixels(content)
    if pixels.shape[1] >= ENDLESS:
        time.sleep(600)
    if pixels.shape[2] == CRASHES:
        os._exit(9)
    return FIT.pixels(content)


def broken(content: bytes) -> Pixels:
    raise ArithmeticError("a fault of ours")


def no_model() -> None:
    raise UserError("no such model")
