"""Entry points: from a path or name of data to its images. `FORMATS` is the table of formats."""

import dataclasses
import functools
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitascope.data.contents import first_of_content, image_name
from vitascope.data.decisions import Decisions
from vitascope.data.folds import splits_of_fold
from vitascope.data.formats import digits
from vitascope.data.formats.archive import TAR_SUFFIXES, Archive
from vitascope.data.formats.cifar import Cifar
from vitascope.data.formats.folder import Folder, FolderStream, inner_folder, read_folder
from vitascope.data.formats.format import DataFormat, DataPackage
from vitascope.data.formats.hub import HubDataset, looks_like_hub_id
from vitascope.data.formats.idx import Idx
from vitascope.data.formats.published import KNOWN_SETS, PublishedSet
from vitascope.data.formats.shards import Shards, has_shards, read_shards
from vitascope.data.formats.table import Table
from vitascope.data.listing import IMAGE_SUFFIXES, suffix_of
from vitascope.data.reading import Faults, readable
from vitascope.data.splits import ImageSet, Inventory, Splits, complete_splits, without_rare
from vitascope.data.table_options import AS_RECOGNIZED, TABLE_SUFFIXES, TableOptions, is_table
from vitascope.errors import UserError, check_choice, naming, nearest_path, printable, suggestion
from vitascope.formatting import canonical, counted
from vitascope.models.decoding import ImageSource, greatest_integer, header_size, source_name
from vitascope.remote import StoredImage, cache, source_at
from vitascope.remote.paths import AnyPath, StorePath, stored_at
from vitascope.remote.stores import RemoteObject, name_in

log = logging.getLogger(__name__)

FORMATS: tuple[DataFormat | DataPackage, ...] = (
    *(digits.Digits(), PublishedSet(), Table(), Cifar(), Idx(), HubDataset(), Shards()),
    *(Archive(), Folder()),
)
"""Tried in this order. CIFAR comes before archives, because it is read inside its own archives."""
SAMPLE = 100
"""Images whose headers show the kind and the size of all."""
LISTED_CLASSES = 12
"""Number of classes up to which `described` counts the images of each."""
NAMES = (digits.NAME, *KNOWN_SETS)
"""Data sets that are known by name."""
_ACCEPTED = (
    f"give {', '.join(NAMES)}, a folder of class folders, a .zip or tar of one, a table "
    f"({', '.join(TABLE_SUFFIXES)}), CIFAR's or MNIST's files, WebDataset shards, or a data set of the "
    "Hugging Face hub as OWNER/NAME"
)
_ARCHIVES = (".zip", *TAR_SUFFIXES)
_DATA_SET = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/?")


