"""Copies and near-duplicates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageDraw, ImageEnhance
from sklearn.datasets import load_digits

from tests.auditing.test_looks import encoded, scene
from vitascope.auditing.duplicates import Pair, copies, duplicates, groups_of, near_duplicates, neighbours
from vitascope.auditing.looks import look_at
from vitascope.data.contents import contents_of

COUNT = 40


def framed(image: Image.Image) -> Image.Image:
    frame = Image.new("RGB", (image.width + 12, image.height + 12), "white")
    frame.paste(image, (6, 6))
    return frame


def captioned(image: Image.Image) -> Image.Image:
    image = image.copy()
    ImageDraw.Draw(image).rectangle((0, image.height - 12, image.width, image.height), fill="black")
    return image


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "resized": lambda image: image.resize((70, 52)),
    "recompressed": lambda image: image,
    "cropped or framed": lambda image: image.crop((3, 8, 3 + 109, 8 + 82)),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "turned by 180 degrees": lambda image: image.transpose(Image.Transpose.ROTATE_180),
    "turned by 90 degrees": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "brighter or darker": lambda image: ImageEnhance.Brightness(image).enhance(0.6),
    "with a border or a caption": captioned,
}


def pairs_with(changed: list[Image.Image], features: npt.NDArray[np.float64] | None = None) -> list[Pair]:
    originals = [encoded(scene(seed)) for seed in range(COUNT)]
    looks = look_at([*originals, *(encoded(image, quality=70) for image in changed)])
    return near_duplicates(looks, features)


@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_copy_is_found_and_its_change_named(how: str) -> None:
    alike = np.eye(COUNT)[[*range(COUNT), *range(5)]]  # needed where the hash changes too much
    features = alike if how == "with a border or a caption" else None
    pairs = pairs_with([CHANGES[how](scene(seed)) for seed in range(5)], features)
    assert {(pair.first, pair.second) for pair in pairs} == {(seed, COUNT + seed) for seed in range(5)}
    assert {pair.how for pair in pairs} == {how}
    assert all(0.5 <= pair.score < 1 for pair in pairs)


def test_a_framed_copy_is_found() -> None:
    assert [(pair.first, pair.second) for pair in pairs_with([framed(scene(7))])] == [(7, COUNT)]


def test_different_pictures_are_no_pair() -> None:
    assert pairs_with([]) == []


def test_neighbours_propose_pairs_that_no_hash_does() -> None:
    crops = [scene(seed).crop((0, 17, 128, 96)).crop((0, 0, 104, 79)) for seed in range(8)]
    looks = look_at([*(scene(seed) for seed in range(COUNT)), *crops])
    nearest = np.concatenate([np.roll(np.arange(COUNT), 1), np.arange(8)])[:, None]
    pairs = {(pair.first, pair.second) for pair in near_duplicates(looks, nearest=nearest)}
    assert pairs == {(seed, COUNT + seed) for seed in range(8)}


def test_digits_of_one_class_are_different_pictures() -> None:
    images = (load_digits().images[:500] * 15).astype(np.uint8)
    pairs = near_duplicates(look_at(list(images)), images.reshape(len(images), -1))
    assert len(pairs) < 5


def test_flat_and_unreadable_pictures_are_in_no_pair() -> None:
    speck = np.pad(np.ones((3, 3), np.uint8), ((5, 24), (8, 21)))  # one level, as compression leaves
    flat = [speck + np.uint8(value) for value in range(100, 140)]
    looks = look_at([*flat, b"none", b"none", b"none"])
    assert near_duplicates(looks, np.ones((len(looks), 3))) == []
    assert near_duplicates(look_at([])) == [] == near_duplicates(look_at([b"none"]))


def test_neighbours_are_the_nearest_by_cosine() -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(1100, 5)) * random.uniform(1, 9, (1100, 1))
    indices, similarities = neighbours(features, 4)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    cosines = unit @ unit.T - 9 * np.eye(1100)
    assert np.array_equal(indices, np.argsort(-cosines, axis=1)[:, :4])
    assert similarities == pytest.approx(np.sort(cosines, axis=1)[:, :-5:-1], abs=1e-5)
    with pytest.raises(ValueError, match="between 1 and 1"):
        neighbours(features[:2], 2)


def test_equal_files_are_copies_of_the_first() -> None:
    sources = [encoded(scene(0)), encoded(scene(1)), encoded(scene(0)), encoded(scene(0))]
    assert [(pair.first, pair.second) for pair in copies(contents_of(sources))] == [(0, 2), (0, 3)]


def test_pairs_connect_groups() -> None:
    groups = groups_of([Pair(0, 3, 1, ""), Pair(3, 4, 1, "")], 6)
    assert groups[0] == groups[3] == groups[4]
    assert len(set(groups.tolist())) == 4


def test_leaks_and_different_labels_come_first_and_only_harmless_copies_are_to_drop() -> None:
    equal = [Pair(0, 1, 1, "equal file"), Pair(2, 3, 1, "equal file")]
    near = [Pair(0, 1, 0.99, "recompressed"), Pair(4, 5, 0.9, "mirrored"), Pair(6, 7, 0.6, "resized")]
    parts = ["train"] * 3 + ["test", "train", "train", "train", "train"]
    labels = ["cat", "cat", "cat", "cat", "cat", "dog", "cat", ""]
    findings = duplicates(equal, near, parts, labels)
    assert [(one.issue, one.image, one.other, one.suggestion) for one in findings] == [
        ("copy", 2, 3, "look"),
        ("near-duplicate", 5, 4, "look"),
        ("copy", 1, 0, "drop"),
        ("near-duplicate", 7, 6, "look"),
    ]
    assert findings[0].detail == "equal file: a copy of another image, in test"
    assert findings[1].detail == "mirrored: a copy of another image, in train; here dog, there cat"


def test_a_group_has_a_finding_less_than_images() -> None:
    pairs = [Pair(first, second, 0.8, "") for first in range(5) for second in range(first + 1, 5)]
    findings = duplicates([], pairs, ["train"] * 4 + ["test"])
    assert len(findings) == 4
    assert {one.other for one in findings} == {4}  # the worst pairs: those with the test image
    assert {one.image for one in findings} == {0, 1, 2, 3}
