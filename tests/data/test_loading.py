import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data import bomb, noise, read_tree, write_picture, write_tree
from tests.models import law
from vitascope.data.formats.shards import GROUP, ShardMembers
from vitascope.data.loading import Batch, Loader, balanced_order, even_cuts, woven
from vitascope.data.randomness import epoch_order
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError
from vitascope.models.preprocess import Preprocess

FIT = Preprocess(image_size=(4, 4))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    return read_tree(write_tree(tmp_path_factory.mktemp("images"), {"cat": 7, "dog": 6}, size=(30, 40)))


def arrays(count: int) -> ImageSet:
    sources = [noise(4, 4, seed=number) for number in range(count)]
    return ImageSet("train", sources, ClassIndices(np.arange(count) % 2, ("a", "b")))


def order(loader: Loader, epoch: int = 0, start: int = 0) -> list[int]:
    return [int(index) for batch in loader.epoch(epoch, start=start) for index in batch.indices]


def assert_same(ours: list[Batch], others: list[Batch]) -> None:
    assert len(ours) == len(others)
    for one, other in zip(ours, others, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.targets, other.targets)
        np.testing.assert_array_equal(one.indices, other.indices)
        assert one.planned == other.planned


def break_some(images: ImageSet, numbers: list[int], tmp_path: Path) -> tuple[ImageSet, list[Path]]:
    """The same set with some of its files broken."""
    sources, broken = list(images.sources), []
    for number in numbers:
        path = tmp_path / f"broken{number}.png"
        path.write_bytes(b"not a picture")
        sources[number] = path
        broken.append(path)
    return ImageSet(images.name, sources, images.targets), broken


@pytest.mark.parametrize("memory_budget", [2**30, 0])
def test_every_image_comes_once_per_epoch_with_its_label_and_pixels(images, memory_budget) -> None:
    loader = Loader(images, FIT, 4, seed=1, workers=0, memory_budget=memory_budget)
    batches = list(loader.epoch(0))
    assert [len(batch.targets) for batch in batches] == [4, 4, 4, 1]
    assert len(batches) == loader.batches_per_epoch
    assert sorted(order(loader)) == list(range(13))
    for batch in batches:
        assert batch.pixels.dtype == torch.uint8
        assert batch.targets.dtype == torch.int64
        for pixels, label, index in zip(batch.pixels, batch.targets, batch.indices, strict=True):
            np.testing.assert_array_equal(pixels.numpy(), FIT.pixels(images.sources[index]))
            assert label == images.labels[index]


def test_order_is_a_function_of_seed_and_epoch() -> None:
    data = arrays(50)
    loader = Loader(data, FIT, 8, seed=1)
    first = order(loader, 3)
    list(loader.epoch(4))  # earlier epochs do not matter
    assert order(loader, 3) == first
    assert order(Loader(data, FIT, 16, seed=1), 3) == first  # nor does the batch size
    assert order(loader, 4) != first
    assert order(Loader(data, FIT, 8, seed=2), 3) != first
    assert first != sorted(first)


