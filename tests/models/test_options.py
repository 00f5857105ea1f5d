"""Every option of the model keeps the promises of options, and trains as one compiled graph."""

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.graph_breaks import SOURCE, graph_breaks

from tests.contracts.option import check_option
from tests.models import VARIANTS, random_images, small_config, small_model
from vitascope.errors import UserError
from vitascope.models import attention


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_option(options: dict[str, Any], tmp_path: Path) -> None:
    check_option(options, tmp_path)


def accepted(options: dict[str, Any]) -> bool:
    try:
        small_config(**options)
    except UserError:
        return False
    return True


def combined() -> list[dict[str, Any]]:
    """All variants in few models, because tracing takes a second: each joins the first that it suits."""
    models: list[dict[str, Any]] = []
    for options in VARIANTS.values():
        for model in models:
            if all(model.get(name, value) == value for name, value in options.items()) and accepted(
                model | options
            ):
                model |= options
                break
        else:
            models.append({"depth": 2} | options)  # the last block computes the tokens that are read
    return models


@pytest.mark.filterwarnings("error:.*lru_cache")  # Dynamo warns of cached values
@pytest.mark.parametrize("options", combined(), ids=lambda options: f"{len(options)} options")
def test_options_train_in_one_graph(options: dict[str, Any]) -> None:
    model, images = small_model(**options).train(), random_images(2, 3, 32, 32)
    torch.compiler.reset()
    outputs = []
    try:
        for run in (torch.compile(model, fullgraph=True, backend="eager"), model):
            torch.manual_seed(0)
            outputs.append(run(images))
    except torch._dynamo.exc.Unsupported:
        pytest.fail("\n".join(graph_breaks(model, images)))
    torch.testing.assert_close(*outputs)


def test_a_graph_break_has_the_innermost_line_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "faster_by_matmul", lambda qkv: torch._dynamo.graph_break())
    lines = (SOURCE / "models" / "attention.py").read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if " faster_by_matmul(qkv):" in line)
    (reason,) = graph_breaks(small_model().train(), random_images(2, 3, 32, 32))
    assert reason.startswith(f"models/attention.py:{number}: ")
    torch.compiler.reset()
