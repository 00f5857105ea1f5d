"""Conversions are checked: the written files have the same outputs as the source."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models import small_model, with_preprocess
from vitascope.errors import UserError
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.convert import convert, model_input, parity_of
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.identification import identify
from vitascope.models.weights.loading import from_pretrained, save_pretrained

BODY = {"embed_dim": 128, "num_heads": 2}


def test_reading_the_converted_files_logs_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_pretrained(small_model(embed_dim=128, num_heads=2), tmp_path / "ours")
    caplog.clear()  # a warning that the model has no preprocessing
    convert(tmp_path / "ours", tmp_path / "theirs", format="torchvision")
    assert caplog.messages == []


def test_an_unchanged_conversion_is_bitwise_identical(tmp_path: Path) -> None:
    fit = Preprocess(image_size=(32, 32), resize="squash")
    save_pretrained(with_preprocess(small_model(**BODY), fit), tmp_path / "ours")
    done = convert(tmp_path / "ours", tmp_path / "theirs", format="timm")
    assert done.source_family == "vitascope"
    assert done.changes == []
    assert done.prepared is None
    assert done.on_pictures
    assert done.parity.first is None
    assert done.parity.difference == 0
    assert done.parity.scale > 0
    assert all(file.is_file() for file in done.files)
    assert identify(tmp_path / "theirs")[1].name == "timm"


def test_a_loaded_model_is_converted_as_its_files_are(tmp_path: Path) -> None:
    model = with_preprocess(small_model(**BODY), Preprocess(image_size=(32, 32))).train()
    done = convert(model, tmp_path / "theirs", format="timm")
    assert (done.source_family, done.parity.difference, model.training) == ("vitascope", 0, True)
    again = from_pretrained(tmp_path / "theirs").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(UserError, match="loaded already"):
        convert(model, tmp_path / "more", revision="main")


def test_an_option_fixed_by_the_other_library_is_reported_and_measured(tmp_path: Path) -> None:
    save_pretrained(small_model(norm_eps=1e-2, **BODY), tmp_path / "ours")
    done = convert(tmp_path / "ours", tmp_path / "theirs", format="timm")
    assert "norm_eps 0.01 becomes 1e-06" in done.changes[0]
    assert done.parity.first == "block0"  # the embeddings have no norm
    assert done.parity.difference > 0
    assert done.parity.differences[done.parity.first] > 0


@pytest.mark.parametrize("format", ["huggingface", "timm", "vitascope"])
@pytest.mark.parametrize("thresholds", [(), (0.1, 0.2, 0.3, 0.4, 0.5)])
def test_independent_classes_and_their_thresholds_survive_a_conversion(
    format: str, thresholds: tuple[float, ...], tmp_path: Path
) -> None:
    save_pretrained(small_model(outputs="independent", thresholds=thresholds, **BODY), tmp_path / "ours")
    done = convert(tmp_path / "ours", tmp_path / "theirs", format=format)
    assert not [change for change in done.changes if "outputs" in change or "thresholds" in change]
    found = from_pretrained(tmp_path / "theirs").config
    assert (found.outputs, found.thresholds) == ("independent", thresholds)
    assert convert(tmp_path / "theirs", tmp_path / "again").changes == []
    assert from_pretrained(tmp_path / "again").config.thresholds == thresholds


def test_saving_warns_where_the_files_cannot_say_that_classes_are_independent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model(outputs="independent", **BODY)
    for format, warned in (("torchvision", True), ("huggingface", False), ("timm", False)):
        caplog.clear()
        save_pretrained(model, tmp_path / format, format=format)
        assert any("apply the sigmoid" in text for text in caplog.messages) == warned
        assert any("prepares pictures differently" in text for text in caplog.messages)


def test_broken_thresholds_are_rejected_naming_the_checkpoint(tmp_path: Path) -> None:
    save_pretrained(small_model(outputs="independent", **BODY), tmp_path, format="huggingface")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"thresholds": [0.5]}))
    with pytest.raises(CheckpointError, match=rf"{tmp_path.name}: 1 thresholds for 5 independent outputs"):
        from_pretrained(tmp_path)


def test_settings_that_the_files_cannot_hold_are_reported(tmp_path: Path) -> None:
    model = small_model(class_names=tuple("abcde"), resample="torchvision", **BODY)
    save_pretrained(model, tmp_path / "ours")
    for to in ("vitascope", "timm"):
        changes = convert(tmp_path / "ours", tmp_path / to, format=to).changes
        assert not any("in the files" in change for change in changes)
    classes, preprocessing = convert(tmp_path / "ours", tmp_path / "bare", format="torchvision").changes
    assert classes == "the names of the 5 classes are not in the files"
    assert "mean (0.485, 0.456, 0.406), not (0.5, 0.5, 0.5)" in preprocessing


def test_changed_preprocessing_is_reported_and_measured(tmp_path: Path) -> None:
    """timm resizes to whole pixels before it crops; our own rule does not."""
    model = small_model(**BODY)
    with torch.no_grad():
        model.head.weight.normal_()
    save_pretrained(with_preprocess(model, Preprocess(image_size=(32, 32), crop_pct=0.9)), tmp_path / "ours")
    done = convert(tmp_path / "ours", tmp_path / "theirs", format="timm")
    [change] = done.changes
    assert "timm prepares pictures differently" in change
    assert "it resizes to 35x35 whole pixels" in change
    assert done.prepared is not None
    assert f"logits differ by up to {done.prepared.difference:.2g}" in change
    assert done.parity.first is None  # the same tensors have the same outputs
    assert done.prepared.difference > 0
    images = [np.random.default_rng(0).integers(0, 256, (90, 51, 3), dtype=np.uint8)]
    ours, theirs = from_pretrained(tmp_path / "ours"), from_pretrained(tmp_path / "theirs")
    again = convert(tmp_path / "ours", tmp_path / "more", format="timm", images=images).prepared
    logits = [each(model_input(each.preprocess, images)) for each in (ours, theirs)]
    assert again is not None
    assert again.difference == pytest.approx((logits[0] - logits[1]).abs().max().item(), rel=1e-4)


def test_a_model_of_four_channels_is_compared_on_random_tensors(tmp_path: Path) -> None:
    save_pretrained(small_model(in_channels=4, **BODY), tmp_path / "ours")
    done = convert(tmp_path / "ours", tmp_path / "theirs", format="timm")
    assert (done.on_pictures, done.parity.first, done.parity.images) == (False, None, 2)
    assert done.parity.scale > 0
    picture = np.zeros((40, 40, 3), dtype=np.uint8)
    with pytest.raises(UserError, match="pictures have 1 or 3 channels, the model has 4"):
        convert(tmp_path / "ours", tmp_path / "more", format="timm", images=[picture])


def test_parity_is_measured_on_the_given_pictures(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for number in range(3):
        pixels = noise.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    save_pretrained(small_model(**BODY), tmp_path / "ours")
    pictures = sorted(tmp_path.glob("*.png"))
    assert convert(tmp_path / "ours", tmp_path / "v", images=pictures).parity.images == 3
    assert convert(tmp_path / "ours", tmp_path / "one", images=str(pictures[0])).parity.images == 1
    with pytest.raises(UserError, match=r"gone\.png"):
        convert(tmp_path / "ours", tmp_path / "w", images=[tmp_path / "gone.png"])
    assert not (tmp_path / "w").exists()  # the corrected command can use the folder


def test_the_first_difference_is_found() -> None:
    model, other = small_model(), small_model()
    with torch.no_grad():
        other.encoder.blocks[1].mlp.fc2.bias += 0.25
    images = torch.randn(2, 3, *model.config.image_hw)
    parity = parity_of(model, other, images)
    assert parity.scale == pytest.approx(model(images).abs().max().item(), rel=1e-4)
    assert parity.first == "block1"
    assert parity.differences[parity.first] == pytest.approx(0.25, rel=1e-4)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    save_pretrained(small_model(**BODY), tmp_path / "ours")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for taken in (tmp_path / "full", tmp_path / "full" / "notes.txt"):
        with pytest.raises(UserError, match="not an empty folder"):
            convert(tmp_path / "ours", taken)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "ours", tmp_path / "empty")
    assert from_pretrained(tmp_path / "empty").config == small_model(**BODY).config


def test_options_unknown_to_the_other_library_are_rejected_before_writing(tmp_path: Path) -> None:
    save_pretrained(small_model(attention="axial", positions="rotary"), tmp_path / "ours")
    with pytest.raises(UserError, match="timm has no model with attention 'axial'"):
        convert(tmp_path / "ours", tmp_path / "theirs", format="timm")
    assert not (tmp_path / "theirs").exists()
    with pytest.raises(UserError, match="nearest: timm"):
        convert(tmp_path / "ours", tmp_path / "theirs", format="tim")


def test_rejected_model_gets_its_formats_and_the_recipe_that_has_others(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        convert("cifar10", tmp_path / "theirs", format="huggingface")
    assert re.fullmatch(
        r"huggingface has no model with stem 'tokenizer'.*; the formats of this model: vitascope\. "
        r".*ONNX or OpenVINO.*`vitascope train --recipe base` have the formats "
        r"vitascope, timm, huggingface, torchvision, deit",
        str(raised.value),
    )
    assert not (tmp_path / "theirs").exists()
