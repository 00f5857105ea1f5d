"""What the tests of the server share."""

import pytest

from tests.deploy.server.served import torch_engine
from vitascope.deploy.engine import TorchEngine


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return torch_engine()
