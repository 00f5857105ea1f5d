"""Images with their targets, and their division into train, val and test, the same for every format."""

import dataclasses
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
import numpy.typing as npt

from vitascope.data.contents import contents_of, first_of_content
from vitascope.data.randomness import epoch_order
from vitascope.data.targets import Targets
from vitascope.errors import UserError, printable, suggestion
from vitascope.formatting import canonical, counted, listed
from vitascope.models.decoding import Encoded, ImageSource

MOST_NAMED = 20
"""Classes of too few images that an error names."""
OUT_OF_FOLD = "out-of-fold"
"""The name of training images that are measured by models that were not trained on them."""
VAL_SHARE = 0.1
TEST_SHARE = 0.1


def _not_read() -> npt.NDArray[np.bytes_]:
    return np.empty(0, dtype=np.bytes_)


def _no_groups() -> npt.NDArray[np.str_]:
    return np.empty(0, dtype=np.str_)


class LazySources(Sequence[Encoded]):
    """Places of many encoded images in a few dozen bytes each, which worker processes share."""

    @abstractmethod
    def at(self, index: int) -> Encoded:
        """One image."""

    @abstractmethod
    def take(self, indices: npt.NDArray[np.int64]) -> Self:
        """Some of the images, in the order given."""

    def streams(self, seed: int, epoch: int, count: int) -> list[npt.NDArray[np.int64]]:
        """The images of an epoch in orders for different machines; one order where they are not in shards."""
        return [epoch_order(seed, epoch, len(self))]

    @property
    def shard_files(self) -> int:
        """The number of shards that the images are in; 0 for files of their own."""
        return 0

    @overload
    def __getitem__(self, index: int) -> Encoded: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Encoded | Self:
        return self.take(np.arange(len(self))[index]) if isinstance(index, slice) else self.at(index)


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Images of one split."""

    name: str
    sources: Sequence[ImageSource]
    targets: Targets | None = None
    """The labels; None for images without any."""
    contents: npt.NDArray[np.bytes_] = dataclasses.field(default_factory=_not_read, repr=False)
    """From `contents_of`, (N,), where they were read; see `identified`."""
    groups: npt.NDArray[np.str_] = dataclasses.field(default_factory=_no_groups, repr=False)
    """The group of each image, (N,), such as a patient, which no split divides; (0,) where there are none."""
    folds: npt.NDArray[np.str_] = dataclasses.field(default_factory=_no_groups, repr=False)
    """The fold of each image, (N,), where a table has them; else (0,)."""

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def noun(self) -> str:
        """What one of them is called: `test image`, or `image` where the data have no parts."""
        return "image" if self.name == "all" else f"{self.name} image"

    @property
    def truth(self) -> Targets:
        """The targets; a UserError for images without labels."""
        if self.targets is None:
            raise UserError(f"the {counted(len(self), self.noun)} have no labels")
        return self.targets

    @property
    def labels(self) -> npt.NDArray[Any]:
        """The labels of `truth`: int64 (N,) for one class per image."""
        return self.truth.labels

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; none for images without labels."""
        return () if self.targets is None else self.targets.class_names

    @property
    def uneven(self) -> bool:
        """Whether some class has several times the images of another; see `Targets.uneven`."""
        return self.targets is not None and self.targets.uneven

    def subset(self, name: str, indices: npt.NDArray[np.int64]) -> "ImageSet":
        """Some of the images, in the order given."""
        all_of_them: Sequence[ImageSource] = self.sources
        if isinstance(all_of_them, LazySources):
            some: Sequence[ImageSource] = all_of_them.take(indices)
        else:
            some = [all_of_them[index] for index in indices]
        targets = None if self.targets is None else self.targets.take(indices)
        return ImageSet(
            name,
            some,
            targets,
            self.contents[indices] if len(self.contents) else self.contents,
            self.groups[indices] if len(self.groups) else self.groups,
            self.folds[indices] if len(self.folds) else self.folds,
        )

    def spread(self, most: int) -> list[int]:
        """At most so many indices, spread evenly over the set from its first image to its last."""
        return np.unique(np.linspace(0, len(self) - 1, min(most, len(self))).astype(int)).tolist()

    def identified(self) -> Self:
        """The same images with their `contents`, which are read unless they are known."""
        known = len(self.contents) == len(self)
        return self if known else dataclasses.replace(self, contents=contents_of(self.sources))

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The order of an epoch: a permutation of range(len(self)), a function of seed and epoch."""
        return self.streams(seed, epoch, 1)[0]

    def streams(self, seed: int, epoch: int, count: int) -> list[npt.NDArray[np.int64]]:
        """The images of an epoch in `count` orders of different shards; one order for files of their own."""
        if isinstance(self.sources, LazySources):
            return self.sources.streams(seed, epoch, count)
        return [epoch_order(seed, epoch, len(self))]

    @property
    def shard_files(self) -> int:
        """The number of shards that the images are in; 0 for files of their own."""
        return self.sources.shard_files if isinstance(self.sources, LazySources) else 0

    def followed_by(self, others: "ImageSet") -> "ImageSet":
        """These images and others of the same classes; what is known of one part only is left out."""
        name, sources = f"{self.name} and {others.name}", [*self.sources, *others.sources]
        contents = np.concatenate([self.contents, others.contents])
        columns = [
            np.concatenate(pair) for pair in ((self.groups, others.groups), (self.folds, others.folds))
        ]
        return ImageSet(
            name,
            sources,
            self.truth.joined(others.truth),
            contents if len(contents) == len(sources) else _not_read(),
            *(column if len(column) == len(sources) else _no_groups() for column in columns),
        )

    def in_classes(self, class_names: tuple[str, ...], where: str) -> Self:
        """The same images, with their labels in another list of class names."""
        check_known_classes(self.class_names, class_names, where)
        return dataclasses.replace(self, targets=self.truth.in_classes(class_names))


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set: images to train on, to choose the best weights with, and to test the result on."""

    train: ImageSet
    val: ImageSet
    test: ImageSet | None  # None in folders with `train/` and `val/` alone; `val` measures the result then
    channels: int
    root: Path | str | None = None  # the folder of the images, or its URL; None for images without one
    unused: tuple[str, ...] = ()  # descriptions of unused images, files and folders
    drawn: tuple[str, ...] = ()  # the names of the splits that were drawn from the others by seed
    notes: tuple[str, ...] = ()  # lines on what was recognized, such as the columns of a table

    @property
    def measured(self) -> ImageSet:
        """The images to measure the finished model on; without any, each by the model of a fold."""
        if self.test is not None:
            return self.test
        return self.val if len(self.val) else dataclasses.replace(self.train, name=OUT_OF_FOLD)

    @property
    def parts(self) -> dict[str, ImageSet]:
        """`train`, `val` and, where there is one, `test`."""
        given = {"train": self.train, "val": self.val, "test": self.test}
        return {name: images for name, images in given.items() if images is not None}

    def with_unlabelled(self, more: Sequence[ImageSet]) -> Self:
        """These and more images to train on, without labels; groups of `val` or `test` are unused."""
        held = {group for name in self.parts.keys() - {"train"} for group in self.parts[name].groups.tolist()}
        some = [
            images.subset("train", np.flatnonzero(~np.isin(images.groups, list(held)))) if held else images
            for images in more
        ]
        sources = [source for images in (self.train, *some) for source in images.sources]
        left_out = sum(map(len, more)) - sum(map(len, some))
        why = f"{counted(left_out, 'image')} without a class, of groups in val or test"
        unused = (*((why,) if left_out else ()), *self.unused)
        val = dataclasses.replace(self.val, targets=None)
        test = None if self.test is None else dataclasses.replace(self.test, targets=None)
        train = ImageSet("train", sources)
        return dataclasses.replace(self, train=train, val=val, test=test, unused=unused)

    def identified(self) -> Self:
        """The same splits with the `contents` of all images."""
        parts: dict[str, Any] = {name: part.identified() for name, part in self.parts.items()}
        return dataclasses.replace(self, **parts)


