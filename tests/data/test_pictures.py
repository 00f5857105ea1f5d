from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch

from tests.data import noise
from tests.models import small_model
from vitascope.data.pictures import stream
from vitascope.data.reading import ImageReader
from vitascope.models.engines.engine import TorchEngine, in_order

BATCH = 4


class OwnPixels(TorchEngine):
    """Pictures keep their size, as those of an exported model that crops them."""

    own_pixels = True

    def pixels(self, image: np.ndarray) -> np.ndarray:
        if image.shape[-1] == 1:
            self.preprocess.pixels("nowhere.png")  # cannot be read
        return np.moveaxis(image, 2, 0)


def batches(count: int) -> Iterator[np.ndarray]:
    return iter(np.split(np.arange(count), range(BATCH, count, BATCH))) if count else iter(())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 16])
def test_pixels_are_those_of_each_picture_and_faults_name_the_others(count: int, workers: int) -> None:
    engine = TorchEngine(small_model(), precision="fp32", device="cpu")
    sources = [noise(40, 32, seed=number) if number % 5 != 1 else f"{number}.png" for number in range(count)]
    reader, seen = ImageReader(sources, engine.preprocess), []
    for batch in stream(engine, reader, batches(count), BATCH, workers):
        readable = batch.items[batch.readable].tolist()
        pixels = [stack.clone() for _, stack in batch.stacks]
        wanted = [torch.from_numpy(engine.pixels(sources[index])) for index in readable]
        assert [len(stack) for stack in pixels] == ([len(readable)] if readable else [])
        assert all(torch.equal(one, two) for one, two in zip(chain(*pixels), wanted, strict=True))
        missing = {place for place, index in enumerate(batch.items.tolist()) if index % 5 == 1}
        assert {place for place, reason in batch.faults.items() if "no such file" in reason} == missing
        seen += batch.items.tolist()
    assert seen == list(range(count))


def test_what_is_computed_of_pictures_of_several_sizes_is_in_their_order() -> None:
    engine = OwnPixels(small_model(), precision="fp32", device="cpu")
    sides = [30, 20, 30, 1, 40, 20]
    sources = [np.full((side, side, 3 if side > 1 else 1), side, np.uint8) for side in sides]
    (batch,) = stream(engine, ImageReader(sources, engine.preprocess), [np.arange(len(sides))], len(sides))
    assert sorted(len(stack) for _, stack in batch.stacks) == [1, 2, 2]
    (sizes,) = in_order(batch.stacks, [[stack.float().mean(dim=(1, 2, 3))] for _, stack in batch.stacks])
    assert sizes.tolist() == [side for side in sides if side > 1]
    assert list(batch.faults) == [3]
