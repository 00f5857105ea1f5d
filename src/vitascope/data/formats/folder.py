"""Folders of images, one folder per class, with or without splits above them."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from vitascope.data.formats.format import DataFormat
from vitascope.data.listing import images_below, is_image, is_system_folder, suffix_of, visible_files
from vitascope.data.splits import ImageSet, Inventory
from vitascope.data.table_options import TABLE_SUFFIXES
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError
from vitascope.formatting import canonical, counted, listed
from vitascope.remote.paths import AnyPath, StorePath

SPLIT_FOLDERS = {
    "train": ("train", "training", "trainval"),
    "val": ("val", "valid", "validation", "validate", "dev", "development"),
    "test": ("test", "testing", "tests", "eval", "evaluation", "holdout"),
}
"""Words for splits in the names of folders, in any case; a number, `set` or `images` may follow."""
_BESIDE = "(?:sets?|data|images?|imgs?|pictures?|photos?|files?|split|part)"
OUTSIDE = "outside"
"""The name of the set of images that are in no folder of a split."""
_LISTED_CLASSES = 12


def split_of(name: str) -> str | None:
    """The split of a folder's name: `train` for `Train`, `training_set` or `train2017`; None for others."""
    word = re.sub(
        rf"\A{_BESIDE}[-_ ]+|([-_ ]*({_BESIDE}|\d+))+\Z", "", name.lower().replace("hold-out", "holdout")
    )
    return next((split for split, names in SPLIT_FOLDERS.items() if word in names), None)


def split_folder(root: AnyPath, split: str) -> AnyPath | None:
    """The folder of a split in a folder, or None."""
    found = [folder for folder in _visible_folders(root) if split_of(folder.name) == split]
    unnumbered = [folder for folder in found if not folder.name[-1].isdigit()]
    found = unnumbered if len(unnumbered) == 1 else found
    if len(found) > 1:
        names = " and ".join(folder.name for folder in found)
        raise UserError(f"{root}: {names} both mean the {split} split; keep one, or rename the other")
    return found[0] if found else None


class Folder(DataFormat):
    """A folder of class folders: `train/<class>/` with `val/`, `test/` or both, or one tree, `<class>/`.

    Images at any depth below a class folder are of its class; others have no label. Images are in the order
    of their paths, and so are the classes. Images that lie directly in the folder, or in that of a split, are
    of the classes in their names, if the rule is plain (`cat.1.jpg`).
    """

    def matches(self, data: str) -> bool:
        return os.path.isdir(data)

    def read(self, data: str) -> Inventory:
        return read_folder(Path(data))


def read_folder(root: AnyPath) -> Inventory:
    """The images of a folder."""
    depth = len(root.parts)
    images: list[AnyPath] = []
    others: list[AnyPath] = []
    unlisted: dict[str, OSError] = {}
    system: list[str] = []

    def path_of(entry: os.DirEntry[str] | StorePath) -> AnyPath:
        return entry if isinstance(entry, StorePath) else Path(entry.path)

    def failed(folder: str, error: OSError) -> None:
        unlisted[folder] = error

    for entry in images_below(root, failed, lambda entry: others.append(path_of(entry)), system.append):
        images.append(path_of(entry))
    splits = _splits(root, Counter(path.parts[depth:-1][:2] for path in images))
    classes: dict[str, dict[str, list[AnyPath]]] = {split: {} for split in splits.values() or ("all",)}
    for path in sorted(images):
        split, folder = _place(path.parts[depth:], splits)
        classes.setdefault(split, {}).setdefault(folder, []).append(path)
    notes, unlabelled = _sort_by_names(classes)
    tables = [path for path in others if path.parent == root and suffix_of(path.name) in TABLE_SUFFIXES]
    if tables:
        unlabelled = f"if {tables[0]} has the classes, give it as the data"
    kinds: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # of other files, by their place
    for path in others:
        kinds[_place(path.parts[depth:], splits)][suffix_of(path.name)] += 1
    sets = [found for split in classes for found in _image_sets(split, classes[split])]
    without = [
        f"the folder {'/'.join(folder.parts[depth:])}, which contains no image "
        f"({', '.join(_listed(kinds[split, canonical(folder.name)])) or 'it is empty'})"
        for place, split in [(root / name, split) for name, split in splits.items()] or [(root, "all")]
        for folder in _visible_folders(place)
        if canonical(folder.name) not in classes[split]
    ]
    without += [
        f"the folder {'/'.join(Path(folder).parts[depth:])}, which cannot be listed "
        f"({error.strerror or error})"
        for folder, error in unlisted.items()
    ]
    without += _outside(images, depth, splits)
    if system:
        names = sorted({Path(folder).name for folder in system})
        count = sum(len(files) for folder in system for _, _, files in os.walk(folder))
        without.append(
            f"{counted(count, 'file')} in {counted(len(system), 'system folder')}: {listed(names)}"
        )
    unused = _listed(sum(kinds.values(), Counter()))
    return Inventory(tuple(sets), 3, root.as_posix(), (*unused, *without), notes, unlabelled)


