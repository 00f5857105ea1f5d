"""The engine for a MODEL argument, and predictions for pictures of several sizes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import vitascope as vs
from tests.data import noise
from tests.models import small_model, with_preprocess, with_trust
from vitascope.errors import UserError
from vitascope.models.engines import runtimes
from vitascope.models.engines.engine import Answers, Engine, TorchEngine
from vitascope.models.engines.runtimes import ExportedModelError, name_of, open_engine
from vitascope.models.engines.selection import ClassSelection
from vitascope.models.preprocess import Preprocess


class Sums(Engine):
    """Returns the sum and the number of pixels, and records its inputs."""

    description = "sums"
    num_classes = 2

    def __init__(self) -> None:
        self.given: list[tuple[int, ...]] = []

    def answers(self, pixels: Tensor) -> Answers:
        self.given.append(tuple(pixels.shape))
        flat = pixels.float().flatten(1)
        found = torch.stack([flat.sum(dim=1), torch.full((len(flat),), float(flat.shape[1]))], dim=1)
        return Answers(found, found)


def test_pictures_of_one_size_are_batched_and_results_keep_their_order() -> None:
    sizes = [(4, 5), (2, 3), (4, 5), (5, 4), (2, 3)]
    pictures = [noise(*size, seed=seed).transpose(2, 0, 1) for seed, size in enumerate(sizes)]
    engine = Sums()
    found = engine.predict(pictures)
    assert found.probabilities.tolist() == [
        [float(picture.sum()), float(picture.size)] for picture in pictures
    ]
    assert sorted(engine.given) == [(1, 3, 5, 4), (2, 3, 2, 3), (2, 3, 4, 5)]


def test_model_folder_is_opened_in_torch_under_its_name(tmp_path: Path) -> None:
    fit = Preprocess(image_size=(32, 32))
    vs.save_pretrained(with_preprocess(small_model(depth=1), fit), tmp_path / "model")
    (tmp_path / "model" / "other.onnx").write_bytes(b"")  # it is still the model's folder
    engine = open_engine(tmp_path / "model", device="cpu")
    assert isinstance(engine, TorchEngine)
    assert engine.preprocess == fit
    assert (engine.name, engine.description) == ("model", "torch, auto precision, on cpu")
    assert name_of(f"timm:{tmp_path}/model") == "model"  # clients do not see its parent folder
    assert name_of("owner/model") == "owner/model"


@pytest.mark.parametrize(("name", "kind"), [("model.onnx", "OnnxEngine"), ("model.xml", "OpenVinoEngine")])
def test_exported_file_or_its_folder_is_opened_in_its_runtime(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "model.bin").write_bytes(b"")  # OpenVINO's weights, not a model file
    monkeypatch.setattr(
        runtimes, kind, lambda path, precision: SimpleNamespace(opened=(kind, path, precision))
    )
    for ref in (tmp_path / name, tmp_path, str(tmp_path)):
        engine = open_engine(ref, precision="fp32")
        assert (engine.opened, engine.name) == ((kind, tmp_path / name, "fp32"), Path(ref).name)
    with pytest.raises(UserError, match="run on the CPU, not on 'cuda'"):
        open_engine(tmp_path, device="cuda")
    with pytest.raises(UserError, match="views of an exported model are part of it: export it with"):
        open_engine(tmp_path, views=2)


def test_folder_with_several_files_and_a_pt2_file_are_rejected(tmp_path: Path) -> None:
    for name in ("b.onnx", "a.xml"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ExportedModelError, match=r"2 exported models, a\.xml, b\.onnx; name one"):
        open_engine(tmp_path)
    (tmp_path / "model.pt2").write_bytes(b"")
    with pytest.raises(ExportedModelError, match="runs code"):
        open_engine(tmp_path / "model.pt2")


def test_mean_of_views_knows_no_sets_and_no_familiarity() -> None:
    model = with_trust(with_preprocess(small_model(depth=1, num_classes=3), Preprocess(image_size=(32, 32))))
    one, six = (TorchEngine(model, precision="fp32", device="cpu", views=views) for views in (1, 6))
    pixels = torch.from_numpy(one.pixels(noise(32, 32)))[None]
    assert one.answers(pixels).familiarity is not None
    assert six.answers(pixels).familiarity is six.sets is None
    assert six.answers(pixels).probabilities.shape == (1, 3)
    assert six.description.endswith(", the mean of 6 views")
    ClassSelection(familiar=0.9).check(one)
    with pytest.raises(UserError, match=r"calibrated on one view at most, .* leave out .*, or views"):
        ClassSelection(familiar=0.9).check(six)
    with pytest.raises(UserError, match="an engine has its own precision, device and views"):
        vs.Predictor(one, views=2)


def test_model_without_head_returns_features_and_no_probabilities() -> None:
    model, fit = small_model(depth=1, head="none"), Preprocess(image_size=(32, 32))
    engine = TorchEngine(with_preprocess(model, fit), precision="fp32", device="cpu")
    assert (engine.num_classes, engine.class_names) == (0, ())
    pixels = torch.from_numpy(engine.pixels(noise(40, 50)))[None]
    with torch.no_grad():
        expected = model.embed(fit.normalize(pixels))
    torch.testing.assert_close(engine.embed(pixels), expected)
    torch.testing.assert_close(engine.outputs(pixels), expected)
    with pytest.raises(UserError, match="no head"):
        engine.probabilities(pixels)


def test_digest_depends_on_the_weights_only(tmp_path: Path) -> None:
    model, fit = small_model(depth=1, class_names=("a", "b", "c", "d", "e")), Preprocess(image_size=(32, 32))
    first = TorchEngine(with_preprocess(model, fit), precision="fp32", device="cpu")
    vs.save_pretrained(with_preprocess(model, fit), tmp_path / "saved")
    again = open_engine(tmp_path / "saved", precision="bf16", device="cpu")
    assert again.digest == first.digest
    assert len(first.digest) == 64
    with torch.no_grad():
        model.head.bias[0] += 1
    assert TorchEngine(with_preprocess(model, fit), precision="fp32", device="cpu").digest != first.digest
