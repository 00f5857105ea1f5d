"""What alone tells the label is reported; classes and groups that are few, missing or worse too."""

import re
from typing import Any, cast

import numpy as np
import pytest

from vitascope.analysis.auditing.shortcuts import groups, shortcuts
from vitascope.data.looks import Looks
from vitascope.data.targets import ClassIndices, ClassSets, Targets

N = 400
NONE = np.array([], dtype=np.str_)
NOWHERE = np.full(N, "")
LABELS = np.arange(N) % 2
TARGETS = ClassIndices(LABELS, ("cat", "dog"))
LETTERS = np.array(list("ab"))[LABELS]


def looks_of(count: int = N, **values: Any) -> Looks:
    random = np.random.default_rng(0)
    numbers = {name: random.integers(50, 60, count) for name in ("height", "width", "file_bytes")}
    texts = {name: np.full(count, "") for name in ("format", "camera", "day")}
    colours = {name: random.uniform(size=(count, 3)) for name in ("colour", "border")}
    floats = {name: random.uniform(size=count) for name in ("brightness", "sharpness")}
    return cast("Looks", {**numbers, **texts, **colours, **floats, **values})


def noisy(right: float) -> np.ndarray:
    """Numbers that tell the label in so many cases of two."""
    random = np.random.default_rng(1)
    return np.where(random.uniform(size=N) < right, LABELS, 1 - LABELS) + random.uniform(0, 0.5, N)


@pytest.mark.parametrize(
    ("looks", "folders", "expected"),
    [
        ({}, NOWHERE, []),
        ({"file_bytes": noisy(0.8)}, NOWHERE, ["file size"]),
        ({"height": 50 + 20 * LABELS}, NOWHERE, ["number of pixels", "proportions"]),
        ({"format": np.array(["PNG", "JPEG"])[LABELS]}, NOWHERE, ["format"]),
        ({"day": np.char.add("2026-01-1", LABELS.astype(str))}, NOWHERE, ["day"]),
        ({"camera": np.arange(N).astype(str)}, NOWHERE, []),
        ({"border": np.stack([noisy(0.8)] * 3, axis=1)}, NOWHERE, ["border colour"]),
        ({"brightness": noisy(0.7)}, NOWHERE, []),
        ({"brightness": noisy(0.95)}, NOWHERE, ["brightness"]),
        ({}, LETTERS, ["folder"]),
    ],
)
def test_what_alone_tells_the_label(looks: dict[str, Any], folders: np.ndarray, expected: list[str]) -> None:
    findings = shortcuts(looks_of(**looks), TARGETS, folders, NONE)
    assert sorted(finding.detail.split(" alone")[0] for finding in findings) == expected
    for finding in findings:
        value, low, high, guess = map(int, re.findall(r"\d+", finding.detail)[:4])
        assert 50 == guess < low <= value <= high
        assert finding.issue == "shortcut"
        assert 0 < finding.score <= 1


def test_a_folder_of_a_group_is_no_shortcut_where_groups_stay_together() -> None:
    """Each of forty patients has one class and one folder; no folder is of another patient too."""
    patients = np.arange(N) // 10
    targets = ClassIndices(np.random.default_rng(0).permutation(40)[patients] % 2, TARGETS.class_names)
    names = np.char.add("patient", patients.astype(str))
    size = 50 + np.random.default_rng(1).permutation(40)[patients]
    assert shortcuts(looks_of(height=size, width=size), targets, NOWHERE, names) == []
    assert shortcuts(looks_of(height=size, width=size), targets, NOWHERE, NONE)