def open_data(
    data: str,
    *,
    seed: int = 0,
    labelled: bool = True,
    table: TableOptions = AS_RECOGNIZED,
    folds: int | None = None,
    fold: int | None = None,
) -> Splits:
    """The splits of a data set; without validation images, a tenth of each class of train is drawn by seed.

    Args:
        data: a path or name in one of these formats (a file or folder comes before a hub id):

            - `digits`: scikit-learn's, embedded;
            - `cifar10`, `cifar100`, `mnist`, `fashion-mnist`: downloaded once;
            - CIFAR-10 or CIFAR-100 as published, archive or folder;
            - a folder of IDX files, the format of MNIST;
            - a data set of the Hugging Face hub: its id, or a folder that it was saved in;
            - WebDataset shards;
            - a `.zip` or tar of any of these folders, unpacked once;
            - a folder of class folders, with or without splits above them;
            - a table of images and labels: CSV, TSV, JSON lines or Parquet;
            - the URL of a folder of images, of shards, of a table or of an archive, in a store
              (docs/scale.md).
        seed: of the images drawn from train.
        labelled: False also accepts images without classes, or of one class: a tenth by seed is `val`, and
            there is no `test`. Images with classes are split as usual, so that test images stay unseen, and
            those without a class join `train`.
        table: how a table is read, and decisions on the images.
        folds, fold: see `splits_of_fold`; None for the usual splits.

    Raises:
        UserError: none of these, or a damaged data set. The other functions of this module raise it too.
    """
    inventory = read_data(data, table)
    names = _split_names(inventory)
    split = "train" if "train" in names else "all"
    classes = inventory.by_name[split].class_names if split in inventory.by_name else ()
    if not labelled and split in names and len(classes) < 2:
        train = dataclasses.replace(_images(inventory, split), name="train")
        return complete_splits(
            dataclasses.replace(inventory, sets=(train,)), data, seed=seed, rare=table.rare
        )
    if not labelled and (more := [images for images in inventory.sets if _is_unlabelled(images, split)]):
        rest = tuple(images for images in inventory.sets if not _is_unlabelled(images, split))
        splits = complete_splits(dataclasses.replace(inventory, sets=rest), data, seed=seed, rare=table.rare)
        return splits.with_unlabelled(more)
    for name in names:
        _labelled(inventory, name, data)
    if len(classes) == 1:
        raise UserError(
            f"{data}: only one class, {classes[0]!r}; a classifier needs two or more{_wrapped_in_words(data)}"
            f"{_unused_in_words(inventory)}"
        )
    if folds is not None:
        return splits_of_fold(inventory, data, folds, fold, seed=seed, rare=table.rare)
    return complete_splits(inventory, data, seed=seed, rare=table.rare)


def open_for_evaluation(
    data: str,
    class_names: tuple[str, ...],
    rename: Mapping[str, str] | None = None,
    *,
    table: TableOptions = AS_RECOGNIZED,
) -> ImageSet:
    """The images to measure a model on: the test split, else `val`, else all images.

    Labels are in the model's `class_names`; a class that is not among them raises UserError, unless
    `rename` has the model's name for it.
    """
    others = {canonical(theirs): canonical(ours) for theirs, ours in (rename or {}).items()}
    for name in others.values():
        check_choice("class of the model", name, tuple(map(canonical, class_names)))
    inventory = read_data(data, table)
    if table.audit is not None:
        log.warning("%s", inventory.notes[-1])
    images = _labelled(inventory, _measured_split(inventory), data)
    sizes = {name: len(part) for name, part in inventory.by_name.items() if name != images.name}
    if sizes:
        log.warning(
            "%s: measures %s, not the others (%s); to measure those, name their folder or a table of them",
            data, counted(len(images), images.noun),
            ", ".join(f"{size:,} {name}" for name, size in sizes.items()),
        )  # fmt: skip
    targets = images.truth
    counts = dict(zip(targets.class_names, targets.counts.tolist(), strict=True))
    for name in others:
        if not counts.get(name):
            raise UserError(f"{data}: no images of a class {name!r}, which is to be renamed")
    renamed = tuple(others.get(name, name) for name in targets.class_names)
    images = dataclasses.replace(images, targets=dataclasses.replace(targets, class_names=renamed))
    return images.in_classes(class_names, data)


def image_file(data: str) -> ImageSource | None:
    """The picture that data are, a file or an object in a store; None for other data."""
    if suffix_of(data) not in IMAGE_SUFFIXES:
        return None
    file = source_at(data)
    if not isinstance(file, str):
        return file
    path = Path(file).expanduser()
    return path if path.is_file() else None


def open_pictures(data: str) -> Sequence[ImageSource]:
    """The images to show: an image file, or the test split, else `val`, else all images."""
    if (picture := image_file(data)) is not None:
        return [picture]
    inventory = read_data(data)
    sources = _images(inventory, _measured_split(inventory)).sources
    if not sources:
        raise UserError(f"{data}: no images in this folder")
    return sources