class FolderStream:
    """The images that `Folder.read` finds, in its order, listed anew by each iteration: the path of each, its
    class ("" for none) and its split. Only the names of the classes, and of the files in one folder, are in
    memory. Images outside the folders of splits are left out.

    Attributes:
        class_names: of all splits, in the order in which they appear.

    Raises:
        UserError: a folder that cannot be listed, also in an iteration.
    """

    def __init__(self, root: Path) -> None:
        self.root, depth = root, len(root.parts)
        places: Counter[tuple[str, ...]] = Counter()  # the first two folders of images' paths
        for entry in images_below(root, _unlisted):
            *folders, _ = entry.path.removeprefix("./").split(os.sep)[depth:]
            places[tuple(folders[:2])] += 1
        self._splits = _splits(root, places)
        self._classes: dict[str, dict[str, set[str]]] = {}  # by split and class, the names of the folders
        for place in places:
            split, name = _place([*place, "image"], self._splits)
            of_class = self._classes.setdefault(split, {}).setdefault(name, set())
            of_class.add(place[1 if self._splits else 0] if name else "")
        names = (sorted(self._classes.get(split, ())) for split in self._splits.values() or ("all",))
        self.class_names = tuple(dict.fromkeys(name for each in names for name in each if name))

    @property
    def has_folders_of_classes(self) -> bool:
        """Whether the folders tell the classes; otherwise `Folder.read` looks for them in all names."""
        split = "train" if "train" in self._classes else "all"
        return bool(self.class_names) and self._classes.get(split, {}).keys() != {""}

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        for folder, split in self._splits.items() or {"": "all"}.items():
            place = self.root / folder
            classes = self._classes.get(split, {})
            for name in sorted(classes.keys() - {""}):
                for folder_name in sorted(classes[name]):
                    for entry in visible_files(place / folder_name, _unlisted, as_paths=True):
                        if is_image(entry):
                            yield entry.path, name, split
            if "" in classes:
                yield from ((path, "", split) for path in _images_in(place))


def _images_in(folder: Path) -> list[str]:
    """The paths of the visible images in a folder, but not in folders below it."""
    with os.scandir(folder) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(".") and is_image(entry)]
    return sorted(entry.path.removeprefix("./") for entry in shown)


def _unlisted(folder: str, error: OSError) -> None:
    raise UserError(f"{folder}: cannot be listed: {error.strerror or error}") from error


def _splits(root: AnyPath, places: Counter[tuple[str, ...]]) -> dict[str, str]:
    """The folders of splits in a folder, by name; empty if its folders are classes.

    They are splits if one is of `train`, or if there are images in no other folder. But `train` alone, beside
    several folders with images, is a class, unless it has folders of classes itself.

    Args:
        places: the numbers of images by the first two folders of their paths below the root, or fewer.
    """
    names = {folder.name: split_of(folder.name) for folder in _visible_folders(root)}
    sizes: Counter[str] = Counter()
    for place, count in places.items():
        sizes[place[0] if place else ""] += count
    other = [name for name in sorted(sizes) if name and not names.get(name)]
    meant = [name for name, split in names.items() if split is not None]
    if "train" not in names.values() and (other or not any(map(names.get, sizes))):
        return {}
    if other and len(meant) == 1:
        (train,) = meant
        classes = sorted({place[1] for place in places if place[:1] == (train,) and len(place) > 1})
        if len(classes) < 2:
            if len(other) > 1:
                return {}
            raise UserError(
                f"{root}: is the folder {train} ({counted(sizes[train], 'image')}) a split or a class? There "
                f"is no other split, and one other folder has images, {other[0]} ({sizes[other[0]]:,}). For "
                "a class, put both into a folder called train; for a split, give the other the name of one, "
                "such as test, or move it away"
            )
    found = {split: split_folder(root, split) for split in SPLIT_FOLDERS}
    return {folder.name: split for split, folder in found.items() if folder is not None}


def _outside(images: Sequence[AnyPath], depth: int, splits: Mapping[str, str]) -> list[str]:
    """The folders beside those of splits whose images are not used."""
    counts = Counter(path.parts[depth] for path in images if len(path.parts) > depth + 1)
    return [
        f"{counted(count, 'image')} in the folder {name}, which is "
        + (
            f"a second folder of the {split} split"
            if (split := split_of(name))
            else "no split (train, val, test, dev, ...)"
        )
        for name, count in sorted(counts.items())
        if splits and name not in splits
    ]


def _place(parts: Sequence[str], splits: Mapping[str, str]) -> tuple[str, str]:
    """The set and the class of an image by its path below the root; the class is "" for none."""
    if not splits:
        return "all", canonical(parts[0]) if len(parts) > 1 else ""
    split = splits.get(parts[0], OUTSIDE)
    return split, canonical(parts[1]) if len(parts) > 2 and split != OUTSIDE else ""


