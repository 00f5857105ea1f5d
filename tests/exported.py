"""One small model, exported once per format for all tests that only read the file."""

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.data import noise
from tests.models import small_model, with_preprocess
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer

NAMES = ("ant", "bee", "cat", "dog", "emu")


def exportable_model() -> VisionTransformer:
    """The model of the exported files; its preprocessing crops."""
    return with_preprocess(
        small_model(class_names=NAMES, depth=1),
        Preprocess(image_size=(32, 32), crop_pct=0.9, interpolation="bilinear"),
    )


def export_small(folder: Path, suffix: str) -> Path:
    """Export the model to a file that takes pictures, once for all processes of pytest-xdist."""
    from vitascope.deploy.export.export import export
    from vitascope.deploy.export.formats import FORMATS
    from vitascope.storage import locked

    format = next(name for name, kind in FORMATS.items() if kind.suffix == suffix)
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parents[1]  # this process's temporary folder lies in that of all processes
    path = folder / f"small{suffix}"
    with locked(folder / f"small{suffix}.lock", wait=True):
        if not path.exists():
            export(exportable_model(), path, format=format, images=noise(40, 36))
    return path


def write_copies(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Let `export` copy the model's file instead of tracing the model; everything else runs."""
    from vitascope.deploy.export import export as module
    from vitascope.deploy.export.formats import FORMATS
    from vitascope.models.engines.runtimes import files_of

    def copy(_: object, path: Path, metadata: Mapping[str, str]) -> None:
        for source in files_of(file):
            shutil.copyfile(source, path.with_suffix(source.suffix))

    monkeypatch.setattr(module, "traced", lambda *_: None)
    for name, kind in list(FORMATS.items()):
        monkeypatch.setitem(FORMATS, name, dataclasses.replace(kind, write=copy))


@contextmanager
def copied_exports(file: Path) -> Iterator[None]:
    """Exports copy a file that was written once, and are compared with nothing."""
    from vitascope.models.weights.agreement import agreement

    alike = agreement(torch.ones(1, 2), torch.ones(1, 2), 1e-3, "logits")
    with pytest.MonkeyPatch.context() as patch:
        write_copies(patch, file)
        patch.setattr(import_module("vitascope.deploy.export.export"), "compare_outputs", lambda *_: alike)
        yield
