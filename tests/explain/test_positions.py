"""Which places have like position embeddings."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.model import small_model, small_resnet
from vitascope.errors import UserError
from vitascope.explain.learned import position_similarity
from vitascope.model.vit import VisionTransformer

KINDS: dict[str, dict[str, Any]] = {
    "learned": {},
    "learned, distilled, registers": {"distillation_token": True, "num_registers": 3},
    "learned, of patches only": {"position_prefix": False, "num_registers": 2},
    "learned, no prefix": {"pool": "mean"},
    "rows and columns": {"positions": "learned_2d", "num_registers": 1},
    "sincos 1d": {"positions": "sincos_1d"},
    "sincos 2d": {"positions": "sincos_2d", "distillation_token": True},
    "sincos 2d of big_vision": {"positions": "sincos_2d_big_vision"},
    "overlap": {"stem": "overlap"},
}
SHAPES = [
    {},
    {"image_size": (16, 48)},
    {"image_size": (40, 8)},
    {"image_size": (24, 32), "patch_size": (12, 4)},
]


def places(model: VisionTransformer) -> np.ndarray:
    """What the positions add to the patches, found by adding it to nothing: float64 (gh, gw, D)."""
    config = model.config
    nothing = torch.zeros(1, config.num_tokens, config.embed_dim)
    added = model.positions(nothing, config.grid)[0, config.num_prefix_tokens :]
    return added.detach().double().numpy().reshape(*config.grid, config.embed_dim)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_similarity_is_the_cosine_of_what_is_added_to_the_patches(
    options: dict[str, Any], shape: dict[str, Any]
) -> None:
    model = small_model(**options, **shape)
    gh, gw = model.config.grid
    similarity = position_similarity(model)
    assert similarity.shape == (gh, gw, gh, gw)
    assert similarity.dtype == torch.float32
    assert not similarity.requires_grad
    added = places(model)
    expected = np.empty((gh, gw, gh, gw))
    for i in range(gh):
        for j in range(gw):
            for k in range(gh):
                for m in range(gw):
                    one, other = added[i, j], added[k, m]
                    expected[i, j, k, m] = one @ other / np.sqrt((one @ one) * (other @ other))
    np.testing.assert_allclose(similarity, expected, atol=1e-6)
    assert similarity.abs().max() <= 1


def test_half_precision_model_has_float32_similarity() -> None:
    model = small_model()
    expected = position_similarity(model)
    similarity = position_similarity(model.to(torch.bfloat16))
    assert similarity.dtype == torch.float32
    torch.testing.assert_close(similarity, expected, atol=0.02, rtol=0)


def test_embedding_of_zeros_is_like_no_other() -> None:
    model = small_model(pool="mean", image_size=(8, 24))
    weight = model.get_parameter("positions.weight")
    with torch.no_grad():
        weight[0, 1] = 0
    similarity = position_similarity(model)
    assert torch.equal(similarity[0, 1], torch.zeros(1, 3))
    assert similarity[0, 0, 0, 0].item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("positions", "why"),
    [
        ("none", "no positions at all"),
        ("relative", "adds to the attention scores"),
        ("rotary", "turn queries and keys"),
    ],
)
def test_positions_that_add_nothing_are_refused_and_explained(positions: str, why: str) -> None:
    with pytest.raises(UserError, match=f"{why}.*no position embeddings to compare; .*learned"):
        position_similarity(small_model(positions=positions))


def test_a_resnet_is_refused() -> None:
    with pytest.raises(UserError, match="a ResNet has no position embeddings"):
        position_similarity(small_resnet())
