"""Folders of images, one folder a class, with the splits above them or without."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitascope.data.splits import (
    TEST_SHARE,
    VAL_SHARE,
    ImageSet,
    Splits,
    check_known_classes,
    stratified_split,
)
from vitascope.errors import UserError

IMAGE_SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".avif", ".jp2"),
}
"""What counts as an image in a folder, by the ending of its name, in any case."""
SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


def open_folder(root: Path, *, seed: int) -> Splits:
    """The splits of a folder: `train/<class>/`, and `val/`, `test/` or both; or one tree, `<class>/`.

    What is missing of validation is taken from train, a tenth of each class by seed. Of one tree, a tenth
    of each class is the validation set and another tenth the test set, by seed.

    Raises:
        UserError: no images, one class, or classes that differ between splits.
    """
    if not (root / "train").is_dir():
        tree = read_tree(root)
        rest, test = stratified_split(tree, TEST_SHARE, "test", seed)
        train, val = stratified_split(rest, VAL_SHARE / (1 - TEST_SHARE), "val", seed)
        return Splits(train, val, test, channels=3)
    train = read_tree(root / "train", name="train")
    given = optional_split(root, "val", train.class_names)
    train, val = (train, given) if given is not None else stratified_split(train, VAL_SHARE, "val", seed)
    return Splits(train, val, optional_split(root, "test", train.class_names), channels=3)


def open_unlabelled(root: Path, *, seed: int) -> Splits:
    """The splits of a folder of images without classes: all images below it, or below its `train/`.

    A tenth by seed is the validation set; there is no test set.

    Raises:
        UserError: not two images.
    """
    folder = root / "train" if (root / "train").is_dir() else root
    files = image_files(folder)
    if len(files) < 2:
        raise UserError(f"{folder}: {len(files)} images; at least 2 are needed")
    images = ImageSet("train", files, np.zeros(len(files), dtype=np.int64), ("image",))
    train, val = stratified_split(images, VAL_SHARE, "val", seed)
    return Splits(train, val, None, channels=3)


def has_classes(root: Path) -> bool:
    """Whether a folder, or its `train/`, has two class folders with images or more."""
    folder = root / "train" if (root / "train").is_dir() else root
    below = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sum(bool(image_files(path)) for path in below) > 1


def inner_folder(folder: Path) -> Path:
    """What a folder wraps: itself, or what its only entry leads to; a split's folder is no wrapping."""
    splits = {name for names in SPLIT_FOLDERS.values() for name in names}
    while True:
        entries = [path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX"))]
        if len(entries) != 1 or not entries[0].is_dir() or entries[0].name in splits:
            return folder
        folder = entries[0]


def optional_split(root: Path, split: str, class_names: tuple[str, ...]) -> ImageSet | None:
    """The images of a split that may be there or not, under any of its usual names."""
    for folder in SPLIT_FOLDERS[split]:
        if (root / folder).is_dir():
            return read_tree(root / folder, name=split, class_names=class_names)
    return None


def read_tree(root: Path, *, name: str = "all", class_names: tuple[str, ...] | None = None) -> ImageSet:
    """Images in `root/<class>/`, at any depth below it, in the order of their names.

    Args:
        root: the folder of the class folders.
        name: what the split is called.
        class_names: the model's classes; None takes the folders' names.

    Raises:
        UserError: no class folder with an image, only one, or one that `class_names` lacks.
    """
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    files = {folder.name: image_files(folder) for folder in folders}
    found = tuple(folder for folder, paths in files.items() if paths)
    if not found:
        raise UserError(f"{root}: no images in class folders; expected {root}/<class>/<image>")
    if class_names is None:
        if len(found) == 1:
            raise UserError(f"{root}: only one class, {found[0]!r}; a classifier needs two folders or more")
        class_names = found
    check_known_classes(found, class_names, str(root), "class folders")
    labelled = [(path, class_names.index(folder)) for folder in found for path in files[folder]]
    labels = np.array([label for _, label in labelled], dtype=np.int64)
    return ImageSet(name, [path for path, _ in labelled], labels, class_names)


def image_files(folder: Path) -> list[Path]:
    """Files below a folder that are named like images, sorted; hidden ones are left out."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )
