"""Teachers of timm and transformers equal the models behind their own library's preprocessing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.models import randomize
from tests.peers.comparison import relative_error
from vitascope.errors import UserError
from vitascope.training.tasks.teachers import open_teacher

NAMES = ("ant", "bee", "cat")


def picture(height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_images(picture: Image.Image) -> torch.Tensor:
    """The input of a task: floats in [0, 1], (1, C, H, W)."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 255


@pytest.fixture
def timm() -> Any:
    return pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed (vitascope[peers])")


def saved_by_timm(timm: Any, folder: Path, names: tuple[str, ...] = (), **options: Any) -> nn.Module:
    model = randomize(timm.create_model("test_resnet", num_classes=3, **options)).eval()
    config = {"num_classes": 3, "mean": (0.1, 0.4, 0.7), "std": (0.2, 0.3, 0.6), "input_size": (3, 48, 64)}
    if names:
        config["label_names"] = list(names)
    timm.models.save_for_hf(
        model, folder, model_config={"pretrained_cfg": {**model.pretrained_cfg, **config}}
    )
    return model


def test_timm_teacher_equals_timm_with_its_preprocessing(timm, tmp_path: Path) -> None:
    peer, seen = saved_by_timm(timm, tmp_path), picture(48, 64)
    config = timm.data.resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path}", pretrained=True))
    transform = timm.data.create_transform(**config | {"crop_pct": 1.0}, is_training=False)
    with torch.no_grad():
        expected = peer(transform(seen)[None])
    for ref in (f"timm:local-dir:{tmp_path}", f"timm:{tmp_path}"):
        teacher = open_teacher(ref, NAMES, device="cpu")
        assert teacher.preprocess.image_size == (48, 64)
        assert relative_error(teacher(as_images(seen)), expected) < 1e-5


def test_timm_teacher_with_class_names_is_reordered(timm, tmp_path: Path, capsys) -> None:
    saved_by_timm(timm, tmp_path, NAMES)
    ours, images = ("cat", "ant", "bee"), as_images(picture(48, 64))
    alike, permuted = (open_teacher(f"timm:{tmp_path}", names, device="cpu") for names in (NAMES, ours))
    assert "has no class names" not in capsys.readouterr().out
    torch.testing.assert_close(permuted(images), alike(images)[:, [2, 0, 1]])
    with pytest.raises(UserError, match="it lacks dog"):
        open_teacher(f"timm:{tmp_path}", ("ant", "bee", "dog"), device="cpu")


def test_model_that_timm_cannot_load_fails_in_one_line(timm, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^teacher timm:no_such cannot be loaded by timm: .*Unknown model"):
        open_teacher("timm:no_such", NAMES, device="cpu")
    saved_by_timm(timm, tmp_path)
    (weights,) = {"model.safetensors", "pytorch_model.bin"} & {path.name for path in tmp_path.iterdir()}
    (tmp_path / weights).write_bytes(b"broken")
    with pytest.raises(UserError, match="cannot be loaded by timm") as caught:
        open_teacher(f"timm:{tmp_path}", NAMES, device="cpu")
    assert "\n" not in str(caught.value)
    (tmp_path / weights).unlink()
    with pytest.raises(UserError, match="cannot be loaded by timm"):
        open_teacher(f"timm:{tmp_path}", NAMES, device="cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded by timm: KeyError"):
        open_teacher(f"timm:{tmp_path}", NAMES, device="cpu")


def saved_by_transformers(
    transformers: Any, folder: Path, processor: str = "ConvNextImageProcessorPil", **options: Any
) -> tuple[nn.Module, Any]:
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        id2label=dict(enumerate(NAMES)),
    )
    model = randomize(transformers.ResNetForImageClassification(config)).eval()
    made = getattr(transformers, processor)(**options)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return model, made


STATISTICS = {"image_mean": [0.1, 0.4, 0.7], "image_std": [0.2, 0.3, 0.6]}
PROCESSORS = {
    "convnext": ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 384}}, (384, 384)),
    "vit": ("ViTImageProcessorPil", {"size": {"height": 48, "width": 64}}, (48, 64)),
    "crop": ("DeiTImageProcessorPil", {"size": {"height": 48, "width": 48}, "crop_size": 48}, (48, 48)),
    "offset": ("EfficientNetImageProcessorPil", {"size": {"height": 40, "width": 40}}, (40, 40)),
    "no statistics": (
        "ViTImageProcessorPil",
        {"size": {"height": 32, "width": 32}, "do_normalize": False},
        (32, 32),
    ),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_transformers_teacher_equals_transformers_with_its_processor(
    case: str, transformers, tmp_path: Path
) -> None:
    kind, options, size = PROCESSORS[case]
    peer, processor = saved_by_transformers(transformers, tmp_path, kind, **options, **STATISTICS)
    seen = picture(*size)
    with torch.no_grad():
        expected = peer(**processor(images=seen, return_tensors="pt")).logits
    teacher = open_teacher(f"transformers:{tmp_path}", NAMES, device="cpu")
    assert teacher.preprocess.image_size == size
    assert relative_error(teacher(as_images(seen)), expected) < 1e-4
    permuted = open_teacher(f"transformers:{tmp_path}", ("cat", "ant", "bee"), device="cpu")
    torch.testing.assert_close(permuted(as_images(seen)), teacher(as_images(seen))[:, [2, 0, 1]])


def test_processor_that_swaps_colours_is_rejected(transformers, tmp_path: Path) -> None:
    saved_by_transformers(
        transformers, tmp_path, "MobileViTImageProcessorPil", size={"shortest_edge": 64}, crop_size=64
    )
    with pytest.raises(UserError, match="does more than resize, crop and normalize"):
        open_teacher(f"transformers:{tmp_path}", NAMES, device="cpu")


def test_randomly_initialized_head_is_rejected(transformers, tmp_path: Path) -> None:
    peer, _ = saved_by_transformers(transformers, tmp_path)
    peer.resnet.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no weights for classifier\.1\.bias, classifier\.1\.weight"):
        open_teacher(f"transformers:{tmp_path}", NAMES, device="cpu")


def test_model_that_transformers_cannot_load_fails_in_one_line(transformers, tmp_path: Path) -> None:
    ref = f"transformers:{tmp_path}"
    for spoil in ("config.json", "preprocessor_config.json", "model.safetensors"):
        saved_by_transformers(transformers, tmp_path)
        (tmp_path / spoil).unlink()
        with pytest.raises(UserError, match=f"^teacher {ref} cannot be loaded by transformers: ") as caught:
            open_teacher(ref, NAMES, device="cpu")
        assert "\n" not in str(caught.value)
    saved_by_transformers(transformers, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="cannot be loaded by transformers: SafetensorError"):
        open_teacher(ref, NAMES, device="cpu")
