"""A GPU that computes nothing, for tests of what this process sends to it, and what it would wait for.

Its tensors are on torch's device "meta", so they have shapes and no numbers. `WaitError` is raised where a
number is read, or a shape that depends on one; also for a copy that a GPU could not make while this process
goes on: from or to memory that is not page-locked, or without `non_blocking`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vitascope.models.engines import engine, transfer

GPU = torch.device("meta")
aten = torch.ops.aten
READING = {
    *(aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default),
    *(
        aten.masked_select.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
    ),
    *(aten.repeat_interleave.Tensor, aten.bincount.default, aten.histc.default),
}
"""Operations whose result, or its shape, this process has to know."""
FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, Tensor.new_tensor}
"""From Python's numbers: a copy from memory that is not page-locked."""


class WaitError(Exception):
    """This process would wait for the GPU."""


class Stream:
    """A stream that keeps no order, but writes down who waits for whom."""

    def __init__(self, gpu: PretendedGPU, name: str) -> None:
        self.gpu, self.name, self.recorded = gpu, name, 0

    def wait_stream(self, other: Stream) -> None:
        self.gpu.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.gpu.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.recorded += 1
        return Event(self.gpu, f"{self.name} {self.recorded}")


class Event:
    """A point in a stream, by the stream's name and a number from 1."""

    def __init__(self, gpu: PretendedGPU, name: str) -> None:
        self.gpu, self.name = gpu, name

    def synchronize(self) -> None:
        self.gpu.log.append(f"process waits for {self.name}")


class _FromNumbers(TorchFunctionMode):
    """Raises for Python's numbers that become tensors on the GPU, which the dispatcher does not see."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function in FROM_NUMBERS and on_gpu(made) and (len(args) > 1 or not on_gpu(args[0])):
            raise WaitError(f"{function.__name__} copies from memory that is not page-locked")
        if function in (Tensor.__getitem__, Tensor.__setitem__) and on_gpu(args[0]):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(index, list) for index in indices):
                raise WaitError("a list of indices is copied from memory that is not page-locked")
        return made


class PretendedGPU(TorchDispatchMode):
    """Operations on the GPU; `log` has what streams and events were asked for, and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.default, self.streams = Stream(self, "main"), 0
        self.current = self.default
        self._watches = False
        self._pinned: dict[int, Tensor] = {}  # by address; kept, so that none is used twice

    def new_stream(self, device: torch.device) -> Stream:
        self.streams += 1
        return Stream(self, f"side{self.streams}")

    @contextlib.contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self._watches = True
        try:
            with _FromNumbers():
                yield
        finally:
            self._watches = False

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def pinned(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with self:  # operations of inference tensors come here before they are taken apart
            parts = operation.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if operation is aten._pin_memory.default:
            return self.pinned(args[0].clone())
        if kwargs.pop("pin_memory", None):
            return self.pinned(operation(*args, **kwargs))
        if self._watches:
            self._check(operation, args)
        if operation is aten._to_copy.default:
            target = torch.device(kwargs.get("device") or args[0].device)
            return self._copied(operation, args[0], target, kwargs.get("non_blocking", False), args, kwargs)
        if operation is aten.copy_.default:
            late = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            return self._copied(operation, args[1], args[0].device, late, args, kwargs)
        return operation(*args, **kwargs)

    def _check(self, operation: Any, args: Any) -> None:
        if operation in READING and any(map(on_gpu, args)):
            raise WaitError(f"{operation} needs numbers of the GPU")
        if operation in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default) and on_gpu(
            args[0]
        ):
            indices = [index for index in args[1] if index is not None]
            filled = operation is not aten.index.Tensor and args[2].numel() == 1
            if any(index.dtype == torch.bool for index in indices) and not filled:
                raise WaitError(f"{operation} counts the true values of a mask")
            if not all(map(on_gpu, indices)):
                raise WaitError(f"{operation} copies indices from memory that is not page-locked")

    def _copied(
        self, operation: Any, source: Tensor, target: torch.device, late: bool, args: Any, kwargs: Any
    ) -> Any:
        if source.device == target:
            return operation(*args, **kwargs)
        to_gpu = target == GPU
        if self._watches and not late:
            raise WaitError(f"a copy {'to' if to_gpu else 'from'} the GPU that this process waits for")
        if self._watches and to_gpu and not self.is_pinned(source):
            raise WaitError("a copy from memory that is not page-locked")
        self.log.append(f"copy {'to' if to_gpu else 'from'} the GPU in {self.current.name}")
        if to_gpu:
            return operation(*args, **kwargs)
        if operation is aten.copy_.default:
            if self._watches and not self.is_pinned(args[0]):
                raise WaitError("a copy to memory that is not page-locked")
            return args[0]
        return self.pinned(torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype))


def on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.device == GPU


@contextlib.contextmanager
def pretended_gpu() -> Iterator[PretendedGPU]:
    """Within the context, the device `GPU` computes while this process goes on.

    In `gpu.watched()`, to wait for it is an error.
    """
    gpu = PretendedGPU()

    def used_in(tensor: Tensor, stream: Stream) -> None:
        gpu.log.append(f"memory is used in {stream.name}")

    with pytest.MonkeyPatch.context() as patch:
        for module in (transfer, engine):
            patch.setattr(module, "is_asynchronous", lambda device: device == GPU)
        patch.setattr(torch.cuda, "Stream", gpu.new_stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: gpu.current)
        patch.setattr(torch.cuda, "stream", gpu.within)
        patch.setattr(Tensor, "record_stream", used_in)
        # Meta tensors have no autocast, and no fused optimizer of their own.
        patch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
        patch.setattr(
            importlib.import_module("torch.optim.optimizer"),
            "_get_fused_kernels_supported_devices",
            lambda: [GPU.type],
        )
        transfer._copying.cache_clear()
        with gpu:
            yield gpu
        transfer._copying.cache_clear()
