"""Models that other libraries load; tests/peers/test_teachers.py compares their outputs."""

import sys
from pathlib import Path

import pytest
import torch

from vitascope.errors import UserError
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.foreign import open_foreign, probed_preprocess


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_missing_library_is_named_with_its_install_command(library: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        UserError, match=rf'{library}, which is not installed: pip install "vitascope\[peers\]"'
    ):
        open_foreign(f"{library}:some", "teacher")


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_broken_library_is_reported_as_broken(library: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / f"{library}.py").write_text(
        "try:\n    raise RuntimeError('operator torchvision::nms\\ndoes not exist')\n"
        "except RuntimeError as error:\n    raise ImportError('could not import') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError) as caught:
        open_foreign(f"{library}:some", "teacher")
    assert str(caught.value) == (
        f"teacher {library}:some cannot be loaded by {library}: ImportError: could not import "
        "(because of RuntimeError: operator torchvision::nms does not exist)"
    )


def test_missing_submodule_is_not_reported_as_a_missing_library(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "timm.py").write_text("import no_such_part")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"cannot be loaded by timm: ModuleNotFoundError: .*no_such_part"):
        open_foreign("timm:some", "teacher")


def test_processor_is_measured_by_its_output_colours() -> None:
    colours = torch.tensor([[0.0, 0, 0], [1, 1, 1], [1, 0, 0]]).view(3, 3, 1, 1)
    given = Preprocess(image_size=(6, 4), mean=(0.1, 0.4, 0.7), std=(0.2, 0.3, 0.6))
    answers = given.normalize(colours).expand(3, 3, 6, 4).clone()
    found = probed_preprocess("t", answers, colours)
    assert found.image_size == (6, 4)
    assert (*found.mean, *found.std) == pytest.approx((*given.mean, *given.std), abs=1e-6)
    bordered = answers.clone()
    bordered[:, :, 0] = 0
    for others in (answers.flip(1), bordered, answers[:, :1], torch.zeros(3, 3, 6, 4)):
        with pytest.raises(UserError, match="does more than resize"):
            probed_preprocess("t", others, colours)
