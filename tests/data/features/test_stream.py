import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data import noise, write_picture
from tests.models import law_of_models, small_model
from tests.pretended_gpu import GPU, pretended_gpu
from vitascope.data.features import stream as feature_stream
from vitascope.data.features.stream import FeatureStream
from vitascope.errors import UserError
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.compute import Compute
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.features import OWN, FeatureSpec

LAYERS = [OWN, FeatureSpec(0, "mean"), FeatureSpec(1, "cls_mean")]

pytestmark = pytest.mark.usefixtures("own_cache")


@functools.cache
def engine(**options: object) -> TorchEngine:
    return TorchEngine(small_model(**options), precision="fp32", device="cpu")


def pictures(count: int, start: int = 0) -> list[np.ndarray]:
    return [noise(32, 32, seed=start + number) for number in range(count)]


def stream(sources: list[ImageSource], specs: list[FeatureSpec] = LAYERS, **options: object) -> FeatureStream:
    return FeatureStream(engine(), specs, sources, Compute(**{"batch_size": 4, "workers": 0, **options}))


def collect(found: FeatureStream) -> tuple[np.ndarray, list[np.ndarray]]:
    parts = list(found)
    indices = np.concatenate([part.indices for part in parts])
    return indices, [np.concatenate(each) for each in zip(*(part.features for part in parts), strict=True)]


def in_batches(sources: list[np.ndarray], specs: list[FeatureSpec] = LAYERS) -> list[np.ndarray]:
    pixels = torch.from_numpy(np.stack([engine().pixels(source) for source in sources]))
    found = [engine().features(pixels[at : at + 4], specs) for at in range(0, len(pixels), 4)]
    return [torch.cat(each).numpy() for each in zip(*found, strict=True)]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_features_are_bitwise_those_of_the_model_in_the_same_batches(cache: bool, workers: int) -> None:
    sources = pictures(11)
    found = stream(sources, cache=cache, workers=workers)
    indices, features = collect(found)
    assert indices.tolist() == list(range(11))
    for mine, theirs in zip(features, in_batches(sources), strict=True):
        assert mine.dtype == np.float32
        assert np.array_equal(mine, theirs)
    assert (found.computed, found.faults.reasons) == (11, {})


def test_a_second_pass_computes_nothing_and_returns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_stream, "BLOCK", 3)
    _, first = collect(stream(pictures(11)))
    monkeypatch.setattr(TorchEngine, "_prepared", None)
    again = stream(pictures(11), workers=2)
    _, second = collect(again)
    assert again.computed == 0
    assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))


@law_of_models
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=20),
    st.sets(st.integers(0, 12)),
    st.sets(st.integers(0, 12), max_size=4),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_any_mixture_of_cached_missing_and_unreadable_images_comes_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    asked: list[int],
    cached: set[int],
    broken: set[int],
    batch_size: int,
    block: int,
) -> None:
    every = pictures(13)
    (alone,) = in_batches(every, [FeatureSpec(0, "mean")])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VITASCOPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patched.setattr(feature_stream, "BLOCK", block)
        specs = [FeatureSpec(0, "mean"), OWN]
        known = {number for number in cached if number % 2}
        for spec, numbers in zip(specs, (cached, known), strict=True):
            list(stream([every[number] for number in sorted(numbers)], [spec]))
        sources = [b"broken" if number in broken else every[number] for number in asked]
        found = stream(sources, specs, batch_size=batch_size)
        parts = list(found)
        assert all(len(part.indices) for part in parts)
        indices = [index for part in parts for index in part.indices.tolist()]
        readable = [place for place, number in enumerate(asked) if number not in broken]
        assert indices == readable
        assert sorted(found.faults.reasons) == [place for place in range(len(asked)) if place not in readable]
        for part in parts:
            wanted = alone[[asked[index] for index in part.indices.tolist()]]
            np.testing.assert_allclose(part.features[0], wanted, atol=1e-5)
        assert found.computed == sum(asked[place] not in known for place in readable)


def test_features_of_a_block_that_was_interrupted_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [*pictures(8), b"broken", *pictures(8, start=8)]
    compute, calls = TorchEngine.features, []

    def features(*args: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return compute(*args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(TorchEngine, "features", features)
        with pytest.raises(KeyboardInterrupt):
            list(stream(sources))
    again = stream(sources)
    _, whole = collect(again)
    assert again.computed == 1  # of the batch that was interrupted
    _, fresh = collect(stream(sources, cache=False))
    for mine, theirs in zip(whole, fresh, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_another_precision_or_body_has_features_of_its_own() -> None:
    collect(stream(pictures(4)))
    for other in (TorchEngine(engine().model, precision="bf16", device="cpu"), engine(norm_eps=1e-3)):
        found = FeatureStream(other, [OWN], pictures(4), Compute(batch_size=4, workers=0))
        collect(found)
        assert found.computed == 4


def test_features_that_are_not_finite_name_the_image_and_are_not_kept(tmp_path: Path) -> None:
    model = small_model()
    paths = [write_picture(tmp_path / f"{number}.png", size=(32, 32), seed=number) for number in range(3)]
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    sick = TorchEngine(model, precision="fp32", device="cpu")
    for _ in range(2):
        found = FeatureStream(sick, [OWN], paths, Compute(batch_size=2, workers=0))
        with pytest.raises(UserError, match=r"image 0, .*0\.png: its features .* are not finite in fp32"):
            list(found)


def test_no_cache_neither_reads_nor_writes(tmp_path: Path) -> None:
    collect(stream(pictures(3), cache=False))
    assert not (tmp_path / "cache").exists()
    collect(stream(pictures(3)))
    found = stream(pictures(3), cache=False)
    collect(found)
    assert found.computed == 3


def test_a_gpu_computes_a_batch_while_the_last_is_fetched() -> None:
    with pretended_gpu() as gpu:
        made = TorchEngine(small_model().to(GPU), precision="fp32", device=str(GPU))
        compute = Compute(batch_size=2, workers=0, cache=False)
        list(FeatureStream(made, [OWN], pictures(2), compute))  # moves constants to the device
        found = FeatureStream(made, [OWN], pictures(5), compute)
        gpu.log.clear()
        with gpu.watched():
            rows = list(found)
    assert [row.indices.tolist() for row in rows] == [[0, 1, 2, 3, 4]]
    seen = [entry for entry in gpu.log if entry.startswith(("copy", "process"))]
    copied, fetched = "copy to the GPU in side1", "copy from the GPU in main"
    assert seen == [
        *(copied, copied, fetched, copied, fetched, "process waits for main 2"),
        *(fetched, "process waits for main 3", "process waits for main 4"),
    ]
