"""Copies to a device and from it: their order on a GPU that computes meanwhile, and their values on a CPU."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pretended_gpu import GPU, PretendedGPU, pretended_gpu
from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices
from vitascope.models.engines.transfer import Fetched, copied_ahead, one_late, to_device
from vitascope.models.preprocess import Preprocess

CPU = torch.device("cpu")


@pytest.fixture
def gpu() -> Iterator[PretendedGPU]:
    with pretended_gpu() as gpu:
        yield gpu


def sent(number: int, device: torch.device) -> tuple[Tensor]:
    return (to_device(np.full(2, number), device),)


def test_the_next_batch_is_copied_while_one_is_computed(gpu: PretendedGPU) -> None:
    def read() -> Iterator[int]:
        for number in range(3):
            gpu.log.append(f"read {number}")
            yield number

    with gpu.watched():
        for number, _ in copied_ahead(read(), lambda number: sent(number, GPU), GPU):
            gpu.log.append(f"step {number}")
    copied = "copy to the GPU in side1"
    assert gpu.log == [
        "side1 waits for main",
        *("read 0", copied),
        *("read 1", copied, "main waits for side1 1", "memory is used in main", "step 0"),
        *("read 2", copied, "main waits for side1 2", "memory is used in main", "step 1"),
        *("main waits for side1 3", "memory is used in main", "step 2", "main waits for side1"),
    ]


@pytest.mark.parametrize("memory_budget", [2**30, 0])
def test_a_loader_does_not_wait_for_its_device(gpu: PretendedGPU, memory_budget: int) -> None:
    sources = list(np.zeros((6, 4, 4, 3), np.uint8))
    images = ImageSet("train", sources, ClassIndices(np.arange(6) % 2, ("a", "b")))
    options = {"seed": 0, "workers": 0, "memory_budget": memory_budget}
    loader = Loader(images, Preprocess(image_size=(4, 4)), 4, device=GPU, **options)
    gpu.log.clear()
    with gpu.watched():
        shapes = [(batch.pixels.shape, batch.targets.shape, batch.pixels.device) for batch in loader.epoch()]
    assert shapes == [((4, 3, 4, 4), (4,), GPU), ((2, 3, 4, 4), (2,), GPU)]
    assert gpu.log.count("copy to the GPU in side1") == 4
    assert gpu.log.count("memory is used in main") == 4


def test_on_a_cpu_nothing_is_read_ahead() -> None:
    log: list[str] = []
    numbers = (log.append(f"read {number}") or number for number in range(2))
    for number, (tensor,) in copied_ahead(numbers, lambda number: sent(number, CPU), CPU):
        log.append(f"step {number}")
        assert tensor.tolist() == [number, number]
    assert log == ["read 0", "step 0", "read 1", "step 1"]


def test_reused_memory_is_copied_on_a_cpu_and_other_memory_is_not() -> None:
    array = np.ones(2)
    shared, copied = to_device(array, CPU), to_device(array, CPU, reused=True)
    array[:] = 2
    assert (shared.tolist(), copied.tolist()) == ([2, 2], [1, 1])


def test_results_are_fetched_once_the_next_are_started(gpu: PretendedGPU) -> None:
    def started() -> Iterator[Fetched]:
        for number in range(3):
            gpu.log.append(f"start {number}")
            yield Fetched([torch.zeros(2, device=GPU)])

    with gpu.watched():
        for fetched in one_late(started(), GPU):
            assert fetched.wait()[0].device == CPU
    copied = "copy from the GPU in main"
    assert gpu.log == [
        *("start 0", copied, "start 1", copied, "process waits for main 1"),
        *("start 2", copied, "process waits for main 2", "process waits for main 3"),
    ]


def test_results_on_a_cpu_are_the_tensors_themselves_at_once() -> None:
    tensors, begun = [torch.ones(2)], []
    for number, fetched in enumerate(one_late((begun.append(0) or Fetched(tensors) for _ in range(2)), CPU)):
        assert fetched.wait()[0] is tensors[0]
        assert len(begun) == number + 1