def _sort_by_names(classes: dict[str, dict[str, list[AnyPath]]]) -> tuple[tuple[str, ...], str]:
    """Give images in no class folder the classes in their names, in place, if those of `train`, or all,
    follow a plain rule; returns the line that says so, or the reason why they do not."""
    split = "train" if "train" in classes else "all"
    if classes.get(split, {}).keys() != {""}:
        return (), ""
    found = classes_in_names(classes[split][""])
    if isinstance(found, str):
        return (), found
    classes[split] = found
    for other in ("val", "test") if split == "train" else ():
        if classes.get(other, {}).keys() == {""}:
            named = classes_in_names(classes[other][""], known=found)
            if not isinstance(named, str):
                classes[other] = named
            elif other == "test":  # to be predicted; its labels are secret
                classes.setdefault(OUTSIDE, {}).setdefault("", []).extend(classes.pop(other)[""])
    counts = [f"{name} {len(paths):,}" for name, paths in found.items()]
    return (f"classes from file names: {listed(counts, _LISTED_CLASSES)}",), ""


def _image_sets(name: str, classes: Mapping[str, list[AnyPath]]) -> Iterator[ImageSet]:
    """The images of a set by their classes: the labelled ones, and those without a label."""
    names = tuple(filter(None, classes))
    if names:
        labels = np.repeat(np.arange(len(names)), [len(classes[name]) for name in names])
        sources = [path for name in names for path in classes[name]]
        yield ImageSet(name, sources, ClassIndices(labels, names))
    if "" in classes or not names:
        yield ImageSet(name, classes.get("", []))


def _listed(kinds: Counter[str]) -> list[str]:
    """Counts of files by their suffixes, the most frequent first: "60 .mov"."""
    ordered = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    return [f"{count:,} {kind or 'files without a suffix'}" for kind, count in ordered]


def _visible_folders(root: AnyPath) -> list[AnyPath]:
    return sorted(
        path
        for path in root.iterdir()
        if path.is_dir() and not path.name.startswith(".") and not is_system_folder(path.name)
    )


def inner_folder(folder: Path) -> Path:
    """The folder itself, or the folder that it only wraps; a folder of a split does not wrap."""
    while True:
        entries = [p for p in folder.iterdir() if not (p.name.startswith(".") or is_system_folder(p.name))]
        if len(entries) != 1 or not entries[0].is_dir() or split_of(entries[0].name) is not None:
            return folder
        folder = entries[0]


def files_of_splits(folder: AnyPath, suffixes: tuple[str, ...]) -> dict[str, list[AnyPath]]:
    """Files with these suffixes by split, from the name of their folder or their own; else of `all`."""
    found: dict[str, list[AnyPath]] = {}
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


def has_class_folders(folder: AnyPath) -> bool:
    """Whether the folders in a folder contain images, so that other files there do not matter."""
    return any(is_image(entry) for path in _visible_folders(folder) for entry in visible_files(path))


def _visible(folder: AnyPath, suffixes: tuple[str, ...]) -> list[AnyPath]:
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in files if p.suffix in suffixes and p.name[0] != "." and p.is_file())


_RULE = re.compile(r"(?P<label>[^\W\d_].*?)[ ._-]*\(?\d+\)?")
_NO_CLASSES = {
    *("img", "image", "images", "dsc", "dscn", "dscf", "dscfn", "dcim", "pxl", "mvimg", "gopr", "vid"),
    *("photo", "picture", "pic", "scan", "screenshot", "frame", "file", "untitled", "whatsapp"),
}
"""First words of the names that cameras, phones and other programs give."""
_FEWEST, _PER_CLASS = 2, 4


def classes_in_names(
    paths: Sequence[AnyPath], known: Collection[str] | None = None
) -> dict[str, list[AnyPath]] | str:
    """The paths by the classes in their names, sorted; or the reason why the rule is not plain.

    Every name has a class and then a number, no class is the name of a camera, and there are at least two
    classes, of at least two images each and four on average; or all classes are `known`.
    """
    matches = {path: _RULE.fullmatch(path.stem) for path in paths}
    if without := [path.name for path, match in matches.items() if match is None]:
        return (
            f"{len(without):,} of {len(paths):,} names have no class and number, as cat.1.jpg has: "
            f"{listed(without)}"
        )
    classes: dict[str, list[AnyPath]] = {}
    for path, match in matches.items():
        assert match is not None
        classes.setdefault(match["label"], []).append(path)
    names = sorted(classes)
    if known is not None:
        others = [name for name in names if name not in known]
        return f"{listed(others)} are no classes of train" if others else {n: classes[n] for n in names}
    first_words = {name: re.split(r"[\W\d_]", name, maxsplit=1)[0].lower() for name in names}
    if programs := [name for name in names if first_words[name] in _NO_CLASSES]:
        return f"their names are those that cameras and programs give: {listed(programs)}"
    if len(names) < 2:
        return f"their names have only one class, {names[0]!r}"
    if len({name.casefold() for name in names}) < len(names):
        return f"the classes in their names differ in case only: {listed(names)}"
    few = [name for name in names if len(classes[name]) < _FEWEST]
    if few or len(paths) < _PER_CLASS * len(names):
        return (
            f"{len(names):,} different words before the numbers in {len(paths):,} names are too many to be "
            f"classes: {listed(few or names)}"
        )
    return {name: classes[name] for name in names}
