from importlib.util import find_spec

import pytest

PARQUET = pytest.param(
    ".parquet", marks=pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")
)
"""The suffix of Parquet, for `parametrize`."""
