"""The promises of a format of data, checked on one example of a few pictures of known classes."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vitascope.data.datasets import class_counts, open_data, open_for_evaluation, read_data
from vitascope.data.split_record import record_of, restore
from vitascope.data.splits import ImageSet
from vitascope.models.decoding import read_image

Pictures = dict[bytes, str]
"""The class of each picture, by its pixels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """Data in a format, and the pictures in it."""

    write: Callable[[Path], Path | str]  # into a folder; returns DATA
    train: Pictures
    test: Pictures
    class_names: tuple[str, ...]
    channels: int = 3


def pictures_of(images: ImageSet) -> Pictures:
    return {
        np.asarray(read_image(source)).tobytes(): images.class_names[label]
        for source, label in zip(images.sources, images.labels, strict=True)
    }


def listing(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def check_format(example: Example, folder: Path) -> None:
    """Read, divide by seed, restore from a record, hand to workers and evaluate; leave nothing behind."""
    data = str(example.write(folder))
    before = listing(folder)
    splits = open_data(data, seed=3)
    assert splits.test is not None
    assert (splits.channels, splits.train.class_names) == (example.channels, example.class_names)
    assert splits.train.labels.dtype == np.int64
    train, val, test = (pictures_of(splits.parts[name]) for name in ("train", "val", "test"))
    assert train | val == example.train
    assert not train.keys() & val.keys()
    assert test == example.test
    assert set(class_counts(splits.val)) == set(example.class_names)
    assert pictures_of(open_data(data, seed=3).val) == val != pictures_of(open_data(data, seed=4).val)
    assert restore(record_of(splits), read_data(data), ("train", "val", "test")).complete
    again = pickle.loads(pickle.dumps(splits.train))  # noqa: S301 - as workers get them
    assert pictures_of(again) == train
    assert pictures_of(splits.train.subset("part", np.array([1, 0]))).keys() < train.keys()
    evaluated = open_for_evaluation(data, example.class_names[::-1])
    assert pictures_of(evaluated) == test
    assert listing(folder) == before  # nothing is unpacked or converted beside the data
