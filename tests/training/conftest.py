"""Tiny runs do not wait for the disk, except where tests look at that."""

import os
from collections.abc import Iterator

import pytest

WRITING = ("test_faults.py", "test_folders.py")


@pytest.fixture(autouse=True, scope="module")
def _no_fsync(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in WRITING:
            patch.setattr(os, "fsync", lambda descriptor: None)
        yield