@pytest.mark.parametrize("workers", [0, 3])
def test_streamed_batches_are_those_from_memory_from_any_start(images: ImageSet, workers: int) -> None:
    kept = Loader(images, FIT, 4, seed=1, workers=workers)
    streamed = Loader(images, FIT, 4, seed=1, workers=workers, memory_budget=0)
    assert len(kept) == len(streamed) == 13
    assert kept.batches_per_epoch == streamed.batches_per_epoch
    whole = list(kept.epoch(1))
    for start in (0, 1, 3, 4):
        assert_same(list(kept.epoch(1, start=start)), whole[start:])
        assert_same(list(streamed.epoch(1, start=start)), whole[start:])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The images that are read from now on."""
    found: list[object] = []
    read = Preprocess.pixels
    monkeypatch.setattr(Preprocess, "pixels", lambda self, source: found.append(source) or read(self, source))
    return found


def test_split_that_fits_is_read_once_and_one_without_room_or_with_crops_again(images, reads) -> None:
    size, kinds = len(images) * 3 * 4 * 4, {"seed": 0, "workers": 0}
    kept = Loader(images, FIT, 4, memory_budget=size, **kinds)
    streamed = Loader(images, FIT, 4, memory_budget=size - 1, **kinds)
    reads.clear()
    list(kept.epoch())
    assert not reads
    list(streamed.epoch())
    assert len(reads) == len(images)
    for room, crop_scale, kept_bytes in ((size, 1.0, size), (size - 1, 1.0, 0), (size, 0.5, 0)):
        loader = Loader(images, FIT, 4, memory_budget=0, room=room, crop_scale=crop_scale, **kinds)
        assert loader.kept_bytes == kept_bytes


@pytest.mark.parametrize("memory_budget", [2**30, 0])
def test_no_readable_image_is_an_empty_epoch_or_a_clear_error(tmp_path: Path, memory_budget: int) -> None:
    data, broken = break_some(arrays(1), [0], tmp_path)
    try:
        loader = Loader(data, FIT, 4, workers=0, memory_budget=memory_budget)
        assert order(loader) == []
        assert list(loader.faults.reasons) == [str(broken[0])]
    except UserError as error:
        assert "broken0.png" in str(error)  # noqa: PT017 - either result is valid


def test_workers_and_earlier_epochs_do_not_change_batches(images: ImageSet) -> None:
    """Epochs in sequence, an unfinished one, and two at the same time."""
    kinds = {"seed": 3, "memory_budget": 0, "crop_scale": 0.1}
    alone = Loader(images, FIT, 4, workers=0, **kinds)
    epochs = [list(alone.epoch(number)) for number in range(3)]
    loader = Loader(images, FIT, 4, workers=2, **kinds)
    assert_same(list(loader.epoch(1)), epochs[1])
    pool = loader._pool
    assert_same(list(loader.epoch(2)), epochs[2])
    assert pool is loader._pool is not None  # kept between epochs
    next(loader.epoch(2))
    both = list(zip(loader.epoch(0), loader.epoch(2), strict=True))
    assert_same([first for first, _ in both], epochs[0])
    assert_same([second for _, second in both], epochs[2])
    assert_same(list(loader.epoch(2, start=2)), epochs[2][2:])


def test_only_streamed_training_images_are_cropped_anew_in_every_epoch(images: ImageSet) -> None:
    loader = Loader(images, FIT, 13, seed=3, workers=2, memory_budget=0, crop_scale=0.1)
    assert loader.crops
    (first,), (second,) = loader.epoch(0), loader.epoch(1)
    back, forth = np.argsort(first.indices), np.argsort(second.indices)
    whole = np.stack([FIT.pixels(source) for source in images.sources])
    assert (first.pixels[back] != second.pixels[forth]).flatten(1).any(1).all()
    assert (first.pixels[back] != torch.from_numpy(whole)).flatten(1).any(1).all()
    assert not Loader(images, FIT, 13, seed=3, workers=0, crop_scale=0.1).crops  # the device crops
    assert not Loader(images, FIT, 13, seed=3, workers=0, memory_budget=0).crops
    plain = Loader(images, FIT, 13, workers=0, memory_budget=0, crop_scale=0.1)  # evaluation
    assert not plain.crops
    assert_same(list(plain.epoch()), list(Loader(images, FIT, 13, workers=0).epoch()))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    return read_tree(write_tree(tmp_path_factory.mktemp("uneven"), {"cat": 11, "dog": 2}, size=(30, 40)))


@pytest.mark.parametrize(("memory_budget", "workers"), [(2**30, 0), (0, 0), (0, 2)])
def test_balanced_batches_have_the_pixels_and_labels_of_repeated_images(
    uneven: ImageSet, memory_budget: int, workers: int
) -> None:
    loader = Loader(uneven, FIT, 4, seed=1, workers=workers, memory_budget=memory_budget, balanced=True)
    batches = list(loader.epoch(5))
    assert (len(loader), loader.batches_per_epoch) == (13, 4)
    assert [batch.planned for batch in batches] == [4, 4, 4, 1]
    labels = torch.cat([batch.targets for batch in batches])
    assert sorted(labels.bincount().tolist()) == [6, 7]
    for batch in batches:
        for pixels, label, index in zip(batch.pixels, batch.targets, batch.indices % 13, strict=True):
            np.testing.assert_array_equal(pixels.numpy(), FIT.pixels(uneven.sources[index]))
            assert label == uneven.labels[index]
    assert_same(list(loader.epoch(5, start=2)), batches[2:])


@pytest.mark.parametrize("memory_budget", [2**30, 0])
def test_unreadable_images_are_left_out_of_balanced_epochs(tmp_path: Path, memory_budget: int) -> None:
    data, broken = break_some(arrays(20), [3], tmp_path)
    loader = Loader(data, FIT, 20, seed=0, workers=0, memory_budget=memory_budget, balanced=True)
    (batch,) = loader.epoch()
    assert 3 not in batch.indices % 20
    assert list(loader.faults.reasons) == [str(broken[0])]
    assert (len(batch.targets), batch.planned) == ((19, 19) if memory_budget else (19, 20))


def test_balanced_sampling_needs_a_readable_image_of_every_class(tmp_path: Path) -> None:
    data = arrays(20)
    alone = dataclasses.replace(data, targets=ClassIndices(np.arange(20) // 19, data.class_names))
    data, _ = break_some(alone, [19], tmp_path)
    more = dataclasses.replace(data, targets=ClassIndices(data.labels, ("a", "b", "c")))
    for images, memory_budget in ((data, 2**30), (more, 0)):
        with pytest.raises(
            UserError, match=r"1 of [23] classes has no image in train: [bc]; balanced sampling"
        ):
            Loader(images, FIT, 4, seed=0, workers=0, memory_budget=memory_budget, balanced=True)


@given(count=st.integers(0, 300), parts=st.integers(1, 40))
def test_cuts_are_even_and_balanced(count: int, parts: int) -> None:
    cuts = even_cuts(count, parts)
    assert (len(cuts), cuts[0], cuts[-1]) == (parts + 1, 0, count)
    assert all(cut % 2 == 0 for cut in cuts if cut != count)
    sizes = [last - first for first, last in itertools.pairwise(cuts)]
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) <= 3  # a pair, and the last image of an odd number


@pytest.mark.parametrize(("memory_budget", "world"), [(2**30, 2), (0, 3)])
@pytest.mark.parametrize("options", [{"seed": None}, {}, {"repeats": 3}, {"balanced": True}], ids=str)
def test_parts_of_all_processes_are_the_batches_of_one(images, world, memory_budget, options) -> None:
    kinds = {"seed": 1, "workers": 0, "memory_budget": memory_budget, "crop_scale": 0.5} | options
    whole = list(Loader(images, FIT, 6, **kinds).epoch(2))
    loaders = [Loader(images, FIT, 6, part=(rank, world), **kinds) for rank in range(world)]
    assert {loader.batches_per_epoch for loader in loaders} == {3}
    parts = [list(loader.epoch(2)) for loader in loaders]
    for number, batch in enumerate(whole):
        pieces = [part[number] for part in parts]
        assert [piece.planned for piece in pieces] == [batch.planned] * world
        assert torch.equal(torch.cat([piece.pixels for piece in pieces]), batch.pixels)
        np.testing.assert_array_equal(np.concatenate([piece.indices for piece in pieces]), batch.indices)
    assert [batch.planned for batch in whole] == [6, 6, 1]
    assert [len(part[-1].indices) for part in parts].count(0) == world - 1  # and every process has the batch


def test_parts_with_workers_and_an_empty_slice_cover_every_image(images: ImageSet) -> None:
    parts = [Loader(images, FIT, 6, seed=0, workers=2, memory_budget=0, part=(r, 3)) for r in range(3)]
    assert sorted(index for part in parts for index in order(part)) == list(range(13))


@pytest.mark.parametrize("processes", [4, 2])
def test_each_machine_reads_its_own_shards_and_all_batches_are_those_of_one_process(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, streams, N = np.repeat(np.arange(6, dtype=np.int32), 10), 2, 60
    zeros = np.zeros(N, np.int64)
    members = ShardMembers(tuple("abcdef"), shards, zeros, zeros, np.full(N, b"a"))
    data = ImageSet("train", members, ClassIndices(np.arange(N) % 2, ("a", "b")))
    monkeypatch.setattr(Loader, "_cache", lambda self: torch.zeros(N, 1))  # no shard is read
    loaders = [
        Loader(data, FIT, 12, seed=3, part=part, streams=streams)
        for part in ((0, 1), *((rank, processes) for rank in range(processes)))
    ]
    own = set()
    for epoch in range(3):
        whole, *parts = (list(loader.epoch(epoch)) for loader in loaders)
        for batch, *pieces in zip(whole, *parts, strict=True):
            np.testing.assert_array_equal(np.concatenate([part.indices for part in pieces]), batch.indices)
        assert sorted(index for batch in whole for index in batch.indices) == list(range(N))
        machines = np.array_split(np.array(parts, dtype=object), 2)
        read = [[index for batch in machine.flat for index in batch.indices] for machine in machines]
        own.add(tuple(tuple(np.unique(shards[indices]).tolist()) for indices in read))
    assert own == {((0, 2, 4), (1, 3, 5))}


@law
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4), pairs=st.integers(4, 9))
def test_woven_order_has_every_image_once_and_equal_parts_until_one_order_ends(lengths, pairs) -> None:
    ends = np.cumsum([0, *lengths])
    orders = [np.arange(first, last) for first, last in itertools.pairwise(ends)]
    order = woven(orders, 2 * pairs)
    assert sorted(order.tolist()) == list(range(ends[-1]))
    cuts = even_cuts(2 * pairs, len(orders))
    whole = min(length // (b - a) for length, (a, b) in zip(lengths, itertools.pairwise(cuts), strict=True))
    for batch in order[: whole * 2 * pairs].reshape(whole, 2 * pairs):
        for number, (a, b) in enumerate(itertools.pairwise(cuts)):
            assert all(ends[number] <= index < ends[number + 1] for index in batch[a:b])


@pytest.mark.parametrize(("count", "parts", "sizes"), [(13, 3, [4, 4, 5]), (3, 4, [2, 1]), (0, 2, [0])])
def test_batch_is_split_at_even_places_into_parts_with_images(images, count, parts, sizes) -> None:
    (batch,) = Loader(images, FIT, 13, workers=0).epoch()
    batch = Batch(batch.pixels[:count], batch.targets[:count], batch.indices[:count], 20)
    split = batch.split(parts)
    assert [len(part.targets) for part in split] == sizes
    assert torch.equal(torch.cat([part.pixels for part in split]), batch.pixels)
    assert torch.equal(torch.cat([part.targets for part in split]), batch.targets)
    assert {part.planned for part in split} == {20}


@pytest.mark.parametrize("memory_budget", [2**30, 0])
@pytest.mark.parametrize("batch_size", [6, 5])
def test_repeats_are_copies_of_an_image_in_one_batch(images, batch_size, memory_budget) -> None:
    kinds = {"seed": 1, "workers": 0, "memory_budget": memory_budget}
    loader = Loader(images, FIT, batch_size, repeats=3, **kinds)
    batches = list(loader.epoch(2))
    assert [len(batch.targets) for batch in batches] == [
        len(batch.targets) for batch in Loader(images, FIT, batch_size, **kinds).epoch(2)
    ]
    seen = np.concatenate([batch.indices for batch in batches])
    assert len(set(seen.tolist())) == len(seen) == 13  # no draw comes twice
    kept, counts = np.unique(seen % 13, return_counts=True)
    assert kept.tolist() == sorted(epoch_order(1, 2, 13)[:5])  # a third of the images, rounded up
    assert sorted(counts) == [1, 3, 3, 3, 3]
    for batch in batches:
        copies = np.unique(batch.indices % 13, return_counts=True)[1]
        assert (copies < 3).sum() <= 2  # only the first and the last may be cut by the batch
        for pixels, label, index in zip(batch.pixels, batch.targets, batch.indices % 13, strict=True):
            np.testing.assert_array_equal(pixels.numpy(), FIT.pixels(images.sources[index]))
            assert label == images.labels[index]
    assert_same(list(loader.epoch(2, start=1)), batches[1:])


def test_every_copy_of_a_streamed_image_has_its_own_crop(images: ImageSet) -> None:
    kinds = {"seed": 3, "memory_budget": 0, "crop_scale": 0.1, "repeats": 3}
    alone = Loader(images, FIT, 6, workers=0, **kinds)
    batches = list(alone.epoch(1))
    assert_same(list(Loader(images, FIT, 6, workers=2, **kinds).epoch(1)), batches)
    first = batches[0]
    same = first.indices % 13 == first.indices[0] % 13
    assert same.sum() == 3
    assert len({pixels.numpy().tobytes() for pixels in first.pixels[torch.from_numpy(same)]}) == 3


def harm(kind: str, folder: Path) -> Path:
    """Write a file that is no longer a picture."""
    path = write_picture(folder / f"{kind}.jpg", size=(64, 64))
    content = {"empty": b"", "truncated": path.read_bytes()[:900], "text": b"not a picture"}
    path.write_bytes(bomb(14_000) if kind == "bomb" else content[kind])
    return path


@pytest.mark.parametrize(
    ("memory_budget", "workers", "crop_scale"), [(2**30, 0, 1.0), (0, 0, 0.5), (0, 3, 1.0)]
)
def test_every_kind_of_broken_file_is_left_out_and_named(
    tmp_path: Path, memory_budget: int, workers: int, crop_scale: float
) -> None:
    whole = arrays(40)
    harmed = {7: "empty", 8: "truncated", 20: "text", 39: "bomb"}
    sources = [harm(harmed[i], tmp_path) if i in harmed else s for i, s in enumerate(whole.sources)]
    data = dataclasses.replace(whole, sources=sources)
    kinds = {"workers": workers, "memory_budget": memory_budget, "crop_scale": crop_scale}
    loader = Loader(data, FIT, 8, seed=0, **kinds)
    batches = list(loader.epoch())
    assert sorted(i for batch in batches for i in batch.indices) == sorted(set(range(40)) - set(harmed))
    assert sorted(map(Path, loader.faults.reasons)) == sorted(sources[index] for index in harmed)
    for name, reason in {
        "bomb.jpg": "bomb",
        "text.jpg": "not a picture",
        "truncated.jpg": "truncated",
    }.items():
        assert reason in loader.faults.reasons[str(tmp_path / name)]
    assert len(Loader(data, FIT, 8, seed=0, **kinds).faults.reasons) == (4 if memory_budget else 0)
    assert_same(list(loader.epoch(0, start=2)), batches[2:])  # a resumed epoch leaves out the same
    sources[0] = harm("text", tmp_path)  # a fifth broken file, under another name
    sources[0] = sources[0].rename(tmp_path / "fifth.jpg")
    with pytest.raises(UserError, match="more than 10% of 40 images"):
        list(Loader(data, FIT, 8, seed=0, **kinds).epoch())


@pytest.mark.parametrize(
    ("options", "workers"), [({}, 2), ({"repeats": 2}, 0), ({"balanced": True}, 0), ({"part": (1, 2)}, 0)]
)
def test_images_that_stay_on_the_device_make_the_batches_of_those_that_are_read_again(
    images: ImageSet, tmp_path: Path, options: dict[str, Any], workers: int
) -> None:
    data, broken = break_some(images, [5], tmp_path)
    kinds = {"seed": 1, "workers": workers, "memory_budget": 0, **options}
    streamed, kept = Loader(data, FIT, 4, **kinds), Loader(data, FIT, 4, room=2**20, **kinds)
    assert (streamed.kept_bytes, kept.kept_bytes) == (0, 13 * 3 * 4 * 4)
    for epoch in range(3):
        assert_same(list(kept.epoch(epoch)), list(streamed.epoch(epoch)))
    assert list(kept.faults.reasons) == list(streamed.faults.reasons) == [str(broken[0])]


def test_images_that_stay_on_the_device_are_read_once(images, tmp_path, reads) -> None:
    data, _ = break_some(images, [5], tmp_path)
    loader = Loader(data, FIT, 4, seed=0, workers=0, memory_budget=0, room=2**20)
    next(loader.epoch(0))  # interrupted
    for epoch in range(3):
        list(loader.epoch(epoch))
    assert sorted(map(str, reads)) == sorted(map(str, data.sources))


def images_of(labels: np.ndarray, K: int) -> ImageSet:
    return ImageSet("train", range(len(labels)), ClassIndices(labels, tuple(map(str, range(K)))))


@law
@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_classes_and_the_images_of_each_class_are_equally_often_in_an_epoch(counts, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    N, K = len(labels), len(counts)
    order = balanced_order(images_of(labels, K), np.arange(N), seed, epoch=3)
    assert len(order) == len(set(order.tolist())) == N  # repetitions have numbers of their own
    places = np.bincount(labels[order % N], minlength=K)
    assert places.max() - places.min() <= 1
    often = np.bincount(order % N, minlength=N)
    for label in range(K):
        of_class = often[labels == label]
        assert of_class.max() - of_class.min() <= 1
    for image in range(N):
        assert sorted(order[order % N == image] // N) == list(range(often[image]))


def test_places_that_do_not_divide_evenly_go_to_every_class_in_turn() -> None:
    """Five places for three classes."""
    images = images_of(np.array([0, 1, 2, 0, 0]), 3)
    among = np.arange(5)
    totals = sum(
        np.bincount(images.labels[balanced_order(images, among, 0, epoch) % 5], minlength=3)
        for epoch in range(600)
    )
    np.testing.assert_allclose(totals / 600, 5 / 3, atol=0.1)


def test_every_image_of_a_large_class_comes_in_some_epoch_and_orders_differ() -> None:
    images = images_of(np.repeat([0, 1], [90, 10]), 2)
    orders = [balanced_order(images, np.arange(100), 0, epoch) for epoch in range(20)]
    assert set(np.concatenate(orders) % 100) == set(range(100))
    assert all((one != other).any() for one, other in itertools.pairwise(orders))
    np.testing.assert_array_equal(orders[7], balanced_order(images, np.arange(100), 0, 7))
    assert (orders[7] != balanced_order(images, np.arange(100), 1, 7)).any()


def test_shards_are_read_forward_a_few_at_a_time() -> None:
    shards, N = np.repeat(np.arange(12, dtype=np.int32), 10), 120
    members = ShardMembers(
        tuple(map(str, range(12))), shards, np.arange(N), np.ones(N, np.int64), np.full(N, b"a")
    )
    labels = (np.arange(N) % 10 == 0).astype(np.int64)  # one image of the small class in each shard
    order = balanced_order(ImageSet("train", members, ClassIndices(labels, ("a", "b"))), np.arange(N), 0, 0)
    read = shards[order % N]
    last = {shard: max(np.flatnonzero(read == shard)) for shard in set(read)}
    first = {shard: min(np.flatnonzero(read == shard)) for shard in set(read)}
    for place in range(N):
        assert sum(first[shard] <= place <= last[shard] for shard in first) <= GROUP
    assert np.bincount(labels[order % N]).tolist() == [60, 60]