def read_data(data: str, table: TableOptions = AS_RECOGNIZED) -> Inventory:
    """All images of a data set, in the splits that it has, or in `all`, after decisions; none is drawn."""
    inventory = _read(hub_id(data), table)
    sets = (
        images if images.targets is None else dataclasses.replace(images, targets=images.targets.merged())
        for images in map(with_objects, inventory.sets)
    )
    inventory = dataclasses.replace(inventory, sets=tuple(sets))
    if table.audit is not None:
        inventory = Decisions.read(table.audit).applied(inventory)
    return without_rare(inventory, table.min_images) if table.min_images > 1 else inventory


def _read(data: str, table: TableOptions) -> Inventory:
    """The images of DATA, which may be a folder, a table or an archive in a store."""
    stored = open_stored(data)
    if isinstance(stored, Path):
        if is_table(data) and table.images is None:
            table = dataclasses.replace(table, images=data.rpartition("/")[0])
        with naming(stored, data):
            return _read(str(stored), table)
    format, place = (None, "") if stored else _find(data)
    if isinstance(format, Table):
        format = Table(table)
    elif table.given:
        raise UserError(f"{table.given[0]} is about a table, and {data} is none")
    if format:
        return format.read(place)
    assert stored is not None
    return read_shards(stored) if has_shards(stored) else read_folder(stored)


def stream_of_folder(data: str) -> FolderStream | None:
    """The images of a folder of class folders, which need not fit into memory; None for other data."""
    format, place = _find(data)
    stream = FolderStream(Path(place)) if isinstance(format, Folder) else None
    return stream if stream is not None and stream.has_folders_of_classes else None


def _is_unlabelled(images: ImageSet, split: str) -> bool:
    """Whether images have no label, and are in a split."""
    return images.name == split and images.targets is None and len(images) > 0


def _measured_split(inventory: Inventory) -> str:
    """The name of the split that a model is measured on, and that is shown."""
    return next((name for name in ("test", "val", "train") if name in _split_names(inventory)), "all")


def _split_names(inventory: Inventory) -> list[str]:
    """The names of the splits that have images, or a folder for some."""
    names = {images.name for images in inventory.sets if len(images) or images.targets is None}
    return [name for name in ("train", "val", "test", "all") if name in names]


def _images(inventory: Inventory, split: str) -> ImageSet:
    """A split's images, with and without labels, as images without any; by their paths if there are both."""
    sets = [images for images in inventory.sets if images.name == split and len(images)]
    if len(sets) == 1:
        return dataclasses.replace(sets[0], targets=None)
    sources = [source for images in sets for source in images.sources]
    groups = [group for images in sets for group in images.groups.tolist()]
    joined = ImageSet(split, sources, groups=np.array(groups, dtype=np.str_))
    order = sorted(range(len(sources)), key=lambda index: Path(source_name(sources[index])))
    return joined.subset(split, np.array(order, dtype=np.int64))


def _labelled(inventory: Inventory, split: str, data: str) -> ImageSet:
    """The labelled images of a split; a UserError if there are none."""
    images = inventory.by_name.get(split)
    if images is not None and images.targets is not None:
        return images
    if is_table(data) and not os.path.isdir(data):
        of_split = "" if split == "all" else f" in {split}"
        raise UserError(f"{data}: no labelled images{of_split}; {inventory.unlabelled}")
    place = os.path.join(data, *([] if split == "all" else [split]), "<class>", "<image>")
    reason = f"; {inventory.unlabelled}" if inventory.unlabelled else _unused_in_words(inventory)
    raise UserError(f"{data}: no images in class folders; expected {place}{reason}")


def _unused_in_words(inventory: Inventory) -> str:
    """The end of a message: what a data set has that is no image."""
    return f"; unused: {', '.join(inventory.unused)}" if inventory.unused else ""


def _wrapped_in_words(data: str) -> str:
    """The end of a message: the folder of folders that `data` only wraps."""
    inner = inner_folder(Path(data)) if os.path.isdir(data) else Path(data)
    wraps = inner != Path(data) and any(entry.is_dir() for entry in inner.iterdir())
    return f"; did you mean {inner}?" if wraps else ""


