"""Where images come from: the embedded digits, or a folder with one folder a class."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitascope.data.preprocess import ImageError, ImageSource, header_size
from vitascope.errors import UserError, nearest

IMAGE_SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".avif", ".jp2"),
}
"""What counts as an image in a folder, by the ending of its name, in any case."""
SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
VAL_SHARE = 0.1
TEST_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Labelled images of one split.

    `sources` are what `preprocess.read_image` takes; `labels` are int64 indices into `class_names`.
    """

    name: str
    sources: Sequence[ImageSource]
    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, name: str, indices: npt.NDArray[np.int64]) -> ImageSet:
        """Some of the images, in the order given."""
        sources = [self.sources[index] for index in indices]
        return ImageSet(name, sources, self.labels[indices], self.class_names)


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set: what is trained on, what chooses the best weights, and what only the end may see."""

    train: ImageSet
    val: ImageSet
    test: ImageSet | None
    """None where a folder has `train/` and `val/` but no `test/`: then `val` is the last word."""
    channels: int

    @property
    def final(self) -> ImageSet:
        """What the finished model is measured on."""
        return self.val if self.test is None else self.test


def open_data(data: str, *, seed: int = 0) -> Splits:
    """The splits of a DATA argument.

    `digits` is scikit-learn's: 20% (stratified, random_state 0) are the test set. A folder has
    `train/<class>/`, and `val/<class>/` or `test/<class>/` or both; what is missing of validation is taken
    from train, a tenth of each class by seed. Without `train/` it is one tree, `<class>/`, and a tenth of
    each class is the validation set and another tenth the test set, by seed.

    Raises:
        UserError: no such folder, no images, one class, or classes that differ between splits.
    """
    if data == "digits":
        return _digits(seed)
    root = existing_folder(data)
    if not (root / "train").is_dir():
        tree = read_tree(root)
        rest, test = stratified_split(tree, TEST_SHARE, "test", seed)
        train, val = stratified_split(rest, VAL_SHARE / (1 - TEST_SHARE), "val", seed)
        return Splits(train, val, test, channels=3)
    train = read_tree(root / "train", name="train")
    given = _optional_split(root, "val", train.class_names)
    train, val = (train, given) if given is not None else stratified_split(train, VAL_SHARE, "val", seed)
    return Splits(train, val, _optional_split(root, "test", train.class_names), channels=3)


def open_for_evaluation(data: str, class_names: tuple[str, ...]) -> ImageSet:
    """What to measure a model on in a DATA argument: its test split, else `val`, else the whole tree.

    Raises:
        UserError: as `open_data`, or a class that the model does not know.
    """
    if data == "digits":
        test = _digits(0).final
        _check_known_classes(test.class_names, class_names, "digits")
        return test
    root = existing_folder(data)
    for split in ("test", "val"):
        found = _optional_split(root, split, class_names)
        if found is not None:
            return found
    return read_tree(root, class_names=class_names)


def existing_folder(data: str) -> Path:
    """A DATA argument as a folder that is there."""
    root = Path(data).expanduser()
    if not data or not root.exists():  # Path("") would be the current folder
        hint = nearest(data, ["digits"]) or "; give a folder of images, or `digits`"
        raise UserError(f"{data or repr(data)}: no such folder{hint}")
    if not root.is_dir():
        raise UserError(f"{data}: not a folder; unpack it, or give the folder that holds the class folders")
    return root


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
    _check_known_classes(found, class_names, str(root))
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


def stratified_split(images: ImageSet, share: float, name: str, seed: int) -> tuple[ImageSet, ImageSet]:
    """Take a share of each class away by seed: what is left, and the part, at least one image a class.

    Raises:
        UserError: a class with a single image, which cannot be on both sides.
    """
    part: list[int] = []
    for label, class_name in enumerate(images.class_names):
        members = np.flatnonzero(images.labels == label)
        if len(members) < 2:
            raise UserError(
                f"class {class_name!r} has {len(members)} image; to split off {name}, it needs at least 2"
            )
        members = np.random.default_rng([seed, label]).permutation(members)
        part.extend(members[: max(1, round(share * len(members)))].tolist())
    taken = np.sort(np.array(part, dtype=np.int64))
    left = np.setdiff1d(np.arange(len(images)), taken)
    return images.subset("train", left), images.subset(name, taken)


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


def _optional_split(root: Path, split: str, class_names: tuple[str, ...]) -> ImageSet | None:
    for folder in SPLIT_FOLDERS[split]:
        if (root / folder).is_dir():
            return read_tree(root / folder, name=split, class_names=class_names)
    return None


def _check_known_classes(found: Sequence[str], known: Sequence[str], where: str) -> None:
    unknown = [name for name in found if name not in known]
    if unknown:
        listed = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        raise UserError(
            f"{where}: {len(unknown)} of {len(found)} class folders are not among the {len(known)} known "
            f"classes: {listed}{nearest(unknown[0], known)}"
        )


def class_counts(images: ImageSet) -> dict[str, int]:
    """Images a class."""
    counts = Counter(images.labels.tolist())
    return {name: counts[label] for label, name in enumerate(images.class_names)}


def digits_baseline() -> float:
    """Test accuracy of scikit-learn's `SVC()` with its own defaults on `digits`; it trains on all 80%."""
    from sklearn.svm import SVC

    pixels, labels, rest, test = _digits_arrays()
    flat = pixels.reshape(-1, 64)  # (1797, 64)
    return float((SVC().fit(flat[rest], labels[rest]).predict(flat[test]) == labels[test]).mean())
