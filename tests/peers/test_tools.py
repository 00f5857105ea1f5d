"""A CLIP with a zero-shot head and a DINOv3 of timm in every tool that takes a model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitascope as vs
from tests.data import encoded, noise
from tests.deploy.server.served import play, serving
from tests.models.text import write_clip
from tests.peers.timm_models import random_model
from vitascope.analysis.explain.methods import METHODS, methods_for
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices
from vitascope.deploy.export.quantize import quantize_file
from vitascope.models.engines.engine import TorchEngine

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")
pytest.importorskip("transformers", reason="transformers is not installed (vitascope[text])")

CLASSES = ("a cat", "a dog", "a red photo")
SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 3}
PICTURES = [noise(40, 36, seed=seed) for seed in range(24)]
HERE: dict[str, Any] = {"device": "cpu", "precision": "fp32"}


@pytest.fixture(scope="module", params=["CLIP with classes of words", "timm's DINOv3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a classifier of three classes."""
    root = tmp_path_factory.mktemp("model")
    if request.param.startswith("CLIP"):
        return vs.save_pretrained(vs.zero_shot(write_clip(root / "clip"), CLASSES), root / "zero-shot")
    peer = random_model("vit_small_patch16_dinov3", **SMALL)
    with torch.no_grad():
        peer.head.bias.zero_()
    model_args = {name: value for name, value in SMALL.items() if name != "num_classes"}
    timm.models.save_for_hf(*(peer, root), model_args=model_args, model_config={"label_names": list(CLASSES)})
    return root


def probabilities(model: Path, pictures: list[Any]) -> np.ndarray[Any, Any]:
    """The probability of each class, in the order of the classes: (B, 3)."""
    found = vs.Predictor(model, **({} if model.suffix else HERE))(pictures, top_k=3)
    return np.array([[next(it.score for it in row if it.label == name) for name in CLASSES] for row in found])


def test_every_explanation_is_drawn(folder: Path) -> None:
    model, picture = vs.from_pretrained(folder), Image.fromarray(PICTURES[0])
    assert set(methods_for(model)) == set(METHODS)
    for method in METHODS:
        heat = vs.explain.heatmap(model, picture, method)
        assert heat.shape == (1, 4, 4), method
        assert torch.isfinite(heat).all(), method
    assert not torch.equal(
        vs.explain.heatmap(model, picture, target="a cat"), vs.explain.heatmap(model, picture, target="a dog")
    )


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    """The model as an ONNX file."""
    for library in ("onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason=f"{library} is not installed (vitascope[onnx])")
    vs.export(folder, folder.parent / "model.onnx", images=PICTURES[:4])
    return folder.parent / "model.onnx"


def test_exported_file_predicts_the_same(folder: Path, exported: Path) -> None:
    found = probabilities(exported, PICTURES[:8])
    assert np.allclose(found, probabilities(folder, PICTURES[:8]), atol=2e-3)
    assert np.ptp(found, axis=0).max() > 0.01  # the pictures do differ


def test_int8_file_is_written_and_measured(folder: Path, exported: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed (vitascope[onnx])")
    best = probabilities(folder, PICTURES).argmax(axis=1)
    predicted = ImageSet("test", PICTURES, ClassIndices(best, CLASSES))
    done = quantize_file(
        *(exported, tmp_path / "int8.onnx"),
        calibration=PICTURES,
        test=predicted,
        calibration_images=8,
        max_drop=0.3,
    )
    assert done.layers > 2
    assert done.comparison.paired.drop <= 0.3
    assert np.mean(probabilities(tmp_path / "int8.onnx", PICTURES).argmax(axis=1) == best) > 0.7


def test_tokens_are_merged_or_the_reason_is_given(folder: Path, tmp_path: Path) -> None:
    if vs.from_pretrained(folder).config.option("positions") == "rotary":
        with pytest.raises(vs.UserError, match="token_merging does not go with positions 'rotary'"):
            vs.compress(folder, tmp_path / "merged", merge=3, device="cpu")
        return
    found = vs.compress(folder, tmp_path / "merged", merge=3, batch_size=2, device="cpu")
    assert found.after.flops < found.before.flops
    merged = tmp_path / "merged"
    assert vs.from_pretrained(merged).config.class_names == CLASSES
    close = np.abs(probabilities(merged, PICTURES) - probabilities(folder, PICTURES))
    assert 0 < close.max() < 0.5


def test_server_predicts_and_explains(folder: Path) -> None:
    engine = TorchEngine(vs.from_pretrained(folder), **HERE)
    expected = probabilities(folder, PICTURES[:2])

    async def story() -> None:
        async with serving(engine) as client:
            for picture, row in zip(PICTURES, expected, strict=False):
                answer = (await client.predict(encoded(picture))).json()
                best = answer["predictions"][0]
                assert best["label"] == CLASSES[row.argmax()]
                assert best["score"] == pytest.approx(row.max(), abs=1e-5)
            heat = (await client.post("/v1/explain?target=a%20dog", content=encoded(PICTURES[0]))).json()
            assert heat["target"]["label"] == "a dog"
            assert np.shape(heat["heatmap"]) == (4, 4)

    play(story())


def test_probe_takes_it_as_a_body(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "cache"))
    for number, image in enumerate(PICTURES):  # of two classes, by their brightness
        place = tmp_path / "photos" / ("dark" if number % 2 else "bright")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image // 4 if number % 2 else image).save(place / f"{number}.png")
    result = vs.probe(
        folder, tmp_path / "photos", run=tmp_path / "run", compute=vs.Compute(workers=0, **HERE)
    )
    assert vs.from_pretrained(tmp_path / "run").config.class_names == ("bright", "dark")
    assert result.evaluation.accuracy == 1
