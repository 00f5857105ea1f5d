"""Pictures of bad quality, among usual ones and among data that are all like that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, ImageFilter

from tests.data.test_looks import encoded, scene
from vitascope.analysis.auditing.quality import LISTED, quality_findings, quality_scores
from vitascope.data.finding import Issue
from vitascope.data.looks import Looks, look_at
from vitascope.models.decoding import ImageSource

FAULTS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "dark": lambda image: image.point(lambda value: value * 0.05),
    "bright": lambda image: image.point(lambda value: 255 - (255 - value) * 0.1),
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(3)),
    "empty": lambda image: Image.new("RGB", image.size, (90, 120, 60)),
    "shape": lambda image: image.crop((0, 0, image.width, 20)),
    "grey": lambda image: image.convert("L"),
}


@pytest.fixture(scope="module")
def usual() -> Looks:
    return look_at([encoded(scene(seed)) for seed in range(60)])


def listed(looks: Looks, usual: Looks | None = None) -> dict[Issue, int]:
    scores = quality_scores(looks, usual)
    return {issue: int((some >= LISTED).sum()) for issue, some in scores.items() if (some >= LISTED).any()}


def test_nothing_usual_is_listed(usual: Looks) -> None:
    assert listed(usual) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_listed_among_usual_pictures(usual: Looks, fault: str) -> None:
    worse = look_at([encoded(FAULTS[fault](scene(seed))) for seed in range(100, 105)])
    assert listed(worse, usual) == {fault: 5}


def test_pictures_of_one_shade_are_listed_however_many_they_are(usual: Looks) -> None:
    icon = Image.new("RGBA", (64, 64), (255, 255, 255, 0))  # white on a transparent ground, laid over white
    icon.paste((255, 255, 255, 255), (8, 8, 40, 40))
    plain = [icon, Image.new("L", (20, 20)), Image.new("RGB", (300, 20), (90, 120, 60))] * 10
    assert listed(look_at(plain))["empty"] == 30
    halves = Image.new("RGB", (64, 64), (76, 76, 76))
    halves.paste((255, 0, 0), (0, 0, 32, 64))  # red of the same luminance
    looks = look_at([*plain[:3], halves, scene(0), b"none"])
    assert looks["plain"].tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "empty"])
def test_a_fault_of_all_pictures_is_listed_for_none(fault: str) -> None:
    assert listed(look_at([encoded(FAULTS[fault](scene(seed))) for seed in range(30)])) == {}


def test_a_tiny_picture_is_listed_beside_large_ones_only(usual: Looks) -> None:
    tiny = look_at([encoded(scene(seed).resize((16, 12))) for seed in range(30)])
    assert listed(tiny, usual)["shape"] == 30
    assert listed(tiny) == {}


def test_findings_name_what_was_measured(usual: Looks, tmp_path: Path) -> None:
    scene(0).save(tmp_path / "a.jpg", "PNG")
    sources: list[ImageSource] = [
        *(encoded(scene(seed)) for seed in range(60)),
        *(
            tmp_path / "a.jpg",
            b"no picture",
            encoded(FAULTS["dark"](scene(1))),
            encoded(FAULTS["empty"](scene(1))),
        ),
    ]
    looks = look_at(sources)
    findings = quality_findings(looks, quality_scores(looks[looks["width"] > 0]))
    assert [(one.image, one.issue, one.drop) for one in sorted(findings, key=lambda one: one.image or 0)] == [
        (60, "unreadable", False),
        (61, "unreadable", True),
        (62, "dark", False),
        (63, "empty", True),
    ]
    details = {one.image: one.detail for one in findings}
    assert details[60] == "a PNG named .jpg"
    assert details[61] == "not a picture that Pillow can read"
    assert details[62].startswith("hardly a pixel is brighter than ")
    assert all(one.score >= LISTED for one in findings)
