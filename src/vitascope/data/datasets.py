"""What a DATA argument can be, and the splits that it means."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitascope.data.decoding import ImageError, ImageSource, header_size
from vitascope.data.download import KNOWN_SETS, fetch_set
from vitascope.data.formats.archive import is_archive, unpack
from vitascope.data.formats.cifar import is_cifar, open_cifar
from vitascope.data.formats.folder import (
    IMAGE_SUFFIXES,
    has_classes,
    image_files,
    inner_folder,
    open_folder,
    open_unlabelled,
    optional_split,
    read_any,
    read_tree,
    split_folder,
)
from vitascope.data.formats.idx import is_idx, open_idx
from vitascope.data.split_record import Inventory
from vitascope.data.splits import VAL_SHARE, ImageSet, Splits, stratified_split
from vitascope.errors import UserError, nearest, nearest_path, printable

LISTED_CLASSES = 12
"""Classes up to which the images of each are counted in words."""
NAMES = ("digits", *KNOWN_SETS)
"""DATA that is no path."""
WAYS = (
    f"give {', '.join(NAMES)}, a folder of class folders, a .zip or tar of one, CIFAR's or MNIST's files, "
    "WebDataset shards, or a data set of the Hugging Face hub as OWNER/NAME"
)


def open_data(data: str, *, seed: int = 0, labelled: bool = True) -> Splits:
    """The splits of a DATA argument, which is one of:

    - `digits`: scikit-learn's, embedded; 20% (stratified, random_state 0) are the test set;
    - `cifar10`, `cifar100`, `mnist`, `fashion-mnist`: downloaded once (`download.fetch_set`). A file or
      folder of that name comes first, so that what is here is never replaced by what is elsewhere;
    - a folder of class folders, with or without splits above them (`folders.open_folder`);
    - CIFAR-10 or CIFAR-100 as published, archive or folder (`cifar.open_cifar`);
    - a folder of IDX files, the format of MNIST (`idx.open_idx`);
    - WebDataset shards (`shards.open_shards`);
    - a data set of the Hugging Face hub: its id, or a folder that it was saved in
      (`hub.open_hub_dataset`);
    - a `.zip` or tar of any of these folders, unpacked once (`unpack.unpack`).

    What is missing of validation is taken from train, a tenth of each class by seed. Without `labelled` a
    folder may have no classes too (`folders.open_unlabelled`); one that has them is split as with it, so that
    what is learned without labels has not seen the test images.

    Raises:
        UserError: nothing of these, or what the function named raises.
    """
    found = _found(data, seed)
    if isinstance(found, Splits):
        return found
    if not labelled and not has_classes(found):
        return open_unlabelled(found, seed=seed)
    return open_folder(found, seed=seed)


def open_for_evaluation(data: str, class_names: tuple[str, ...]) -> ImageSet:
    """What to measure a model on in a DATA argument: its test split, else `val`, else the whole tree.

    Labels are indices into the model's `class_names`.

    Raises:
        UserError: as `open_data`, or a class that the model does not know.
    """
    found = _found(data, seed=0)
    if isinstance(found, Splits):
        return found.final.in_classes(class_names, data)
    for split in ("test", "val"):
        images = optional_split(found, split, class_names)
        if images is not None:
            return images
    return read_tree(found, class_names=class_names)


def open_pictures(data: str) -> Sequence[ImageSource]:
    """What there is to look at in a DATA argument: its test split, else `val`, else all of a folder's images.

    Raises:
        UserError: nothing that `open_data` takes, or no image there.
    """
    path = Path(data).expanduser()
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        return [path]
    found = _found(data, seed=0)
    if isinstance(found, Splits):
        return found.final.sources
    files = image_files(split_folder(found, "test") or split_folder(found, "val") or found)
    if not files:
        raise UserError(f"{data}: no images in this folder")
    return files


def list_images(data: str, *, seed: int = 0) -> Inventory:
    """All images of a DATA argument, whatever their part of a split, to find those of an earlier split in.

    In a folder, an image's class is the name of its class folder, whether or not any split is above it.

    Raises:
        UserError: nothing that `open_data` takes.
    """
    found = _found(data, seed)
    if isinstance(found, Splits):
        sets = (found.train, found.val, *(() if found.test is None else (found.test,)))
        return Inventory(sets, found.channels, found.root)
    return Inventory((read_any(found),), channels=3, root=found)


def _found(data: str, seed: int) -> Splits | Path:
    """What a DATA argument means: splits, or a folder of class folders."""
    from vitascope.data.formats import hub

    if data == "digits":
        return _digits(seed)
    path = Path(data).expanduser()
    if data in KNOWN_SETS and not path.exists():
        path = fetch_set(data)
    if not data or not path.exists():  # Path("") would be the current folder
        mistyped = nearest_path(str(path)) if data else ""
        local = bool(mistyped) or (len(path.parts) > 1 and path.parent.is_dir())  # more likely than an owner
        hub_id = bool(data) and hub.looks_like_hub_id(data)
        if hub_id and (not local or "@" in data):
            return hub.open_hub_dataset(data, seed=seed)
        if hub_id:
            raise UserError(f"{data}: no such folder{mistyped}; {data}@main is the hub's")
        hint = "" if os.sep in data else nearest(data, NAMES)
        raise UserError(f"{data or repr(data)}: no such folder{hint or mistyped or f'; {WAYS}'}")
    splits = _ready_made(path, seed)
    if splits is None and is_archive(path):
        path = inner_folder(unpack(path))
        splits = _ready_made(path, seed)
    if splits is None and not path.is_dir():
        raise UserError(f"{data}: not a folder, and no archive that is known; {WAYS}")
    return path if splits is None else dataclasses.replace(splits, root=path)


def _ready_made(path: Path, seed: int) -> Splits | None:
    """The splits of a file or folder in a format of its own; None for everything else."""
    from vitascope.data.formats import hub, shards

    if is_cifar(path):
        return open_cifar(path, seed=seed)
    if is_idx(path):
        return open_idx(path, seed=seed)
    if path.is_dir() and hub.is_saved_dataset(path):
        return hub.open_hub_dataset(str(path), seed=seed)
    if shards.is_shards(path):
        return shards.open_shards(path, seed=seed)
    return None


def median_size(images: ImageSet, sample: int = 100) -> tuple[int, int]:
    """Median height and width of up to `sample` images spread over the set, from their headers."""
    sizes = []
    looked_at = np.unique(np.linspace(0, len(images) - 1, min(sample, len(images))).astype(int))
    for index in looked_at:
        try:
            sizes.append(header_size(images.sources[index]))
        except ImageError as error:
            reason = error  # named, counted and judged when it is read
    if not sizes:
        raise UserError(
            f"none of {len(looked_at)} images looked at in the {images.name} set can be read: {reason}"
        )
    height, width = np.median(np.array(sizes), axis=0)
    return int(height), int(width)


def _digits(seed: int) -> Splits:
    pixels, labels, rest, test = _digits_arrays()
    everything = ImageSet("all", list(pixels), labels, tuple("0123456789"))
    train, val = stratified_split(everything.subset("train", rest), VAL_SHARE, "val", seed)
    return Splits(train, val, everything.subset("test", test), channels=1)


def _digits_arrays() -> tuple[
    npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]
]:
    """Pixels (1797, 8, 8), labels, and the indices of the 80% and of the 20% for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # stored as 0..16
    labels = digits.target.astype(np.int64)
    rest, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return pixels, labels, rest, test