@dataclasses.dataclass(frozen=True)
class Inventory:
    """All images of a data set now, in the splits that it has."""

    sets: tuple[ImageSet, ...]
    """Called `train`, `val` and `test`, or `all`, each with classes of its own. Images without labels beside
    labelled ones are another set of the same name; images in no split are a set of another name."""
    channels: int
    root: Path | str | None  # the folder of the images, or its URL; None for images without one
    unused: tuple[str, ...] = ()  # descriptions of files that are no images, and of folders without images
    notes: tuple[str, ...] = ()  # lines on what was recognized, such as the columns of a table
    unlabelled: str = ""  # why images have no labels, where there is a reason to name

    @property
    def by_name(self) -> dict[str, ImageSet]:
        """The sets that have images, by their names; of two, the labelled one."""
        ordered = sorted(self.sets, key=lambda images: images.targets is not None)
        return {images.name: images for images in ordered if len(images)}

    def check_trainable(self, place: str) -> None:
        """Reject data without images to train on."""
        if not self.by_name.keys() & {"train", "all"}:
            raise UserError(
                f"{place}: no images to train on; it has {', '.join(self.by_name) or 'none at all'}"
            )

    def unused_and_unlabelled(self, train: ImageSet) -> tuple[str, ...]:
        """What is unused, with the images without a class beside those to train on."""
        without = sum(len(images) for images in self.sets if images.targets is None and train.class_names)
        return ((f"{counted(without, 'image')} without a class",) if without else ()) + self.unused


