"""RandAugment against timm, which runs PIL, and against torchvision's own kernels."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitascope.data.changes import apply_changes
from vitascope.data.randaugment import OPERATIONS, operation_arguments, operation_changes

timm_augment = pytest.importorskip(
    "timm.data.auto_augment", reason="timm is not installed (vitascope[peers])"
)
torchvision = pytest.importorskip(
    "torchvision.transforms.v2.functional", reason="torchvision is not installed (vitascope[peers])"
)

TIMM = {
    "Solarize": "SolarizeIncreasing",
    "Posterize": "PosterizeIncreasing",
    "Color": "ColorIncreasing",
    "Contrast": "ContrastIncreasing",
    "Brightness": "BrightnessIncreasing",
    "Sharpness": "SharpnessIncreasing",
    "TranslateX": "TranslateXRel",
    "TranslateY": "TranslateYRel",
}
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
NAMES = [name for name in OPERATIONS if name != "Identity"]


def timm_arguments(name: str, magnitude: float) -> tuple[Any, ...]:
    function = timm_augment.LEVEL_TO_ARG[TIMM.get(name, name)]
    return () if function is None else function(magnitude, dict(timm_augment._HPARAMS_DEFAULT))


def our_argument(name: str, magnitude: float, sign: float) -> float:
    operation = np.array([OPERATIONS.index(name)])
    return float(operation_arguments(operation, np.array([magnitude]), np.array([sign]))[0])


def pictures(count: int = 4, height: int = 24, width: int = 33) -> torch.Tensor:
    """Smooth pictures with a little noise, whole levels: (B, 3, H, W)."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 4, 5, generator=generator) * 220 + 15
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear", align_corners=True)
    return (smooth + 10 * torch.rand(smooth.shape, generator=generator)).round()


def applied(name: str, levels: torch.Tensor, argument: float) -> torch.Tensor:
    count = len(levels)
    layer = (np.full(count, OPERATIONS.index(name)), np.full(count, argument))
    return apply_changes(levels, operation_changes([layer], levels.shape))


def test_operations_equal_timms_increasing_list() -> None:
    missing = {TIMM.get(name, name) for name in NAMES} - set(timm_augment._RAND_INCREASING_TRANSFORMS)
    assert not missing
    others = set(timm_augment._RAND_INCREASING_TRANSFORMS) - {TIMM.get(name, name) for name in NAMES}
    assert others == {"Invert", "SolarizeAdd"}  # not in the paper


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_arguments_equal_timm(name: str, sign: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm_augment, "_randomly_negate", lambda value: sign * value)
    for magnitude in np.linspace(0, 9.99, 81):
        expected = (*timm_arguments(name, magnitude), 0.0)[0]  # 0 if there is none
        assert our_argument(name, magnitude, sign) == pytest.approx(expected), magnitude


def test_posterize_keeps_one_bit_unlike_timm() -> None:
    assert timm_arguments("Posterize", 10.0) == (0,)
    assert our_argument("Posterize", 10.0, 1.0) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [2.0, 9.0])
def test_pictures_equal_timm(name: str, magnitude: float) -> None:
    levels = pictures()
    random.seed(1)
    arguments = timm_arguments(name, magnitude)
    fill = {"resample": Image.Resampling.BILINEAR, "fillcolor": (128, 128, 128)}
    operation = timm_augment.NAME_TO_OP[TIMM.get(name, name)]
    found = applied(name, levels, float((*arguments, 0.0)[0]))
    for mine, source in zip(found, levels, strict=True):
        picture = Image.fromarray(source.byte().permute(1, 2, 0).numpy())
        theirs = torch.from_numpy(np.array(operation(picture, *arguments, **fill))).permute(2, 0, 1)
        difference = (mine - theirs).abs()
        if name in GEOMETRIC:  # ours fades into the grey at the border; PIL has a hard edge
            assert (difference > 1).float().mean() < 0.13
        else:
            assert difference.max() <= 1
