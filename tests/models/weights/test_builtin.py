"""The built-in model: its name, its files, its card, and the photographs that it should recognize."""

import os
import re
import stat
from pathlib import Path

import pytest
import torch
from benchmarks.ship import ACCURACY, PAGES, accuracy_of
from safetensors.torch import load_file

import vitascope as vs
from tests.models import small_model
from vitascope.data.samples import PHOTOS
from vitascope.models.decoding import read_image
from vitascope.models.weights.builtin import DEFAULT, NAMES, built_in, model_in_words
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.identification import locate
from vitascope.models.weights.loading import save_pretrained
from vitascope.training.run.run import lasting_paths

FOLDER = Path(vs.__file__).parent / "models" / "weights" / "builtin" / DEFAULT
MAX_BYTES = 2_500_000
MAX_PHOTO_BYTES = 40_000


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_name_is_resolved_to_the_folder_in_the_package() -> None:
    assert built_in(DEFAULT) == locate(DEFAULT) == FOLDER
    assert built_in("cifar100") is built_in(FOLDER) is None
    assert model_in_words(DEFAULT) == "cifar10 (built in)"


def test_folder_of_images_does_not_hide_it() -> None:
    Path(DEFAULT, "train", "cat").mkdir(parents=True)
    Path(DEFAULT, "data_batch_1").write_bytes(b"images")
    assert locate(DEFAULT) == FOLDER
    given = {"data": DEFAULT, "weights": DEFAULT, "teacher": None}
    assert lasting_paths(given) == {"data": os.path.abspath(DEFAULT), "weights": DEFAULT}


@pytest.mark.parametrize("place", [DEFAULT, f"{DEFAULT}/model"])
def test_model_or_run_of_its_name_in_the_working_directory_comes_first(place: str) -> None:
    save_pretrained(small_model(), place)
    Path(DEFAULT, "config.yaml").touch()
    assert locate(DEFAULT) == Path(place)
    assert model_in_words(DEFAULT) == DEFAULT


def test_weights_without_settings_come_first_too() -> None:
    Path(DEFAULT).mkdir()
    Path(DEFAULT, "weights.pth").touch()
    assert locate(DEFAULT) == Path(DEFAULT)
    assert built_in(DEFAULT) is None


def test_it_has_no_revisions() -> None:
    with pytest.raises(CheckpointError, match="cifar10 is built in; revision 'v1' has no meaning for it"):
        vs.from_pretrained(DEFAULT, revision="v1")


def test_error_for_an_unknown_name_lists_it() -> None:
    with pytest.raises(CheckpointError, match=r"^cifar: no such model; nearest: cifar10; .*built-in cifar10"):
        vs.from_pretrained("cifar")


def test_weights_in_half_precision_are_loaded_as_float32_without_a_change() -> None:
    stored = load_file(FOLDER / "model.safetensors")
    loaded = vs.from_pretrained(DEFAULT).state_dict()
    assert stored.keys() == loaded.keys()
    for name, tensor in loaded.items():
        assert (stored[name].dtype, tensor.dtype) == (torch.float16, torch.float32)
        assert torch.equal(tensor, stored[name].float())


def test_every_name_has_a_small_model_folder_with_a_card() -> None:
    for name in NAMES:
        folder = built_in(name)
        assert folder is not None
        files = {path.name: path.stat() for path in folder.iterdir()}
        assert files.keys() == {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"}
        assert sum(file.st_size for file in files.values()) <= MAX_BYTES
        assert all(file.st_mode & stat.S_IROTH for file in files.values()), "others cannot read it"


def test_card_states_the_model() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    model = vs.from_pretrained(DEFAULT)
    parameters = sum(part.numel() for part in model.parameters())
    assert f"{parameters / 1e6:.2f} M parameters" in text
    assert ", ".join(model.config.class_names) in text
    assert " train --data cifar10 " in text
    assert "/tmp" not in text


def test_accuracy_of_every_page_is_that_of_the_card() -> None:
    stated = {page.name: ACCURACY.findall(page.read_text(encoding="utf-8")) for page in PAGES}
    assert stated == {page.name: [f"{accuracy_of(FOLDER):.1%}"] for page in PAGES}


def test_photographs_are_small_squares_with_a_source() -> None:
    sources = (next(iter(PHOTOS.values())).parent / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+)\.jpg`", sources)) == set(PHOTOS)
    for path in PHOTOS.values():
        assert path.stat().st_size <= MAX_PHOTO_BYTES
        with read_image(path) as picture:
            assert picture.width == picture.height


@pytest.mark.parametrize("label", PHOTOS)
def test_photograph_is_recognized(label: str) -> None:
    predictor = vs.Predictor(DEFAULT, precision="fp32", device="cpu")
    assert predictor(PHOTOS[label], top_k=1)[0].label == label
