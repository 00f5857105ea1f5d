"""Folders of images, one folder per class, with or without splits above them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from vitascope.data.decoding import ImageSource
from vitascope.data.formats.format import DataFormat
from vitascope.data.listing import IMAGE_SUFFIXES, image_files, is_image, suffix_of, visible_files
from vitascope.data.splits import ImageSet, Inventory, Splits, check_known_classes, complete_splits
from vitascope.errors import UserError

SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
"""Folder names of splits, in any case; `set` or `data` may follow."""

_LISTED_LABELS = 5


def split_of(name: str) -> str | None:
    """The split of a folder's name: `train` for `Train`, `training_set` or `train-data`; or None."""
    word = re.sub(r"[-_ ]*(set|data)$", "", name.lower())
    return next((split for split, names in SPLIT_FOLDERS.items() if word in names), None)


def split_folder(root: Path, split: str) -> Path | None:
    """The folder of a split in a folder, or None."""
    found = [folder for folder in _visible_folders(root) if split_of(folder.name) == split]
    if len(found) > 1:
        listed = " and ".join(folder.name for folder in found)
        raise UserError(f"{root}: {listed} both mean the {split} split; keep one, or rename the other")
    return found[0] if found else None


class Folder(DataFormat):
    """A folder of class folders: `train/<class>/` with `val/`, `test/` or both, or one tree, `<class>/`."""

    def matches(self, data: str) -> bool:
        return os.path.isdir(data)

    def read(self, data: str) -> Inventory:
        root = Path(data)
        folder = split_folder(root, "train")
        if folder is None:
            return Inventory((read_tree(root),), channels=3, root=root)
        train = read_tree(folder, name="train")
        others = [_optional_split(root, split, train.class_names) for split in ("val", "test")]
        return Inventory((train, *(images for images in others if images is not None)), channels=3, root=root)

    def open(self, data: str, *, seed: int) -> Splits:
        splits = super().open(data, seed=seed)
        return dataclasses.replace(splits, passed_over=passed_over(Path(data), splits.parts.values()))

    def open_unlabelled(self, data: str, *, seed: int) -> Splits:
        """All images below the folder, or below its `train/`, unless there are class folders: a tenth by seed
        is the validation set, and there is no test set."""
        root = Path(data)
        folder = split_folder(root, "train") or root
        files = image_files(folder)
        if len(_by_class_folder(folder, files)) > 1:
            return self.open(data, seed=seed)
        if len(files) < 2:
            raise UserError(f"{folder}: {len(files)} images; at least 2 are needed")
        images = ImageSet("train", files, np.zeros(len(files), dtype=np.int64), ("image",))
        splits = complete_splits(Inventory((images,), channels=3, root=root), data, seed=seed)
        return dataclasses.replace(splits, passed_over=passed_over(folder, splits.parts.values()))

    def evaluation_set(self, data: str, class_names: tuple[str, ...]) -> ImageSet:
        root = Path(data)
        for split in ("test", "val"):
            images = _optional_split(root, split, class_names)
            if images is not None:
                return images
        return read_tree(root, class_names=class_names)

    def images_to_show(self, data: str) -> Sequence[ImageSource]:
        root = Path(data)
        files = image_files(split_folder(root, "test") or split_folder(root, "val") or root)
        if not files:
            raise UserError(f"{data}: no images in this folder")
        return files

    def inventory(self, data: str) -> Inventory:
        """All images below the folder; an image outside of class folders is of the class ""."""
        root = Path(data)
        files = image_files(root)
        named = []
        for path in files:
            folders = path.relative_to(root).parts[:-1]
            below = folders[1:] if len(folders) > 1 and split_of(folders[0]) is not None else folders
            named.append(below[0] if below else "")
        class_names = tuple(sorted(set(named)))
        numbers = {name: number for number, name in enumerate(class_names)}
        labels = np.array([numbers[name] for name in named], dtype=np.int64)
        return Inventory((ImageSet("all", files, labels, class_names),), channels=3, root=root)


def passed_over(root: Path, used: Iterable[ImageSet]) -> tuple[str, ...]:
    """The unused visible files below a folder, as "60 .mov", class folders without images, and folders that
    cannot be listed."""
    unlisted: dict[str, str] = {}
    kinds = _kinds(root, lambda folder, error: unlisted.update({folder: error.strerror or str(error)}))
    unused = kinds - Counter(suffix_of(str(source)) for images in used for source in images.sources)
    without = {
        folder: f"contains no image ({_listed_or_empty(kinds)})"
        for folder, kinds in _classes_without_images(root)
    }
    without |= {Path(folder): f"cannot be listed ({reason})" for folder, reason in unlisted.items()}
    return (
        *_listed(unused),
        *(f"the folder {folder.relative_to(root)}, which {fault}" for folder, fault in without.items()),
    )


def _classes_without_images(root: Path) -> list[tuple[Path, Counter[str]]]:
    """Class folders without images, and the kinds of their files."""
    folders = _visible_folders(root)
    if split_folder(root, "train") is not None:
        folders = [below for folder in folders if split_of(folder.name) for below in _visible_folders(folder)]
    kinds = {folder: _kinds(folder) for folder in folders}
    return [(folder, found) for folder, found in kinds.items() if not IMAGE_SUFFIXES & found.keys()]


def _kinds(folder: Path, failed: Callable[[str, OSError], None] = lambda folder, error: None) -> Counter[str]:
    """The number of visible files of each kind, their suffix, below a folder."""
    return Counter(suffix_of(entry.name) for entry in visible_files(folder, failed))


def _listed(kinds: Counter[str]) -> list[str]:
    """Counts of files by their kinds, the most frequent first."""
    ordered = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    return [f"{count:,} {kind or 'files without a suffix'}" for kind, count in ordered]


def _listed_or_empty(kinds: Counter[str]) -> str:
    return ", ".join(_listed(kinds)) or "it is empty"


def _visible_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def inner_folder(folder: Path) -> Path:
    """The folder itself, or the folder that it only wraps; a folder of a split does not wrap."""
    while True:
        entries = [path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX"))]
        if len(entries) != 1 or not entries[0].is_dir() or split_of(entries[0].name) is not None:
            return folder
        folder = entries[0]


def _optional_split(root: Path, split: str, class_names: tuple[str, ...]) -> ImageSet | None:
    """The images of a split, or None."""
    folder = split_folder(root, split)
    return None if folder is None else read_tree(folder, name=split, class_names=class_names)


def read_tree(root: Path, *, name: str = "all", class_names: tuple[str, ...] | None = None) -> ImageSet:
    """Images in `root/<class>/`, at any depth below it, in the order of their names, labelled by the places
    of the folders' names in `class_names` (the model's), or among themselves."""
    files = _by_class_folder(root, image_files(root))
    found = tuple(files)
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


def _by_class_folder(root: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    """The files below a folder by the name of the class folder in it; those outside of class folders are left
    out."""
    found: dict[str, list[Path]] = {}
    for path in files:
        name, *below = path.relative_to(root).parts
        if below:
            found.setdefault(name, []).append(path)
    return found


def labels_in_names(folder: Path) -> dict[Path, str]:
    """The labels in the names of the images directly in a folder: `dog` of `dog.1.jpg` and `dog_001.jpg`.
    Empty if a name has none, or if there are fewer than two labels."""
    # Labels need not be classes (`IMG_0001.jpg`), so nothing is trained on them.
    files = [path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
    labels = {path: re.sub(r"[ ._-]*\(?\d+\)?$", "", path.stem) for path in sorted(files)}
    clear = all(label and label != path.stem for path, label in labels.items())
    return labels if clear and len(set(labels.values())) > 1 else {}


def sort_by_name(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Move images like `dog.1.jpg` that lie directly in a folder into class folders, by the labels in their
    names; returns the number of images per class."""
    labels = labels_in_names(Path(folder))
    if not labels:
        raise UserError(f"{folder}: the names of its images are not like dog.1.jpg and cat.2.jpg")
    for path, label in labels.items():
        (path.parent / label).mkdir(exist_ok=True)
        path.rename(path.parent / label / path.name)
    return dict(Counter(labels.values()))


def _sorting_advice(folder: Path) -> str:
    """The end of a message: how to sort a folder of images whose names have labels."""
    counts = Counter(labels_in_names(folder).values())
    if not counts:
        return ""
    listed = ", ".join(f"{label}: {count:,}" for label, count in sorted(counts.items())[:_LISTED_LABELS])
    more = ", ..." if len(counts) > _LISTED_LABELS else ""
    script = (
        f"from vitascope.data.formats.folder import sort_by_name; sort_by_name({json.dumps(str(folder))})"
    )
    return (
        f"; its images have labels in their names ({listed}{more}); if these are the classes, this command "
        f"sorts the images into folders: python -c {shlex.quote(script)}"
    )


def _instead(root: Path) -> str:
    """The end of a message: class folders without images."""
    return "".join(
        f"; the folder {folder.name} contains no image ({_listed_or_empty(kinds)})"
        for folder, kinds in _classes_without_images(root)
    )


def files_of_splits(folder: Path, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """Files with these suffixes by split, from the name of their folder or their own; else of `all`."""
    found: dict[str, list[Path]] = {}
    for split in SPLIT_FOLDERS if folder.is_dir() else ():
        below = split_folder(folder, split)
        if below is not None and (files := _visible(below, suffixes)):
            found[split] = files
    for path in _visible(folder, suffixes):
        words = re.split(r"[-_.]", path.stem.lower())
        named = [split for split, names in SPLIT_FOLDERS.items() if any(name in words for name in names)]
        found.setdefault(named[0] if named else "all", []).append(path)
    if "all" in found and len(found) > 1:
        raise UserError(
            f"{found['all'][0]}: its name contains no split, unlike others; call it train-..., val-... or "
            "test-..."
        )
    return found


def has_class_folders(folder: Path) -> bool:
    """Whether the folders in a folder contain images, so that other files there do not matter."""
    return any(is_image(entry) for path in _visible_folders(folder) for entry in visible_files(path))


def _visible(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in files if p.suffix in suffixes and p.name[0] != "." and p.is_file())
