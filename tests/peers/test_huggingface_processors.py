"""transformers' `preprocessor_config.json`: read, written or rejected. test_preprocess.py has the pixels."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.models import small_model
from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families.huggingface.family import HuggingFace
from vitascope.models.weights.files import CheckpointError, read_json
from vitascope.models.weights.mapping import Source, to_family

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="transformers 5 is not installed (vitascope[peers])"
)

FAMILY = HuggingFace()


def a_picture(width: int, height: int, grain: int = 4) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height // grain, width // grain, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


def read_preprocess(told: Mapping[str, Any], kind: str = "vit", **options: Any) -> Preprocess:
    source = Source(name="told", tensors={}, config={"model_type": kind}, preprocessor=told)
    return FAMILY.read_preprocess(source, ViTConfig.from_dict({"image_size": 64, "patch_size": 8, **options}))


def differences(ours: Preprocess, processor: Any, picture: Image.Image) -> Tensor:
    """The difference in levels of 256, per pixel."""
    expected = processor(picture, return_tensors="pt")["pixel_values"]
    actual = ours.normalize(torch.from_numpy(ours.pixels(picture))[None])
    assert actual.shape == expected.shape
    return (actual - expected).abs() * 255 * torch.tensor(ours.std).view(-1, 1, 1)


PROCESSORS = ("ViTImageProcessorPil", "DeiTImageProcessorPil", "BitImageProcessorPil")
PROCESSORS += ("DINOv3ViTImageProcessor",)
IMAGENET = (0.485, 0.456, 0.406)


@pytest.mark.parametrize("name", PROCESSORS)
def test_empty_processor_file_means_the_processors_defaults(name: str, tmp_path: Path) -> None:
    if not name.endswith("Pil"):
        pytest.importorskip("torchvision", reason=f"{name} needs torchvision (vitascope[peers])")
    getattr(transformers, name)().save_pretrained(tmp_path)
    told = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert read_preprocess({"image_processor_type": told["image_processor_type"]}) == read_preprocess(told)


@pytest.mark.parametrize("step", ["do_resize", "do_center_crop", "do_rescale", "do_normalize"])
def test_null_step_is_skipped_as_in_transformers(step: str, tmp_path: Path) -> None:
    sides = {"height": 64, "width": 64}
    cropped = step != "do_resize"  # a crop requires it
    transformers.DeiTImageProcessorPil(
        size={"height": 72, "width": 72} if step != "do_center_crop" else sides,
        crop_size={"height": 48, "width": 48},
        do_center_crop=cropped,
    ).save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    told = json.loads(file.read_text()) | {step: None}
    file.write_text(json.dumps(told))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert differences(read_preprocess(told), processor, a_picture(64, 64)).max() < 1.01


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (  # the file of facebook/deit-base-distilled-patch16-224
            {
                **{"feature_extractor_type": "DeiTFeatureExtractor", "crop_size": 224, "size": 256},
                **{"do_center_crop": True, "do_normalize": True, "do_resize": True, "resample": 3},
                **{"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
            },
            {"image_size": (224, 224), "resize": "squash", "resize_to": (256, 256), "mean": IMAGENET},
        ),
        (  # and of facebook/dino-vits16
            {"feature_extractor_type": "ViTFeatureExtractor", "resample": 2, "size": 224},
            {"image_size": (224, 224), "resize": "squash", "interpolation": "bilinear"},
        ),
        (
            {"image_processor_type": "BitImageProcessor", "size": 96, "crop_size": 64},
            {"image_size": (64, 64), "resize": "crop", "resize_to": (96, 96)},
        ),
        (
            {"image_processor_type": "BitImageProcessor", "size": 96, "do_center_crop": False},
            {"image_size": (96, 96), "resize": "crop", "resize_to": (96, 96)},
        ),
        ({"do_resize": False}, {"image_size": (64, 64), "resize": "squash"}),
        ({"image_processor_type": "ViTImageProcessorFast", "size": [48, 64]}, {"image_size": (48, 64)}),
        ({"do_resize": True, "size": None, "crop_size": None}, {"image_size": (224, 224)}),
    ],
)
def test_older_processor_files_are_read(told: dict[str, Any], expected: dict[str, Any]) -> None:
    ours = read_preprocess(told)
    assert {name: getattr(ours, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"image_processor_type": "ConvNextImageProcessor"}, "ConvNextImageProcessor"),
        ({"resample": 4}, "resample 4"),
        ({"resample": [3]}, "resample"),
        ({"do_center_crop": True, "do_resize": False, "crop_size": 64}, "crops but does not resize"),
        ({"size": {"shortest_edge": 64, "longest_edge": 96}}, "bounds both edges"),
        ({"image_mean": [0.1, 0.2]}, "does not fit a model of 3 channels"),
        ({"do_pad": True, "pad_size": {"height": 256, "width": 256}}, "no padding"),
    ],
)
def test_unsupported_processors_are_rejected(told: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_preprocess(told)


@pytest.mark.parametrize(
    ("kind", "resize", "resize_to", "interpolation", "mean"),
    [
        ("vit", "squash", None, "bilinear", 0.5),
        ("deit", "crop", (73, 73), "bicubic", 0.485),
        ("dinov2", "crop", (73, 73), "bicubic", 0.485),
        ("dinov2_with_registers", "crop", (73, 73), "bicubic", 0.485),
        ("dinov3_vit", "squash", None, "bilinear", 0.485),
        ("clip", "crop", (64, 64), "bicubic", 0.48145466),
        ("siglip_vision_model", "squash", None, "bicubic", 0.5),
        ("vit_mae", "crop", (73, 73), "bicubic", 0.485),
        ("vit_msn", "crop", (73, 73), "bicubic", 0.485),
        ("ijepa", "crop", (73, 73), "bicubic", 0.485),
    ],
)
def test_published_preprocessing_is_the_default_without_a_file(
    kind: str, resize: str, resize_to: tuple[int, int] | None, interpolation: str, mean: float
) -> None:
    ours = read_preprocess({}, kind)
    assert ours.image_size == (64, 64)
    assert (ours.resize, ours.resize_to, ours.interpolation) == (resize, resize_to, interpolation)
    assert ours.mean[0] == mean
    assert read_preprocess({}, kind, in_channels=1).mean == (0.5,)


@pytest.mark.parametrize(
    "options",
    [
        {"resize": "squash", "interpolation": "bilinear"},
        {"resize": "squash", "image_size": (64, 32), "interpolation": "lanczos"},
        {"resize": "squash", "resize_to": (75, 70)},
        {"resize_to": (73, 73), "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25)},
        {"resize_to": (64, 64), "interpolation": "nearest"},
        {"resize_to": (73, 73), "image_size": (64, 40)},
    ],
)
def test_written_preprocessing_equals_their_processors(options: dict[str, Any], tmp_path: Path) -> None:
    crop_rounding = "down" if "resize_to" in options else "even"
    preprocess = Preprocess(**{"image_size": (64, 64), "crop_rounding": crop_rounding, **options})
    to_family(FAMILY, small_model(), preprocess, tmp_path)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert differences(preprocess, processor, a_picture(288, 211)).max() < 0.01
    assert read_preprocess(read_json(tmp_path / "preprocessor_config.json")) == preprocess


def test_a_crop_that_is_not_square_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    preprocess = Preprocess(image_size=(64, 32), resize="crop")
    with pytest.raises(CheckpointError, match=r'64x32.*resize="squash"'):
        to_family(FAMILY, small_model(image_size=(64, 32)), preprocess, tmp_path)
    assert not list(tmp_path.iterdir())
