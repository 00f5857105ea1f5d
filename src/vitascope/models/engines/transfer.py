"""Copies to a device and from it, from page-locked memory, while the device computes.

A CPU computes where its arrays are: there nothing is copied ahead, and no result comes late.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

S = TypeVar("S")


def is_asynchronous(device: torch.device) -> bool:
    """Whether a device computes and copies while this process goes on."""
    return device.type == "cuda"


def to_device(values: npt.NDArray[Any] | Tensor, device: torch.device, *, reused: bool = False) -> Tensor:
    """Values of this process on a device; a GPU copies them from page-locked memory while it computes.

    On a CPU they share the memory of `values`, unless these are `reused` for others afterwards.
    """
    host = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if host.device.type != "cpu" or not is_asynchronous(device):
        return host.to(device, copy=reused)
    return torch.empty_like(host, pin_memory=True).copy_(host).to(device, non_blocking=True)


def copied_ahead(
    items: Iterable[S], send: Callable[[S], tuple[Tensor, ...]], device: torch.device
) -> Iterator[tuple[S, tuple[Tensor, ...]]]:
    """Each item with its tensors on a device, which `send` puts there without waiting.

    A GPU receives those of the next item, in a stream of its own, while the caller uses these. An item may be
    overwritten when the next one is taken.
    """
    if not is_asynchronous(device):
        for item in items:
            yield item, send(item)
        return
    side = _copying(device)
    side.wait_stream(torch.cuda.current_stream(device))  # for tensors on the device that `send` reads
    before: tuple[S, tuple[Tensor, ...], torch.cuda.Event] | None = None
    try:
        for item in items:
            with torch.cuda.stream(side):
                now = item, send(item), side.record_event()
            if before is not None:
                yield _received(*before, device)
            before = now
        if before is not None:
            yield _received(*before, device)
    finally:  # a caller that ends early may free what `send` reads and writes on the device
        torch.cuda.current_stream(device).wait_stream(side)


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device's copies: one, because freed memory stays with the stream that it was of."""
    return torch.cuda.Stream(device)


def _received(
    item: S, tensors: tuple[Tensor, ...], copied: torch.cuda.Event, device: torch.device
) -> tuple[S, tuple[Tensor, ...]]:
    """An item whose tensors the caller's stream may use: it waits for their copy, and not for later ones."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    for tensor in tensors:
        tensor.record_stream(stream)  # else its memory would be used again while this stream reads it
    return item, tensors


class Fetched:
    """Tensors of one device on the way to this process; `late`, if it would have to wait for them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        device = tensors[0].device if tensors else torch.device("cpu")
        self.late = is_asynchronous(device)
        self._tensors = [tensor.to("cpu", non_blocking=self.late) for tensor in tensors]
        self._arrived = torch.cuda.current_stream(device).record_event() if self.late else None

    def wait(self) -> list[Tensor]:
        """The tensors on the CPU, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._tensors


def one_late(started: Iterable[S], device: torch.device) -> Iterator[S]:
    """What was started on a device, each once the next is started: the device has work while one is read."""
    if not is_asynchronous(device):
        yield from started
        return
    before: list[S] = []
    for now in started:
        yield from before
        before = [now]
    yield from before
