"""Calls exporters and quantizers without their output, their telemetry and their changes of logging."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

TALKATIVE = ("torch.onnx", "torch.__trace", "onnxscript", "onnx_ir", "nncf")
"""Names of their loggers."""


@contextmanager
def silenced() -> Iterator[None]:
    """Let only errors through, and restore the process's settings of logging, warnings and telemetry.

    OpenVINO's converter leaves the root logger at errors only when it fails. The converter and NNCF report
    their use unless the environment variable CI is set; they read it when they are first used.
    """
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in (root, *loggers)]
    filters, handlers = [*root.filters], [*root.handlers]
    ci = os.environ.get("CI")
    os.environ["CI"] = "true"
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip((root, *loggers), levels, strict=True):
            logger.setLevel(level)
        root.filters[:], root.handlers[:] = filters, handlers
        if ci is None:
            del os.environ["CI"]
        else:
            os.environ["CI"] = ci