def without_rare(inventory: Inventory, least: int) -> Inventory:
    """The data without the classes that have fewer than `least` training images; a note names them.

    Raises:
        UserError: images of several classes each; no class that has as many.
    """
    known = inventory.by_name.get("train", inventory.by_name.get("all"))
    if known is None or known.targets is None:
        return inventory
    if known.targets.strata is None:
        raise UserError("min_images is for images of one class each, and these have several: leave it out")
    counts = dict(zip(known.class_names, known.targets.counts.tolist(), strict=True))
    rare = {name: count for name, count in counts.items() if count < least}
    if not rare:
        return inventory
    if len(rare) == len(counts):
        most = max(counts.values())
        raise UserError(
            f"min_images={least} leaves out every class: the largest has {counted(most, 'image')}"
        )
    sets = []
    for images in inventory.sets:
        if images.targets is not None:
            names = images.targets.names()
            kept = np.array([n for n, (name,) in enumerate(names) if name not in rare], dtype=np.int64)
            classes = tuple(name for name in images.class_names if name not in rare)
            targets = images.targets.of_names([names[n] for n in kept], classes)
            images = dataclasses.replace(images.subset(images.name, kept), targets=targets)
        sets.append(images)
    named = listed([f"{name} ({count})" for name, count in rare.items()], MOST_NAMED)
    note = f"left out: {len(rare):,} of {len(counts):,} classes with fewer than {least:,} images: {named}"
    return dataclasses.replace(inventory, sets=tuple(sets), notes=(*inventory.notes, note))


def complete_splits(
    inventory: Inventory, place: str, *, seed: int, rare: Literal["reject", "train"] = "reject"
) -> Splits:
    """The splits of a data set that has `train` and perhaps `val` and `test`, or only `all`. Missing ones are
    drawn by seed: a tenth of each class is `val`, and of `all` another tenth `test`. Images beside labelled
    ones that have no label are unused. Classes of too few images for that are in `train` alone if `rare` says
    so, else rejected."""
    inventory.check_trainable(place)
    given, drawn = inventory.by_name, ["val"]
    if "train" in given and (names := given["train"].class_names):
        for split in given.keys() & {"val", "test"}:
            given[split] = given[split].in_classes(names, f"the {split} images of {place}")
    if "all" in given:
        everything = given["all"].identified()
        least = 3 if rare == "train" else 0
        if not least:
            check_class_sizes(everything, 3, "train, val and test")
        rest, given["test"] = stratified_split(everything, TEST_SHARE, "test", seed, least)
        train, val = stratified_split(rest, VAL_SHARE / (1 - TEST_SHARE), "val", seed, least)
        drawn = ["val", "test"]
    elif "val" in given:
        train, val, drawn = given["train"], given["val"], []
    else:
        train, val = stratified_split(given["train"], VAL_SHARE, "val", seed, 2 if rare == "train" else 0)
    about = inventory.channels, inventory.root, inventory.unused_and_unlabelled(train)
    return Splits(train, val, given.get("test"), *about, tuple(drawn), inventory.notes)


def stratified_split(
    images: ImageSet, share: float, name: str, seed: int, least: int = 0
) -> tuple[ImageSet, ImageSet]:
    """Divide images into a rest and a share of each class, at least one image, by seed. Images of the same
    content or group stay together. A class of images with several may be too rare to be in both parts, and so
    may one of fewer than `least` images."""
    images = images.identified()
    if not least:
        check_class_sizes(images, 2, f"{images.name} and {name}")
    first, targets = first_of_content(images.contents), images.targets
    if len(images.groups) or (targets is not None and targets.strata is None):
        taken = _bound_share(images, first, share, seed, least)
    else:
        # The first of equal images is drawn, and the others follow it.
        drawn: list[int] = []
        for number, stratum in enumerate([np.arange(len(images))] if targets is None else targets.by_class()):
            members = stratum[first[stratum] == stratum]
            members = np.random.default_rng([seed, number]).permutation(members)
            if len(members) < least:
                continue
            drawn.extend(members[: max(1, round(share * len(members)))].tolist())
        taken = np.isin(first, drawn)
    if not taken.any():
        what = "two groups" if len(images.groups) else f"{max(2, least)} different images"
        raise UserError(
            f"no class has {what}, so none of {counted(len(images), images.noun)} is left for {name}: add "
            "some, or give your own split"
        )
    return images.subset("train", np.flatnonzero(~taken)), images.subset(name, np.flatnonzero(taken))


