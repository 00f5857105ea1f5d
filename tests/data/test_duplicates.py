from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageEnhance
from sklearn.datasets import load_digits

from tests.data.test_looks import encoded, scene
from vitascope.data.duplicates import (
    Pair,
    duplicates,
    groups_of,
    near_duplicates,
    orientations,
    perceptual_hashes,
)
from vitascope.data.looks import look_at

COUNT = 40


def framed(image: Image.Image) -> Image.Image:
    frame = Image.new("RGB", (image.width + 12, image.height + 12), "white")
    frame.paste(image, (6, 6))
    return frame


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "nearly equal": lambda image: ImageEnhance.Brightness(image.resize((70, 52))).enhance(0.6),
    "cropped or framed": lambda image: image.crop((3, 8, 3 + 109, 8 + 82)),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "turned by 180 degrees": lambda image: image.transpose(Image.Transpose.ROTATE_180),
    "turned by 90 degrees": lambda image: image.transpose(Image.Transpose.ROTATE_90),
}


@functools.cache
def original(seed: int) -> bytes:
    return encoded(scene(seed))


def pairs_with(changed: list[Image.Image]) -> list[Pair]:
    looks = look_at([*map(original, range(COUNT)), *(encoded(image, quality=70) for image in changed)])
    return near_duplicates(looks)


def test_changed_copies_are_found_and_their_changes_named() -> None:
    hows = [how for how in sorted(CHANGES) for _ in range(5)]
    pairs = pairs_with([CHANGES[how](scene(seed)) for seed, how in enumerate(hows)])
    assert {(pair.first, pair.second) for pair in pairs} == {(n, COUNT + n) for n in range(len(hows))}
    assert all(pair.how == hows[pair.first] and 0.5 <= pair.score < 1 for pair in pairs)


def test_a_framed_copy_is_found_and_different_pictures_are_no_pair() -> None:
    assert [(pair.first, pair.second) for pair in pairs_with([framed(scene(7))])] == [(7, COUNT)]
    assert pairs_with([]) == []


def test_neighbours_propose_pairs_that_no_hash_does() -> None:
    crops = [scene(seed).crop((0, 17, 128, 96)).crop((0, 0, 104, 79)) for seed in range(8)]
    looks = look_at([*(scene(seed) for seed in range(COUNT)), *crops])
    features = np.random.default_rng(0).normal(size=(COUNT, 64))[[*range(COUNT), *range(8)]]
    assert len(near_duplicates(looks)) < 8
    pairs = {(pair.first, pair.second) for pair in near_duplicates(looks, features)}
    assert pairs == {(seed, COUNT + seed) for seed in range(8)}


def test_digits_of_one_class_are_different_pictures() -> None:
    images = (load_digits().images[:250] * 15).astype(np.uint8)
    pairs = near_duplicates(look_at(list(images)), images.reshape(len(images), -1))
    assert len(pairs) < 5


def test_flat_and_unreadable_pictures_are_in_no_pair() -> None:
    speck = np.pad(np.ones((3, 3), np.uint8), ((5, 24), (8, 21)))  # one level, as compression leaves
    flat = [speck + np.uint8(value) for value in range(100, 140)]
    looks = look_at([*flat, b"none", b"none", b"none"])
    assert near_duplicates(looks, np.ones((len(looks), 3))) == []
    assert near_duplicates(look_at([])) == [] == near_duplicates(look_at([b"none"]))


def test_spots_at_different_places_of_a_plain_ground_are_no_pair() -> None:
    generator, spots = np.random.default_rng(0), []
    for _ in range(20):
        pixels = np.zeros((256, 256), np.uint8)
        down, across = generator.integers(0, 250, 2)
        pixels[down : down + 6, across : across + 6] = 255
        spots.append(pixels)
    assert near_duplicates(look_at(spots)) == []


def test_hashes_follow_the_eight_orientations() -> None:
    thumbnails = look_at([scene(seed) for seed in range(4)])["thumbnail"]
    turned = orientations(thumbnails)  # (4, 8, 32, 32)
    hashes = perceptual_hashes(thumbnails)
    for number in range(8):
        differing = np.bitwise_xor(hashes[:, number], perceptual_hashes(turned[:, number])[:, 0])
        assert all(bin(bits).count("1") <= 2 for bits in differing.tolist())


def test_the_hash_is_that_of_imagehash() -> None:
    """`imagehash.phash` 4.3.2 of two pictures."""
    rows, columns = np.indices((32, 32))
    first = (rows * rows * 7 + columns * rows * 13 + columns * 5) % 251
    squares = np.stack([first, (rows * columns**2 + rows * 31) // 5 % 256])
    own = [f"{hashed:016x}" for hashed in perceptual_hashes(squares.astype(np.uint8))[:, 0].tolist()]
    assert own == ["a6b19f26329b2c36", "86031f3c79727173"]


def test_pairs_connect_groups() -> None:
    groups = groups_of([Pair(0, 3, 1, ""), Pair(3, 4, 1, "")], 6)
    assert groups[0] == groups[3] == groups[4]
    assert len(set(groups.tolist())) == 4


def test_leaks_and_different_labels_come_first_and_only_harmless_copies_are_to_drop() -> None:
    contents = np.array([b"1-a", b"1-a", b"1-b", b"1-b", b"1-c", b"1-d", b"1-e", b"1-f"])
    near = [Pair(0, 1, 0.99, "nearly equal"), Pair(4, 5, 0.9, "mirrored"), Pair(6, 7, 0.6, "nearly equal")]
    parts = ["train"] * 3 + ["test", "train", "train", "train", "train"]
    labels = ["cat", "cat", "cat", "cat", "cat", "dog", "cat", ""]
    findings = duplicates(contents, near, parts, labels)
    assert [(one.issue, one.image, one.other, one.drop) for one in findings] == [
        ("leak", 2, 3, True),
        ("near-duplicate", 5, 4, False),
        ("copy", 1, 0, True),
        ("near-duplicate", 7, 6, False),
    ]
    assert findings[0].detail == "equal file: a copy of another image, in test"
    assert findings[1].detail == "mirrored: a copy of another image; here dog, there cat"


@pytest.mark.parametrize(
    ("parts", "dropped"), [(["test", "val"], 1), (["val", "test"], 0), (["test", "train"], 1)]
)
def test_of_a_leak_the_image_of_the_part_that_is_measured_later_stays(parts: list[str], dropped: int) -> None:
    (leak,) = duplicates(np.array([b"1-a", b"1-a"]), [], parts, ["cat", "cat"])
    assert (leak.issue, leak.image, leak.suggestion) == ("leak", dropped, "drop")
    (differing,) = duplicates(np.array([b"1-a", b"1-a"]), [], parts, ["cat", "dog"])
    assert differing.suggestion == "look"


def test_a_group_has_a_finding_less_than_images() -> None:
    pairs = [Pair(first, second, 0.8, "") for first in range(5) for second in range(first + 1, 5)]
    contents = np.array([b"1-a", b"1-b", b"1-c", b"1-d", b"1-e"])
    findings = duplicates(contents, pairs, ["train"] * 4 + ["test"])
    assert len(findings) == 4
    assert {one.other for one in findings} == {4}  # the worst pairs: those with the test image
    assert {one.image for one in findings} == {0, 1, 2, 3}
    copies = duplicates(np.array([b"1-a", b"1-b", b"1-a", b"1-a"]), [], ["train"] * 4)
    assert [(one.image, one.other) for one in copies] == [(2, 0), (3, 0)]
