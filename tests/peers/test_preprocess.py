"""Our preprocessing equals each library's own, pixel by pixel (with Pillow)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.models import small_model, with_preprocess
from tests.peers.comparison import relative_error
from tests.peers.pictures import OF_ANY_MODE, PICTURES
from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.sizes import named_config
from vitascope.models.weights.all_families import FAMILIES
from vitascope.models.weights.convert import convert
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.mapping import Source

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")
torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed (vitascope[peers])")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (vitascope[peers])")
to_rgb = transformers.image_transforms.convert_to_rgb


def assert_same(ours: Preprocess, theirs: Any, pictures: list[Image.Image] = PICTURES) -> None:
    """`theirs` turns a picture into a normalized tensor (C, H, W); in levels of 256, no pixel may differ."""
    std = torch.tensor(ours.std).view(-1, 1, 1)
    for one in pictures:
        found, expected = ours.normalize(torch.from_numpy(ours.pixels(one))), theirs(one)
        assert found.shape == expected.shape, one.size
        levels = (found - expected).abs() * 255 * std
        assert levels.max() < 0.01, (one.size, levels.max())  # float rounding; the smallest step is 1


def read_timm(told: dict[str, Any], architecture: str = "vit_base") -> Preprocess:
    size = told["input_size"][1:]
    config = ViTConfig.from_dict({"image_size": size, "patch_size": size})
    settings = {"architecture": architecture, "pretrained_cfg": told}
    return FAMILIES["timm"].read_preprocess(Source(name="x", tensors={}, config=settings), config)


def timm_transform(told: dict[str, Any]) -> Any:
    return timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=told))


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize(
    ("size", "crop_pct"), [((96, 96), 0.875), ((96, 96), 1.0), ((64, 80), 0.95), ((90, 56), 0.9)]
)
def test_preprocessing_equals_timms_transform(size: tuple[int, int], crop_pct: float, mode: str) -> None:
    told = {
        "input_size": (3, *size),
        "crop_pct": crop_pct,
        "crop_mode": mode,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
    }
    # A side that would round to nothing is an error in timm.
    pictures = [one for one in PICTURES if mode != "border" or min(one.size) * 50 > max(one.size)]
    assert_same(read_timm(told), timm_transform(told), pictures)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_filters_equal_timm(interpolation: str) -> None:
    told = {"input_size": (3, 96, 96), "crop_pct": 0.9, "interpolation": interpolation}
    assert_same(read_timm(told), timm_transform(told))


@pytest.mark.parametrize(
    "name",
    [
        "deit_base_patch16_224.fb_in1k",
        "vit_base_patch16_siglip_224.webli",
        "vit_base_patch16_224.augreg_in21k",
        "vit_so400m_patch14_siglip_384.webli",
        "vit_pe_core_large_patch14_336.fb",
        "vit_large_patch16_dinov3.sat493m",
        "vit_small_patch16_rope_224.naver_in1k",
        "eva02_large_patch14_clip_336.merged2b",
        "beitv2_base_patch16_224.in1k_ft_in22k",
    ],
)
def test_preprocessing_of_published_timm_models_is_equal(name: str) -> None:
    told = timm.get_pretrained_cfg(name).to_dict()
    ours, theirs = read_timm(told, name.partition(".")[0]), timm_transform(told)
    assert_same(ours, theirs)
    opaque = [one for one in OF_ANY_MODE if not one.has_transparency_data]
    assert_same(ours, lambda one: theirs(one.convert("RGB")), opaque)  # as timm's data sets


def test_transparent_pictures_are_on_white_not_as_in_timm() -> None:
    """timm's data sets drop the alpha channel, and show the colours that it hides."""
    hidden = Image.new("RGBA", (9, 9), (10, 20, 30, 0))
    told = {"input_size": (3, 9, 9), "crop_pct": 1.0}
    assert (read_timm(told).pixels(hidden) == 255).all()
    assert timm_transform(told)(hidden.convert("RGB")).max() < 0


