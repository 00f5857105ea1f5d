"""Batches: every image once an epoch, in an order that is a function, from memory and from files alike."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data import noise, write_tree
from vitascope.data.datasets import ImageSet, read_tree
from vitascope.data.loading import Batch, Loader
from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError

FIT = Preprocess(image_size=(4, 4))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    return read_tree(write_tree(tmp_path_factory.mktemp("images"), {"cat": 7, "dog": 6}))


def arrays(count: int) -> ImageSet:
    sources = [noise(4, 4, seed=number) for number in range(count)]
    return ImageSet("train", sources, np.arange(count) % 2, ("a", "b"))


def order(loader: Loader, epoch: int = 0, start: int = 0) -> list[int]:
    return [int(index) for batch in loader.epoch(epoch, start=start) for index in batch.indices]


def assert_same(ours: list[Batch], others: list[Batch]) -> None:
    assert len(ours) == len(others)
    for one, other in zip(ours, others, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.labels, other.labels)
        np.testing.assert_array_equal(one.indices, other.indices)


def break_some(images: ImageSet, numbers: list[int], tmp_path: Path) -> tuple[ImageSet, list[Path]]:
    """The same set with some of its files broken."""
    sources, broken = list(images.sources), []
    for number in numbers:
        path = tmp_path / f"broken{number}.png"
        path.write_bytes(b"not a picture")
        sources[number] = path
        broken.append(path)
    return ImageSet(images.name, sources, images.labels, images.class_names), broken


@pytest.mark.parametrize("memory_budget", [2**30, 0])
def test_every_image_comes_once_an_epoch_with_its_label_and_pixels(
    images: ImageSet, memory_budget: int
) -> None:
    loader = Loader(images, FIT, 4, seed=1, workers=0, memory_budget=memory_budget)
    batches = list(loader.epoch(0))
    assert [len(batch.labels) for batch in batches] == [4, 4, 4, 1]
    assert len(batches) == loader.batches_per_epoch
    assert sorted(order(loader)) == list(range(13))
    for batch in batches:
        assert batch.pixels.dtype == torch.uint8
        assert batch.labels.dtype == torch.int64
        for pixels, label, index in zip(batch.pixels, batch.labels, batch.indices, strict=True):
            np.testing.assert_array_equal(pixels.numpy(), FIT.pixels(images.sources[index]))
            assert label == images.labels[index]


def test_order_is_a_function_of_seed_and_epoch() -> None:
    data = arrays(50)
    loader = Loader(data, FIT, 8, seed=1)
    first = order(loader, 3)
    list(loader.epoch(4))  # what ran before does not matter
    assert order(loader, 3) == first
    assert order(Loader(data, FIT, 16, seed=1), 3) == first  # nor how many come at a time
    assert order(loader, 4) != first
    assert order(Loader(data, FIT, 8, seed=2), 3) != first
    assert first != sorted(first)


def test_without_a_seed_the_order_is_the_split_own() -> None:
    loader = Loader(arrays(20), FIT, 8)
    assert order(loader, 0) == order(loader, 7) == list(range(20))


@pytest.mark.parametrize("memory_budget", [2**30, 0])
@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_start_gives_exactly_the_tail(images: ImageSet, start: int, memory_budget: int) -> None:
    loader = Loader(images, FIT, 4, seed=1, workers=0, memory_budget=memory_budget)
    assert_same(list(loader.epoch(2, start=start)), list(loader.epoch(2))[start:])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_streamed_batches_are_those_from_memory(images: ImageSet, workers: int) -> None:
    kept = Loader(images, FIT, 4, seed=1, workers=workers)
    streamed = Loader(images, FIT, 4, seed=1, workers=workers, memory_budget=0)
    assert len(kept) == len(streamed) == 13
    assert kept.batches_per_epoch == streamed.batches_per_epoch
    assert_same(list(kept.epoch(1)), list(streamed.epoch(1)))


def test_split_that_fits_is_read_once(images: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(images) * 3 * 4 * 4
    kept = Loader(images, FIT, 4, workers=0, memory_budget=size)
    streamed = Loader(images, FIT, 4, workers=0, memory_budget=size - 1)
    reads: list[object] = []
    read = Preprocess.pixels
    monkeypatch.setattr(Preprocess, "pixels", lambda self, source: reads.append(source) or read(self, source))
    list(kept.epoch())
    assert not reads
    list(streamed.epoch())
    assert len(reads) == len(images)


@pytest.mark.parametrize(("memory_budget", "workers"), [(2**30, 2), (0, 0), (0, 2)])
def test_unreadable_images_are_left_out_and_named(
    images: ImageSet, tmp_path: Path, memory_budget: int, workers: int
) -> None:
    data, broken = break_some(images, [5], tmp_path)
    loader = Loader(data, FIT, 4, seed=0, workers=workers, memory_budget=memory_budget)
    for epoch in (0, 1):
        assert sorted(order(loader, epoch)) == [index for index in range(13) if index != 5]
        assert list(loader.unreadable) == [str(broken[0])]
        assert "broken5.png" in loader.unreadable[str(broken[0])]
    for batch in loader.epoch():
        for pixels, index in zip(batch.pixels, batch.indices, strict=True):
            np.testing.assert_array_equal(pixels.numpy(), FIT.pixels(data.sources[index]))


@pytest.mark.parametrize(("memory_budget", "workers"), [(2**30, 2), (0, 0), (0, 1)])
def test_more_than_a_tenth_unreadable_is_refused(
    images: ImageSet, tmp_path: Path, memory_budget: int, workers: int
) -> None:
    data, _ = break_some(images, [2, 8], tmp_path)  # 2 of 13
    with pytest.raises(UserError, match=r"more than 10% of the 13 images.*broken"):
        list(Loader(data, FIT, 4, workers=workers, memory_budget=memory_budget).epoch())


def test_a_tenth_unreadable_is_not_refused(tmp_path: Path) -> None:
    data, _ = break_some(arrays(20), [2, 8], tmp_path)
    assert len(order(Loader(data, FIT, 4))) == 18


@pytest.mark.parametrize("memory_budget", [2**30, 0])
def test_nothing_readable_gives_no_image_or_a_clear_refusal(tmp_path: Path, memory_budget: int) -> None:
    data, broken = break_some(arrays(1), [0], tmp_path)
    try:
        loader = Loader(data, FIT, 4, workers=0, memory_budget=memory_budget)
        assert order(loader) == []
        assert list(loader.unreadable) == [str(broken[0])]
    except UserError as error:
        assert "broken0.png" in str(error)  # noqa: PT017 - either answer will do
