"""Folders of images, one folder a class, with the splits above them or without."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vitascope.data.splits import (
    VAL_SHARE,
    ImageSet,
    Splits,
    check_known_classes,
    split_tree,
    stratified_split,
)
from vitascope.errors import UserError

IMAGE_SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".avif", ".jp2", ".heic", ".heif"),
}
"""What counts as an image in a folder, by the ending of its name, in any case."""
SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
"""Names of splits; `split_of` knows them in any case, and with `set` or `data` after them."""

_LISTED_LABELS = 5


def split_of(name: str) -> str | None:
    """The split that a folder's name means: `train` of `Train`, `training_set` or `train-data`; or None."""
    word = re.sub(r"[-_ ]*(set|data)$", "", name.lower())
    return next((split for split, names in SPLIT_FOLDERS.items() if word in names), None)


def split_folder(root: Path, split: str) -> Path | None:
    """The folder of a split in a folder; None where there is none.

    Raises:
        UserError: two folders whose names mean this split.
    """
    found = [folder for folder in _visible_folders(root) if split_of(folder.name) == split]
    if len(found) > 1:
        listed = " and ".join(folder.name for folder in found)
        raise UserError(f"{root}: {listed} both mean the {split} split; keep one, or rename the other")
    return found[0] if found else None


def open_folder(root: Path, *, seed: int) -> Splits:
    """The splits of a folder: `train/<class>/`, and `val/`, `test/` or both; or one tree, `<class>/`.

    What is missing of validation is taken from train, a tenth of each class by seed. Of one tree, a tenth
    of each class is the validation set and another tenth the test set, by seed.

    Raises:
        UserError: no images, one class, classes that differ between splits, or two folders of one split.
    """
    folder = split_folder(root, "train")
    if folder is None:
        train, val, test = split_tree(read_tree(root), seed)
        return Splits(train, val, test, 3, root, passed_over(root, (train, val, test)))
    train = read_tree(folder, name="train")
    given = optional_split(root, "val", train.class_names)
    train, val = (train, given) if given is not None else stratified_split(train, VAL_SHARE, "val", seed)
    final = optional_split(root, "test", train.class_names)
    sets = (train, val) if final is None else (train, val, final)
    return Splits(train, val, final, 3, root, passed_over(root, sets))


def passed_over(root: Path, used: Iterable[ImageSet]) -> tuple[str, ...]:
    """What lies below a folder and is in none of its image sets: "60 .mov", and class folders without images.

    Hidden files and folders are not counted.
    """
    unused = _kinds(root) - Counter(_kind(str(source)) for images in used for source in images.sources)
    return tuple(_listed(unused)) + tuple(
        f"the folder {folder.relative_to(root)}, which holds no image ({', '.join(_listed(kinds))})"
        for folder, kinds in _classes_without_images(root)
    )


def _classes_without_images(root: Path) -> list[tuple[Path, Counter[str]]]:
    """Folders in the place of class folders that have files but no image; and the kinds of these files."""
    folders = _visible_folders(root)
    if split_folder(root, "train") is not None:
        folders = [below for folder in folders if split_of(folder.name) for below in _visible_folders(folder)]
    kinds = {folder: _kinds(folder) for folder in folders}
    return [(folder, found) for folder, found in kinds.items() if found and not IMAGE_SUFFIXES & found.keys()]


def _kinds(folder: Path) -> Counter[str]:
    """How many visible files of each kind there are below a folder."""
    found: Counter[str] = Counter()
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found.update(_kind(name) for name in files if not name.startswith("."))
    return found


def _kind(name: str) -> str:
    """The suffix of a file's name."""
    return os.path.splitext(name)[1].lower()


def _listed(kinds: Counter[str]) -> list[str]:
    """Counts of files by their kinds, the commonest first."""
    ordered = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    return [f"{count:,} {kind or 'files without a suffix'}" for kind, count in ordered]


def _visible_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def read_any(root: Path) -> ImageSet:
    """All images below a folder, each of the class that its path says, with splits above classes or without.

    An image outside of class folders is of the class "".
    """
    files = image_files(root)
    named = [_class_of(path.relative_to(root).parts[:-1]) for path in files]
    class_names = tuple(sorted(set(named)))
    numbers = {name: number for number, name in enumerate(class_names)}
    return ImageSet("all", files, np.array([numbers[name] for name in named], dtype=np.int64), class_names)


def _class_of(folders: tuple[str, ...]) -> str:
    """The class of an image by the folders above it."""
    if len(folders) > 1 and split_of(folders[0]) is not None:
        return folders[1]
    return folders[0] if folders else ""