def read_processor(folder: Path, kind: str, **options: Any) -> Preprocess:
    told = json.loads((folder / "preprocessor_config.json").read_text())
    config = ViTConfig.from_dict({"image_size": 224, "patch_size": 14, **options})
    source = Source(name="x", tensors={}, config={"model_type": kind}, preprocessor=told)
    return FAMILIES["huggingface"].read_preprocess(source, config)


def sides(height: int, width: int) -> dict[str, Any]:
    return {"size": {"height": height, "width": width}}


def crop(height: int, width: int) -> dict[str, Any]:
    return {"crop_size": {"height": height, "width": width}}


SHORTEST, NO_CROP = {"size": {"shortest_edge": 75}}, {"do_center_crop": False, "resample": 1}
NOT_RESCALED = {"do_rescale": False, "image_mean": [100, 110, 120], "image_std": [50] * 3}
RESCALED = {"rescale_factor": 1 / 127.5, "image_mean": [1] * 3, "image_std": [1] * 3}
PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("vit", "ViTImageProcessorPil", {}),
    "vit, oblong": ("vit", "ViTImageProcessorPil", {"size": {"height": 96, "width": 70}, "resample": 3}),
    "vit, lanczos": ("vit", "ViTImageProcessorPil", {"resample": 1}),
    "vit, nearest": ("vit", "ViTImageProcessorPil", {"resample": 0}),
    "vit, not normalized": ("vit", "ViTImageProcessorPil", {"do_normalize": False}),
    "vit, not rescaled": ("vit", "ViTImageProcessorPil", NOT_RESCALED),
    "vit, to [-1, 1]": ("vit", "ViTImageProcessorPil", RESCALED),
    "deit": ("deit", "DeiTImageProcessorPil", {"image_mean": [0.4, 0.5, 0.6]}),
    "deit without crop": ("deit", "DeiTImageProcessorPil", {**sides(64, 64), **NO_CROP}),
    "deit, odd": ("deit", "DeiTImageProcessorPil", {**sides(101, 115), **crop(96, 96)}),
    "dinov2": ("dinov2", "BitImageProcessorPil", {"size": {"shortest_edge": 256}}),
    "bit": ("dinov2_with_registers", "BitImageProcessorPil", {"image_std": [0.2, 0.3, 0.25]}),
    "bit, odd": ("dinov2", "BitImageProcessorPil", {**SHORTEST, **crop(70, 42)}),
    "bit, a crop beyond the picture": ("dinov2", "BitImageProcessorPil", {**SHORTEST, **crop(98, 84)}),
    "siglip": ("siglip", "SiglipImageProcessorPil", {}),
    "clip": ("clip", "CLIPImageProcessorPil", {}),
    "clip, odd": ("clip_vision_model", "CLIPImageProcessorPil", {**SHORTEST, **crop(70, 42)}),
    "clip in ViT's": ("metaclip_2", "ViTImageProcessorPil", {}),
    "beit": ("beit", "BeitImageProcessorPil", {}),
    "beit, cropped": (
        "beit",
        "BeitImageProcessorPil",
        {"size": 256, "do_center_crop": True, **crop(224, 224)},
    ),
    "vit_mae": ("vit_mae", "ViTImageProcessorPil", {"resample": 3}),
    "ijepa": ("ijepa", "ViTImageProcessorPil", {}),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_preprocessing_equals_transformers_processors(case: str, tmp_path: Path) -> None:
    kind, name, options = PROCESSORS[case]
    processor = getattr(transformers, name)(**options)
    processor.save_pretrained(tmp_path)
    automatic = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    ours = read_processor(tmp_path, kind)

    def theirs(one: Image.Image) -> Tensor:
        # Some leave the conversion to their caller; this is the function that the others call.
        plain = one if automatic.do_convert_rgb else Image.fromarray(to_rgb(one, return_numpy=True))
        return automatic(plain, return_tensors="pt")["pixel_values"][0]

    # Below four pixels, theirs confuses channels and pixels.
    assert_same(ours, theirs, [one for one in PICTURES[:8] + OF_ANY_MODE if min(one.size) > 3])


@pytest.mark.parametrize("size", [{}, {"size": {"height": 96, "width": 70}}])
def test_dinov3s_processor_which_rounds_nothing_differs_by_our_two_roundings(
    size: dict[str, Any], tmp_path: Path
) -> None:
    processor = transformers.DINOv3ViTImageProcessor(**size)
    processor.save_pretrained(tmp_path)
    ours = read_processor(tmp_path, "dinov3_vit")
    for one in OF_ANY_MODE[:16]:
        plain = Image.fromarray(to_rgb(one, return_numpy=True))
        expected = processor(plain, return_tensors="pt")["pixel_values"][0]
        found = ours.normalize(torch.from_numpy(ours.pixels(one)))
        assert (found - expected).abs().max() * 255 * max(ours.std) < 1.1, (one.size, one.mode)


# --- torchvision, and facebook's repositories, which use its transforms


@pytest.mark.parametrize(
    "weights",
    [
        *torchvision.models.ViT_B_16_Weights,
        torchvision.models.ViT_L_16_Weights.IMAGENET1K_V1,
        torchvision.models.ViT_L_32_Weights.IMAGENET1K_V1,
    ],
    ids=str,
)
def test_preprocessing_equals_torchvisions_presets(weights: Any) -> None:
    name, size = str(weights).split("_Weights")[0].lower(), weights.meta["min_size"][0]
    config = named_config("vit_" + name.removeprefix("vit_").replace("_", ""), image_size=size)
    source = Source(name=f"torchvision/{name}", file=weights.url.rsplit("/")[-1], tensors={})
    assert_same(FAMILIES["torchvision"].read_preprocess(source, config), weights.transforms(), PICTURES[:10])


def own_folder(folder: Path, fit: Preprocess, **options: Any) -> Path:
    """One of our model folders, with a head that distinguishes pictures."""
    model = small_model(embed_dim=128, num_heads=2, **options)
    with torch.no_grad():
        model.head.weight.normal_()
    return save_pretrained(with_preprocess(model, fit), folder)


def in_timm(folder: Path) -> tuple[Any, Any]:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return model, timm.data.create_transform(**timm.data.resolve_data_config(model=model))


def in_transformers(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return (
        lambda images: model(images).logits,
        lambda one: processor(one, return_tensors="pt")["pixel_values"][0],
    )


def in_torchvision(folder: Path) -> tuple[Any, Any]:
    model = torchvision.models.VisionTransformer(32, 8, 3, 2, 128, 512, num_classes=5).eval()
    model.load_state_dict(torch.load(folder / "model.pth", weights_only=True))
    presets = torchvision.transforms._presets
    return model, presets.ImageClassification(crop_size=32, resize_size=37)


OPENED = {"timm": in_timm, "huggingface": in_transformers, "torchvision": in_torchvision}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "timm, center": ("timm", {"resize_to": (36, 36)}),
    "timm, squash": ("timm", {"resize": "squash", "resize_to": (35, 35), "interpolation": "bilinear"}),
    "timm, border": ("timm", {"resize": "border", "resize_to": (32, 32), "side_rounding": "nearest"}),
    "transformers' ViT": ("huggingface", {"resize": "squash", "interpolation": "bilinear"}),
    "transformers' BiT": ("huggingface", {"resize_to": (37, 37), "crop_rounding": "down"}),
    "torchvision": ("torchvision", {"resize_to": (37, 37), "interpolation": "bilinear"}),
}


@pytest.mark.parametrize("case", RULES)
@torch.no_grad()
def test_converted_model_with_its_librarys_transform_has_our_logits(case: str, tmp_path: Path) -> None:
    to, rule = RULES[case]
    fit = Preprocess(image_size=(32, 32), **IMAGENET, **rule)
    resample = {"huggingface": "huggingface", "torchvision": "torchvision"}.get(to, "timm")
    folder = own_folder(tmp_path / "ours", fit, resample=resample)
    done = convert(folder, tmp_path / "theirs", format=to, images=PICTURES[:2])
    assert done.prepared is None
    model, transform = OPENED[to](tmp_path / "theirs")
    ours = from_pretrained(folder)
    for one in PICTURES[:2] + PICTURES[6:10]:
        expected = ours(fit.normalize(torch.from_numpy(fit.pixels(one))[None]))
        assert relative_error(model(transform(one)[None]), expected) < 1e-5, one.size