def class_counts(images: ImageSet) -> dict[str, int]:
    """Images a class."""
    counts = Counter(images.labels.tolist())
    return {name: counts[label] for label, name in enumerate(images.class_names)}


def described(splits: Splits) -> list[str]:
    """What a data set consists of, in lines: images per split, images per class, and what is not used."""
    sets = [splits.train, splits.val]
    sets += [] if splits.test is None else [splits.test]
    names = splits.train.class_names
    sizes = ", ".join(f"{len(images):,} {images.name}" for images in sets)
    lines = [f"{sizes} images of {len(names):,} classes"]
    if len(names) > 1:
        counts: Counter[str] = Counter()
        for images in sets:
            counts.update(class_counts(images))
        lines.append(_per_class(counts))
    if splits.passed_over:
        lines.append(f"passed over: {', '.join(splits.passed_over)}")
    return [printable(line) for line in lines]  # names of folders and files may be anything


def _per_class(counts: Mapping[str, int]) -> str:
    """Images of each class; of many classes the fewest and the most."""
    if len(counts) <= LISTED_CLASSES:
        return ", ".join(f"{name}: {count:,}" for name, count in counts.items())
    fewest, most = (choose(counts, key=lambda name: counts[name]) for choose in (min, max))
    return f"per class from {counts[fewest]:,} ({fewest}) to {counts[most]:,} ({most})"


def digits_baseline() -> float:
    """Test accuracy of scikit-learn's `SVC()` with its own defaults on `digits`; it trains on all 80%."""
    from sklearn.svm import SVC

    pixels, labels, rest, test = _digits_arrays()
    flat = pixels.reshape(-1, 64)  # (1797, 64)
    return float((SVC().fit(flat[rest], labels[rest]).predict(flat[test]) == labels[test]).mean())