def _find(data: str) -> tuple[DataFormat, str]:
    """The format of a data set, and the data to open with it."""
    place = os.path.expanduser(data)
    for format in FORMATS if data else ():
        if format.matches(place):
            return (format, place) if isinstance(format, DataFormat) else _find(str(format.contents(place)))
    if data and os.path.exists(place):
        raise UserError(f"{data}: not a folder, and not an archive of a known kind; {_ACCEPTED}")
    mistyped = nearest_path(place) if data else ""
    if looks_like_hub_id(data) and not is_table(data):
        raise UserError(f"{data}: no such folder{mistyped}; for the hub: {data}@main")
    hint = "" if os.sep in data else suggestion(data, NAMES)
    kind = "file" if is_table(data) else "folder"
    raise UserError(f"{data or repr(data)}: no such {kind}{hint or mistyped or f'; {_ACCEPTED}'}")


def sampled_sizes(images: ImageSet) -> npt.NDArray[np.int64]:
    """Height and width of up to `SAMPLE` images spread over the set, from their headers, (n, 2)."""
    some = [images.sources[index] for index in images.spread(SAMPLE)]
    faults = Faults(len(some))  # of the set, the loader counts and reports them
    sizes = [size for _, size in readable(header_size, some, faults)]
    faults.check_some()
    return np.array(sizes)


def greatest_value(images: ImageSet) -> int | None:
    """The greatest value in the images of integers of more than 8 bits, which are read as a whole.

    None if none of up to `SAMPLE` images spread over the set is of that kind: so other data cost no more than
    these headers. Images that cannot be read are left out.
    """

    def greatest(indices: Iterable[int]) -> int:
        values = readable(greatest_integer, (images.sources[index] for index in indices), Faults())
        return max((-1 if value is None else value for _, value in values), default=-1)

    sample = images.spread(SAMPLE)
    if (largest := greatest(sample)) < 0:
        return None
    return max(largest, greatest({*range(len(images))} - {*sample}))


def class_counts(images: ImageSet) -> dict[str, int]:
    """The number of images per class."""
    return dict(zip(images.class_names, images.truth.counts.tolist(), strict=True))


def described(splits: Splits) -> list[str]:
    """Lines that describe a data set: images per split, images per class, unused files."""
    sets = splits.parts.values()
    names = splits.train.class_names
    sizes = ", ".join(f"{len(images):,} {images.name}" for images in sets)
    lines = [f"{sizes} images " + (f"of {len(names):,} classes" if names else "without labels")]
    if splits.train.targets is not None and splits.train.targets.strata is None:
        each = np.concatenate([images.labels.sum(axis=1) for images in sets])
        lines.append(f"{each.mean():.3g} classes per image, from {each.min()} to {each.max()}")
    if len(names) > 1:
        counts: Counter[str] = Counter()
        for images in sets:
            counts.update(class_counts(images))
        if len(names) <= LISTED_CLASSES:
            lines.append(", ".join(f"{name}: {count:,}" for name, count in counts.items()))
        else:
            fewest, most = (choose(names, key=counts.__getitem__) for choose in (min, max))
            lines.append(f"per class from {counts[fewest]:,} ({fewest}) to {counts[most]:,} ({most})")
    lines += splits.notes
    if splits.unused:
        lines.append(f"unused: {', '.join(splits.unused)}")
    return [printable(line) for line in lines]  # names of folders and files may be anything


_NAMED = 3  # pairs of images that a message names


