"""Data and weights that tests only read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import small_model
from tests.training import undrawn, write_folder
from vitascope.models.weights.loading import save_pretrained
from vitascope.training.loop import Trainer


@pytest.fixture(scope="module")
def without_figures() -> Iterator[None]:
    with undrawn():
        yield


@pytest.fixture
def unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end before their first step."""

    def stop(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", stop)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "greys")


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photos") / "photos", per_class=6, side=300)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(small_model(), tmp_path_factory.mktemp("weights") / "small")