def _bound_share(
    images: ImageSet, first: npt.NDArray[np.int64], share: float, seed: int, least: int
) -> npt.NDArray[np.bool_]:
    """Whether each image, (N,), is in a share that divides no group and separates no copies. Without `least`,
    every class has to be divided."""
    group_of = np.unique(images.groups, return_inverse=True)[1] if len(images.groups) else first
    targets = images.targets
    labels = np.zeros((len(images), 0), dtype=np.bool_) if targets is None else targets.members
    every_class = targets is not None and targets.strata is not None
    sets = bound_sets(first, group_of)
    for k, column in enumerate(labels.T) if every_class else ():
        if not least and len(np.unique(sets[column])) < 2:
            raise UserError(
                f"all images of class {images.class_names[k]!r} are in one group, "
                f"{str(images.groups[column.argmax()])!r}, so they cannot be divided: give your own split, "
                "or leave the groups out"
            )
    taken = draw_share(labels, sets, share, np.random.default_rng(seed), every_class=every_class)
    if taken.any() or every_class or not sets.any():
        return taken
    # All sets are too large for the share: the smallest of those that take the fewest classes whole.
    sizes, counts = np.bincount(sets), counts_by_set(labels, sets)
    completed = ((counts > 0) & (counts == counts.sum(axis=0))).sum(axis=1)
    return sets == np.lexsort((sizes, completed))[0]


def divided_groups(groups: Sequence[str], parts: Sequence[str], what: str) -> str:
    """The groups of images, "" for none, that are in several parts, in words; empty if none is."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for group, part in zip(groups, parts, strict=True) if groups else ():
        if group:
            counts[group][part] += 1
    divided = {group: inside for group, inside in counts.items() if len(inside) > 1}
    some = [
        f"{group} ({', '.join(f'{count:,} {part}' for part, count in inside.items())})"
        for group, inside in divided.items()
    ]
    return f"{len(divided):,} of {len(counts):,} groups are in several {what}: {listed(some)}" if some else ""


def check_class_sizes(images: ImageSet, needed: int, parts: str) -> None:
    """Reject images, or a class, with too few different ones for some parts."""
    different = np.flatnonzero(first_of_content(images.contents) == np.arange(len(images)))
    counts = [("the data have", len(images), len(different))]
    by_class = (targets := images.targets) is not None and targets.strata is not None
    if targets is not None and by_class:
        classes = [f"class {name!r} has" for name in targets.class_names]
        pairs = targets.counts.tolist(), targets.take(different).counts.tolist()
        counts = list(zip(classes, *pairs, strict=True))
    few = [
        f"{who} {counted(count, 'image')}{f', {single} if copies count once' if single < count else ''}"
        for who, count, single in counts
        if single < needed
    ]
    if few:
        rule = f"{parts} need one each, so at least {needed}"
        more = f"; and {len(few) - MOST_NAMED} more" if len(few) > MOST_NAMED else ""
        several = (
            f" ({len(few)} of {len(counts)} classes; add images, or leave these classes out)"
            if len(few) > 1
            else ""
        )
        advice = (
            f": min_images={needed} leaves them out, rare=train keeps them in training alone"
            if by_class and len(few) < len(counts)
            else ""
        )
        raise UserError(f"{'; '.join(few[:MOST_NAMED])}{more}{several}; {rule}{advice}")


def absent_classes(images: ImageSet) -> str:
    """The classes without images, in one line; empty if every class has some."""
    absent = [images.class_names[label] for label in np.flatnonzero(images.truth.counts == 0)]
    if not absent:
        return ""
    have = "has" if len(absent) == 1 else "have"
    some, total = _some(absent), len(images.class_names)
    return f"{len(absent)} of {total} classes {have} no image in {images.name}: {some}"


def check_every_class(images: ImageSet, option: str) -> None:
    """Reject an option that needs images of every class."""
    if absent := absent_classes(images):
        raise UserError(f"{absent}; {option} needs images of every class: add some, or leave the option out")


class UnknownClassesError(UserError):
    """Images have classes that a model does not have; the first of them is `first`."""

    def __init__(self, message: object, first: str) -> None:
        super().__init__(message)
        self.first = first


def check_known_classes(found: Sequence[str], known: Sequence[str], where: str) -> None:
    """Reject classes that are not among the known ones, with an `UnknownClassesError`."""
    names = set(map(canonical, known))
    unknown = [name for name in found if canonical(name) not in names]
    if unknown:
        raise UnknownClassesError(
            f"{where}: {len(unknown)} of {len(found)} classes are not among the {len(known)} known "
            f"classes: {_some(unknown)}{suggestion(unknown[0], known)}",
            unknown[0],
        )


def _some(names: Sequence[str]) -> str:
    return printable(", ".join(names[:5]) + (", ..." if len(names) > 5 else ""), 500)


def bound_sets(*keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The set of each image, (N,), 0 to G - 1: two images of the same key, in any of the keys (N,), are in
    the same set, and so are images that a chain of such pairs connects."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    N = len(keys[0])
    columns = np.concatenate(
        [np.unique(key, return_inverse=True)[1] + N * (1 + n) for n, key in enumerate(keys)]
    )
    size = N * (1 + len(keys))
    edges = coo_array(
        (np.ones(len(columns), dtype=np.bool_), (np.tile(np.arange(N), len(keys)), columns)), (size, size)
    )
    _, sets = connected_components(edges, directed=False)
    found: npt.NDArray[np.int64] = np.unique(sets[:N], return_inverse=True)[1]
    return found


def counts_by_set(labels: npt.NDArray[np.bool_], sets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of images of each class, of labels (N, K), in each of the G sets (N,): (G, K)."""
    counts = np.zeros((int(sets.max()) + 1, labels.shape[1]), dtype=np.int64)
    np.add.at(counts, sets, labels)
    return counts


