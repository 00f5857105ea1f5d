"""Exporters and quantizers talk, report their use and change the process's logging; here they do not."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

TALKATIVE = ("torch.onnx", "torch.__trace", "onnxscript", "onnx_ir", "nncf")
"""Their loggers."""


@contextmanager
def silenced() -> Iterator[None]:
    """Import and call them within this: only their errors are heard, and the process's settings stay."""
    loggers = [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), root_logger_kept(), without_telemetry(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """OpenVINO's converter, when it fails, leaves the root logger at errors only, for the whole program."""
    root = logging.getLogger()
    level, filters, handlers = root.level, [*root.filters], [*root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        root.filters[:], root.handlers[:] = filters, handlers


@contextmanager
def without_telemetry() -> Iterator[None]:
    """OpenVINO's converter and NNCF decide on their first use, and send nothing from a CI job.

    A process that has used them before has decided already.
    """
    before = os.environ.get("CI")
    os.environ["CI"] = "true"  # how they know one
    try:
        yield
    finally:
        if before is None:
            del os.environ["CI"]
        else:
            os.environ["CI"] = before