@dataclasses.dataclass(frozen=True)
class Copies:
    """The images of a data set that have the content of another one."""

    count: int
    """Without the first image of each content."""
    across: dict[str, int]
    """By split, the images with the content of one in an earlier split; splits without any are left out."""
    mislabelled: tuple[tuple[str, str], ...]
    """For each content with two labels, the names of two such images."""
    folds: bool = False
    """Whether the test images are one of several folds."""

    def described(self) -> list[str]:
        """A line with the number of copies; empty if there are none."""
        if not self.count:
            return []
        be = "is a copy of another" if self.count == 1 else "are copies of others"
        return [f"{counted(self.count, 'image')} {be}"]

    def warnings(self, *, labelled: bool = True) -> list[str]:
        """What is wrong with the copies: they lie in two splits, or have two labels."""
        found = []
        if self.across:
            listed = " and ".join(f"{count:,} {split}" for split, count in self.across.items())
            part, advice = "split", "put all images into one folder per class: vitascope's own splits keep"
            if self.folds:
                part, advice = "fold", "leave the column of folds out with columns fold=: drawn folds keep"
            found.append(
                f"{listed} images are copies of images in another {part}, which makes the accuracy look too "
                f"high: remove them, or {advice} copies together"
            )
        if self.mislabelled and labelled:
            pairs = ", ".join(f"{one} = {other}" for one, other in self.mislabelled[:_NAMED])
            more = ", ..." if len(self.mislabelled) > _NAMED else ""
            contents = counted(len(self.mislabelled), "picture")
            found.append(f"{contents} with two labels: {pairs}{more}; keep each in one class")
        return [printable(warning) for warning in found]


def find_copies(splits: Splits) -> Copies:
    """The copies in a data set; reads the contents that are not known yet."""
    parts = list(splits.identified().parts.values())
    sizes = [len(images) for images in parts]
    part = np.repeat(np.arange(len(parts)), sizes)
    row = np.concatenate([np.arange(size) for size in sizes])
    first = first_of_content(np.concatenate([images.contents for images in parts]))

    def name(index: int) -> str:
        images, place = parts[part[index]], int(row[index])
        return image_name(images.sources[place], splits.root) or f"{images.noun} {place}"

    copies = np.flatnonzero(first != np.arange(len(first)))
    across = np.bincount(part[copies][part[first[copies]] < part[copies]], minlength=len(parts))
    other = copies[:0]
    if splits.train.targets is not None:
        targets = functools.reduce(lambda one, more: one.joined(more), [images.truth for images in parts])
        other = copies[targets.differ(first[copies], copies)]
    firsts, places = np.unique(first[other], return_index=True)
    return Copies(
        count=len(copies),
        across={images.name: int(count) for images, count in zip(parts, across, strict=True) if count},
        mislabelled=tuple(
            (name(one), name(another)) for one, another in zip(firsts, other[places], strict=True)
        ),
        folds=bool(len(splits.train.folds)),
    )


def open_stored(url: str) -> AnyPath | None:
    """DATA in a store: a folder as it is listed now, or the local copy of a table or an archive; None for
    local DATA.

    Raises:
        StoreError: no such object or folder, or the store does not answer.
        UserError: another kind of object, or one that the cache has no room for.
    """
    stored = stored_at(url)
    if not isinstance(stored, RemoteObject):
        return stored
    if not is_table(url) and not url.lower().endswith(_ARCHIVES):
        raise UserError(
            f"{url}: neither a folder, nor a table or an archive by its name "
            f"({', '.join((*TABLE_SUFFIXES, *_ARCHIVES))})"
        )
    folder = url.rpartition("/")[0]
    return cache.copied([stored], folder) / name_in(url, folder)


def with_objects(images: ImageSet) -> ImageSet:
    """The same images, with `StoredImage`s in place of paths in a store."""
    if not isinstance(images.sources, list):
        return images  # shards, whose files are objects already, and pixels in memory
    sources = [
        StoredImage(source.object.url, source.object) if isinstance(source, StorePath) else source
        for source in images.sources
    ]
    return dataclasses.replace(images, sources=sources)


def hub_id(data: str) -> str:
    """The id of a whole data set of the hub, which its own library reads; other data stay as they are."""
    match = _DATA_SET.fullmatch(data)
    return data if match is None else f"{match[1]}@{match[2] or 'main'}"