def draw_share(
    labels: npt.NDArray[np.bool_],
    sets: npt.NDArray[np.int64],
    share: float,
    generator: np.random.Generator,
    *,
    every_class: bool,
) -> npt.NDArray[np.bool_]:
    """Draw about a share of N images and of each of their K classes, without dividing a set: bool (N,).

    Sets are taken one by one, those of rare classes first (as in iterative stratification, Sechidis et al.
    2011), large ones before small ones, in a random order: if each of their classes and the whole are nearer
    to the share with them; then, in the reverse order, until the whole is as near as a further set could
    bring it. A class is never drawn completely. The number of images differs from the share by at most half
    of a set, unless that needs all sets of a class.

    Args:
        labels: the classes of each image, (N, K).
        sets: from `bound_sets`, (N,).
        share: in (0, 1).
        generator: of the order.
        every_class: draw at least one set of each class that is in two or more of them, if one can be drawn
            that takes no class whole.
    """
    sizes = np.bincount(sets)  # (G,)
    counts = counts_by_set(labels, sets)  # (G, K)
    totals = counts.sum(axis=0)
    wanted, whole = share * totals, share * len(labels)
    rarest = np.where(counts > 0, totals, len(labels) + 1).min(axis=1, initial=len(labels) + 1)  # (G,)
    order = np.lexsort((generator.permutation(len(sizes)), -sizes, rarest))
    taken, drawn, drawn_whole = np.zeros(len(sizes), dtype=np.bool_), np.zeros(len(totals)), 0

    def take(number: int) -> None:
        nonlocal drawn_whole
        taken[number] = True
        drawn[:] += counts[number]
        drawn_whole += int(sizes[number])

    for k in np.argsort(totals, kind="stable") if every_class else ():
        having = order[counts[order, k] > 0]
        if not taken[having].any():
            completed = ((counts[having] > 0) & (drawn + counts[having] == totals)).any(axis=1)
            if not completed.all():
                take(having[~completed][np.argmin(sizes[having[~completed]])])
    for numbers, by_class in ((order, True), (order[::-1], False)):
        for number in numbers:
            own, size = counts[number], sizes[number]
            nearer = 2 * (whole - drawn_whole) > size
            if nearer and by_class:
                nearer = bool((2 * (wanted - drawn) > own)[own > 0].all())
            if nearer and not taken[number] and not ((own > 0) & (drawn + own == totals)).any():
                take(number)
    return taken[sets]
