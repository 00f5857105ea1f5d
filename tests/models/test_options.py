"""Every option of the model keeps the promises of options."""

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.option import check_option
from tests.models import VARIANTS


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_option(options: dict[str, Any], tmp_path: Path) -> None:
    check_option(options, tmp_path)
