"""Fixtures for the tests of the server."""

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from tests.deploy.server.served import DecodersInThreads, torch_engine
from vitascope.models.engines.engine import TorchEngine


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return torch_engine()


@pytest.fixture(scope="module", autouse=True)
def decode_in_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith("test_decoder_pool"):
            patch.setattr("vitascope.deploy.server.service.DecoderPool", DecodersInThreads)
        yield
