"""OpenVINO's converter and NNCF report their use to their makers without asking; here they do not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Import and call them within this: they decide on their first use, and send nothing from a CI job.

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
