"""Tiny runs skip fsync, except in the tests of it."""

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