def open_unlabelled(root: Path, *, seed: int) -> Splits:
    """The splits of a folder of images without classes: all images below it, or below its `train/`.

    A tenth by seed is the validation set; there is no test set.

    Raises:
        UserError: not two images.
    """
    folder = split_folder(root, "train") or root
    files = image_files(folder)
    if len(files) < 2:
        raise UserError(f"{folder}: {len(files)} images; at least 2 are needed")
    images = ImageSet("train", files, np.zeros(len(files), dtype=np.int64), ("image",))
    train, val = stratified_split(images, VAL_SHARE, "val", seed)
    return Splits(train, val, None, 3, root, passed_over(folder, (train, val)))


def has_classes(root: Path) -> bool:
    """Whether a folder, or its `train/`, has two class folders with images or more."""
    folder = split_folder(root, "train") or root
    return sum(bool(image_files(path)) for path in _visible_folders(folder)) > 1


def inner_folder(folder: Path) -> Path:
    """What a folder wraps: itself, or what its only entry leads to; a split's folder is no wrapping."""
    while True:
        entries = [path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX"))]
        if len(entries) != 1 or not entries[0].is_dir() or split_of(entries[0].name) is not None:
            return folder
        folder = entries[0]


def optional_split(root: Path, split: str, class_names: tuple[str, ...]) -> ImageSet | None:
    """The images of a split that may be there or not, under any of its usual names.

    Raises:
        UserError: as `read_tree` and `split_folder`.
    """
    folder = split_folder(root, split)
    return None if folder is None else read_tree(folder, name=split, class_names=class_names)


def read_tree(root: Path, *, name: str = "all", class_names: tuple[str, ...] | None = None) -> ImageSet:
    """Images in `root/<class>/`, at any depth below it, in the order of their names.

    Args:
        root: the folder of the class folders.
        name: what the split is called.
        class_names: the model's classes; None takes the folders' names.

    Raises:
        UserError: no class folder with an image, only one, or one that `class_names` lacks.
    """
    files = {folder.name: image_files(folder) for folder in _visible_folders(root)}
    found = tuple(folder for folder, paths in files.items() if paths)
    if not found:
        expected = f"expected {root}/<class>/<image>"
        instead = _sorting_advice(root) or _instead(root)
        raise UserError(f"{root}: no images in class folders; {expected}{instead}")
    if class_names is None:
        if len(found) == 1:
            needs = "a classifier needs two folders or more"
            raise UserError(f"{root}: only one class, {found[0]!r}; {needs}{_instead(root)}")
        class_names = found
    check_known_classes(found, class_names, str(root), "class folders")
    labelled = [(path, class_names.index(folder)) for folder in found for path in files[folder]]
    labels = np.array([label for _, label in labelled], dtype=np.int64)
    return ImageSet(name, [path for path, _ in labelled], labels, class_names)


def labels_in_names(folder: Path) -> dict[Path, str]:
    """The labels in the names of the images directly in a folder: `dog` of `dog.1.jpg` and `dog_001.jpg`.

    A label is what stands before the number at the end of a name, without what separates them. Whether it is
    a class is for a person to say (`IMG_0001.jpg` is of none), so nothing is trained on such labels. Empty
    where a name has none, or where there are fewer than two different labels.
    """
    files = [path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
    labels = {path: re.sub(r"[ ._-]*\(?\d+\)?$", "", path.stem) for path in sorted(files)}
    clear = all(label and label != path.stem for path, label in labels.items())
    return labels if clear and len(set(labels.values())) > 1 else {}


def sort_by_name(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Move the images that lie directly in a folder into class folders, by the labels in their names.

    Args:
        folder: of images like `dog.1.jpg` and `cat.2.jpg`; see `labels_in_names`.

    Returns:
        Images moved, by class.

    Raises:
        UserError: names without labels; nothing is moved then.
    """
    labels = labels_in_names(Path(folder))
    if not labels:
        raise UserError(f"{folder}: the names of its images are not like dog.1.jpg and cat.2.jpg")
    for path, label in labels.items():
        (path.parent / label).mkdir(exist_ok=True)
        path.rename(path.parent / label / path.name)
    return dict(Counter(labels.values()))


def _sorting_advice(folder: Path) -> str:
    """How to sort a folder of images whose names have labels, as the end of a message."""
    counts = Counter(labels_in_names(folder).values())
    if not counts:
        return ""
    listed = ", ".join(f"{label}: {count:,}" for label, count in sorted(counts.items())[:_LISTED_LABELS])
    more = ", ..." if len(counts) > _LISTED_LABELS else ""
    script = (
        f"from vitascope.data.formats.folder import sort_by_name; sort_by_name({json.dumps(str(folder))})"
    )
    return (
        f"; its images have labels in their names ({listed}{more}); if these are the classes, this sorts "
        f"the images into folders: python -c {shlex.quote(script)}"
    )


def _instead(root: Path) -> str:
    """What a folder has that is no class folder with images, as the end of a message."""
    return "".join(
        f"; the folder {folder.name} holds no image, but {', '.join(_listed(kinds))}"
        for folder, kinds in _classes_without_images(root)
    )


def image_files(folder: Path) -> list[Path]:
    """Files below a folder that are named like images, sorted; hidden ones are left out."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )
