"""Fixtures for the tests of the server."""

from collections.abc import Iterator

import pytest

from tests.deploy.server.served import DecodersInThreads, torch_engine
from vitascope.predict.engine import TorchEngine


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return torch_engine()


@pytest.fixture(scope="module", autouse=True)
def decode_in_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Decode in threads, except in the tests of decoding."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith("test_decoder_pool"):
            patch.setattr("vitascope.deploy.server.service.DecoderPool", DecodersInThreads)
        yield