def test_a_few_large_groups_tell_the_label() -> None:
    hospitals = np.char.add(LETTERS, (np.arange(N) // 2 % 3).astype(str))
    (finding,) = shortcuts(looks_of(), TARGETS, NOWHERE, hospitals)
    assert finding.detail.startswith("group alone: 100%")


def test_of_several_classes_the_one_that_is_told_is_named() -> None:
    random = np.random.default_rng(2).uniform(size=N) < 0.5
    targets = ClassSets(np.stack([random, LABELS > 0], axis=1), ("tree", "sky"))
    (finding,) = shortcuts(looks_of(camera=LETTERS), targets, NOWHERE, NONE)
    assert "camera alone, of 'sky'" in finding.detail


@pytest.mark.parametrize("labels", [[], [0], [0, 1, 1], [0] * 30, [0] * 29 + [1]])
def test_few_images_and_one_class_report_no_shortcut(labels: list[int]) -> None:
    targets = ClassIndices(np.array(labels, dtype=np.int64), ("a", "b"))
    equal = looks_of(len(labels), file_bytes=np.zeros(len(labels)))
    assert shortcuts(equal, targets, np.full(len(labels), "x"), NONE) == []
    groups(targets, np.full(len(labels), "train"), NONE, np.full((len(labels), 2), 0.5))


def details(targets: Targets, parts: np.ndarray, *others: Any) -> str:
    findings = groups(targets, parts, *others)
    assert all(finding.issue == "group" and 0 < finding.score <= 1 for finding in findings)
    return "; ".join(finding.detail for finding in findings)


def test_rare_and_missing_classes_are_reported() -> None:
    labels = np.repeat([0, 1, 2], [300, 95, 5])
    targets = ClassIndices(labels, ("a", "b", "c"))
    parts = np.where(np.arange(N) % 10 == 0, "test", "train")
    parts[labels == 2] = "train"
    text = details(targets, parts, NONE)
    assert "'a' has 300 images, up to 60 times those of 'c' 5" in text
    assert "without an image in test: 'c'" in text
    assert groups(TARGETS, np.full(N, "train"), NONE) == []


def test_a_class_of_one_group_is_reported() -> None:
    owners = np.where(np.arange(N) % 4 == 0, "x", "y")
    assert details(TARGETS, np.full(N, "train"), owners) == "all 200 images of 'dog' are of group 'y'"


def test_a_group_that_is_predicted_worse_is_reported_and_chance_is_not() -> None:
    random = np.random.default_rng(0)
    owners, right = random.integers(20, size=N), random.uniform(size=N) < 0.85
    probabilities = np.eye(2)[np.where(right, LABELS, 1 - LABELS)]
    assert details(TARGETS, np.full(N, "train"), owners, probabilities) == ""
    right[owners == 3] = random.uniform(size=(owners == 3).sum()) < 0.3
    for targets, shown in (
        (TARGETS, np.eye(2)[np.where(right, LABELS, 1 - LABELS)]),
        (ClassSets(np.eye(2)[LABELS] > 0, ("a", "b")), np.eye(2)[np.where(right, LABELS, 1 - LABELS)]),
    ):
        assert details(targets, np.full(N, "train"), owners, shown).startswith("group '3': ")


def test_a_class_that_is_predicted_worse_is_reported() -> None:
    guesses = np.where((LABELS == 1) & (np.arange(N) % 3 > 0), 0, LABELS)
    text = details(TARGETS, np.full(N, "train"), NONE, np.eye(2)[guesses])
    assert re.fullmatch(r"class 'dog': 3\d% .* of 200 images .*, of the others 100%", text)


def test_accuracies_that_differ_by_chance_or_little_are_not_reported() -> None:
    reported = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        guesses = np.where(random.uniform(size=N) < 0.7, LABELS, 1 - LABELS)
        reported += len(groups(TARGETS, np.full(N, "train"), random.integers(20, size=N), np.eye(2)[guesses]))
    assert reported <= 4
    labels = np.arange(8000) % 2
    guesses = np.where(np.arange(8000) % 32 == 1, 0, labels)  # 94% of one class, 100% of the other
    assert groups(ClassIndices(labels, ("a", "b")), np.full(8000, "train"), NONE, np.eye(2)[guesses]) == []
