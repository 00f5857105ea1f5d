import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models import (
    VARIANTS,
    by_loops,
    count_parameters,
    law,
    named_on_meta,
    on_meta,
    small_config,
    valid_configs,
)
from vitascope.models.config import ViTConfig
from vitascope.models.sizes import list_models, named_config

# Millions of parameters at 224 px with 1000 classes, as published and as timm and torchvision count them.

# torchvision's, to the last one.


def counted_multiply_adds(config: ViTConfig) -> float:
    """Multiply-adds of the matrix products and convolutions in one image's trace: all tokens, all blocks."""
    model = on_meta(config).eval()
    images = torch.empty(1, config.in_channels, *config.image_hw, device="meta")
    # Not every counter knows the fused kernels; the reference kernel consists of products that it counts.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.trace(images)
    return counter.get_total_flops() / 2


@law
@given(valid_configs())
def test_num_parameters_is_the_count_of_the_built_model(config: ViTConfig) -> None:
    assert config.num_parameters == count_parameters(on_meta(config))


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_num_parameters_of_every_option_is_the_count_of_the_built_model(options: dict[str, Any]) -> None:
    config = small_config(**options)
    assert config.num_parameters == count_parameters(on_meta(config))


@pytest.mark.parametrize("name", list_models())
def test_num_parameters_of_every_named_size_is_the_count_of_the_built_model(name: str) -> None:
    assert named_config(name).num_parameters == count_parameters(named_on_meta(name))


@law
@given(valid_configs())
def test_flops_are_those_of_the_executed_matrix_products(config: ViTConfig) -> None:
    assert config.flops == 2 * counted_multiply_adds(config)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_flops_of_every_option_are_those_of_the_executed_matrix_products(options: dict[str, Any]) -> None:
    config = small_config(image_size=(32, 48), **options)
    assert config.flops == 2 * counted_multiply_adds(config)


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


def test_local_attention_grows_slower_than_the_square_of_the_patches() -> None:
    def growth(attention: str) -> float:
        small, large = (
            small_config(image_size=side, attention=attention, window=2, pool="mean").attended_pairs()
            for side in (32, 64)  # 4 times as many patches
        )
        return math.log(large / small, 4)

    assert growth("global") == pytest.approx(2)
    assert growth("axial") == pytest.approx(1.5)
    assert growth("window") == pytest.approx(1)


def test_the_largest_dinov3_has_the_published_number_of_parameters() -> None:
    assert round(named_config("dinov3_7b16").num_parameters / 1e9, 3) == 6.716


def test_a_swiglu_of_two_thirds_the_width_costs_as_much_as_the_mlp() -> None:
    plain, gated = small_config(embed_dim=48), small_config(embed_dim=48, mlp="swiglu", mlp_ratio=8 / 3)
    assert gated.flops == plain.flops


def test_the_cost_is_computed_without_importing_torch() -> None:
    code = (
        "import sys; from vitascope.models.sizes import named_config\n"
        "for name in ('vit_r50_l32', 'resnet50'):\n"
        "    config = named_config(name); config.num_parameters, config.flops, config.summary\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
