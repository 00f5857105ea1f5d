import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.option import check_cost
from tests.models import (
    by_loops,
    count_parameters,
    law,
    law_of_models,
    named_on_meta,
    small_config,
    valid_configs,
)
from vitascope.models.config import ViTConfig
from vitascope.models.sizes import list_models, named_config


@law_of_models
@given(valid_configs())
def test_cost_of_any_configuration_is_that_of_the_built_model(config: ViTConfig) -> None:
    check_cost(config)


@pytest.mark.parametrize("name", list_models())
def test_num_parameters_of_every_named_size_is_the_count_of_the_built_model(name: str) -> None:
    assert named_config(name).num_parameters == count_parameters(named_on_meta(name))


@law
@given(
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    registers=st.integers(0, 2),
    attention=st.sampled_from(["global", "window"]),
)
def test_attended_pairs_are_those_that_the_mask_allows(
    counts: tuple[int, int], window: tuple[int, int], registers: int, attention: str
) -> None:
    grid = (counts[0] * window[0], counts[1] * window[1])
    sizes = {"image_size": (8 * grid[0], 8 * grid[1]), "attention": attention, "window": window}
    config = small_config(pool="mean", num_registers=registers, **sizes)
    mask = by_loops.may_attend(grid, window if attention == "window" else grid, registers)
    assert config.attended_pairs() == mask.sum()


def test_the_largest_dinov3_has_the_published_number_of_parameters() -> None:
    assert round(named_config("dinov3_7b16").num_parameters / 1e9, 3) == 6.716


def test_the_cost_is_computed_without_importing_torch() -> None:
    code = (
        "import sys; from vitascope.models.sizes import named_config\n"
        "for name in ('vit_r50_l32', 'resnet50'):\n"
        "    config = named_config(name); config.num_parameters, config.flops, config.summary\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
