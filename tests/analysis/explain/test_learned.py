"""Attention distance, position similarity, patch filters and feature colours, each against explicit sums."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.analysis.explain import MODELS
from tests.models import VARIANTS, random_images, small_model
from vitascope.analysis.explain import learned
from vitascope.analysis.explain.attention import AttentionStream, head_maps
from vitascope.analysis.explain.learned import (
    attention_distance,
    feature_colours,
    patch_filters,
    position_similarity,
    principal_components,
    uniform_distance,
)
from vitascope.analysis.explain.rollout import rollout
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.vit import VisionTransformer

# --- distance


SHAPES = [{}, {"image_size": (16, 48)}, {"image_size": (24, 32), "patch_size": (12, 4)}]

of_every_shape = pytest.mark.parametrize(
    ("options", "shape"),
    [*((options, SHAPES[1]) for options in MODELS.values()), *(({}, shape) for shape in SHAPES)],
)


def images_of(model: VisionTransformer, count: int = 2) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


def centres(config: ViTConfig) -> list[tuple[float, float]]:
    (height, width), (ph, pw), (sh, sw) = config.image_hw, config.patch_hw, config.patch_stride
    tops, lefts = range(0, height - ph + 1, sh), range(0, width - pw + 1, sw)
    return [
        (np.mean(range(top, top + ph)).item(), np.mean(range(left, left + pw)).item())
        for top in tops
        for left in lefts
    ]


def between(config: ViTConfig) -> np.ndarray:
    """Distances of all patches, (N, N)."""
    where = np.array(centres(config))
    return np.linalg.norm(where[:, None] - where[None], axis=-1)


def directly(model: VisionTransformer, images: Tensor) -> np.ndarray:
    """The reference: from the traced weights, in float64."""
    attention = model.trace(images, attention=True).attention
    P, apart = model.config.num_prefix_tokens, between(model.config)
    means = np.zeros((model.config.depth, model.config.num_heads))
    for layer, traced in enumerate(attention):
        weights = traced.detach().double().numpy()[:, :, P:, P:]  # (B, heads, N, N)
        reached = (weights * apart).sum(axis=-1) / weights.sum(axis=-1)
        means[layer] = reached.mean(axis=(0, 2))
    return means


@of_every_shape
def test_distance_is_the_mean_under_the_traced_weights(options, shape) -> None:
    model = small_model(**options, **shape)
    images = images_of(model)
    reached = attention_distance(model, images)
    assert reached.shape == (3, 2)
    assert reached.dtype == torch.float32
    assert not reached.requires_grad
    np.testing.assert_allclose(reached, directly(model, images), rtol=1e-5)
    assert uniform_distance(model, images) == pytest.approx(between(model.config).mean())


def test_images_have_equal_weight_in_any_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    images = images_of(model, 5)
    expected = attention_distance(model, images)
    T, runs = model.config.num_tokens, []
    run = learned.stream_attention

    def counting(model: VisionTransformer, chunk: Tensor, consume: Callable[[Tensor], None]) -> None:
        runs.append(len(chunk))
        run(model, chunk, consume)

    monkeypatch.setattr(learned, "stream_attention", counting)
    for at_once, sizes in ((1, [1] * 5), (2 * 2 * T * T, [2, 2, 1])):
        monkeypatch.setattr(learned, "_WEIGHTS_AT_ONCE", at_once)
        runs.clear()
        torch.testing.assert_close(attention_distance(model, images), expected)
        assert runs == sizes


def given_weights(monkeypatch: pytest.MonkeyPatch, weights: Tensor) -> None:
    """Replace the attention of every layer by `weights` (B, heads, T, T)."""

    def stub(model: VisionTransformer, images: Tensor, consume: Callable[[Tensor], None]) -> None:
        for _ in range(model.config.depth):
            consume(weights)

    monkeypatch.setattr(learned, "stream_attention", stub)


def test_patches_that_attend_to_no_patch_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(image_size=(8, 24))  # a class token, three patches 8 pixels apart
    weights = torch.zeros(1, 2, 4, 4)
    weights[:, :, :, 0] = 1  # all to the class token
    weights[0, 0, 1] = torch.tensor([0.5, 0.0, 0.0, 0.5])  # the first patch, half to the last
    weights[0, 0, 2] = torch.tensor([0.2, 0.2, 0.2, 0.4])
    given_weights(monkeypatch, weights)
    reached = attention_distance(model, images_of(model, 1))
    np.testing.assert_allclose(reached[:, 0], [(16 + 8 * 0.75) / 2] * 3, rtol=1e-6)
    assert reached[:, 1].isnan().all()


def test_weights_that_are_not_finite_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    weights = torch.full((2, 2, 17, 17), 1 / 17)
    weights[1, 1, 5, 6] = float("nan")
    given_weights(monkeypatch, weights)
    with pytest.raises(UserError, match="not finite"):
        attention_distance(model, images_of(model))


@pytest.mark.parametrize(
    "method",
    [attention_distance, head_maps, rollout, partial(rollout, fusion="max"), partial(rollout, discard=0.5)],
)
@pytest.mark.parametrize("attention", ["global", "window"])
def test_only_one_layer_of_weights_is_in_memory(method: Any, attention: str, monkeypatch) -> None:
    model = small_model(depth=5, attention=attention, window=2)
    seen: list[StorageWeakRef] = []
    hand_on = AttentionStream.keep_attention

    def watched(stream: AttentionStream, weights: Tensor) -> None:
        assert all(reference.expired() for reference in seen)
        seen.append(StorageWeakRef(weights.untyped_storage()))
        hand_on(stream, weights)

    monkeypatch.setattr(AttentionStream, "keep_attention", watched)
    method(model, images_of(model))
    assert len(seen) == 5


# --- positions


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


def places(model: VisionTransformer) -> np.ndarray:
    """The position embeddings of the patches, read by adding them to zeros: float64 (gh, gw, D)."""
    config = model.config
    nothing = torch.zeros(1, config.num_tokens, config.embed_dim)
    added = model.positions(nothing, config.grid)[0, config.num_prefix_tokens :]
    return added.detach().double().numpy().reshape(*config.grid, config.embed_dim)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        *((options, SHAPES[1]) for options in KINDS.values()),
        *(({}, shape) for shape in (*SHAPES, {"image_size": (40, 8)})),
    ],
)
def test_similarity_is_the_cosine_of_position_embeddings(options, shape) -> None:
    model = small_model(**options, **shape)
    gh, gw = model.config.grid
    similarity = position_similarity(model)
    assert similarity.shape == (gh, gw, gh, gw)
    assert similarity.dtype == torch.float32
    assert not similarity.requires_grad
    added = places(model)
    unit = added / np.linalg.norm(added, axis=-1, keepdims=True)
    expected = np.einsum("ijd,kmd->ijkm", unit, unit)
    np.testing.assert_allclose(similarity, expected, atol=1e-6)
    assert similarity.abs().max() <= 1


def test_zero_embedding_has_zero_similarity() -> None:
    model = small_model(pool="mean", image_size=(8, 24))
    weight = model.get_parameter("positions.weight")
    with torch.no_grad():
        weight[0, 1] = 0
    similarity = position_similarity(model)
    assert torch.equal(similarity[0, 1], torch.zeros(1, 3))
    assert similarity[0, 0, 0, 0].item() == pytest.approx(1)


@pytest.mark.parametrize("positions", ["none", "relative", "rotary"])
def test_positions_that_add_nothing_are_rejected(positions: str) -> None:
    with pytest.raises(UserError, match=f"'{positions}' add nothing.*no position embeddings to compare"):
        position_similarity(small_model(positions=positions))


# --- filters


FILTERS_STEMS: dict[str, dict[str, Any]] = {
    "conv": {},
    "overlap": {"stem": "overlap"},
    "oblong": {"patch_size": (8, 4)},
    "grey": {"in_channels": 1, "patch_bias": False},
    "more filters than pixels": {"patch_size": 2, "in_channels": 1},
    "five colours": {"in_channels": 5},
}


@pytest.mark.parametrize(
    ("options", "count"),
    [
        *((options, 4) for options in FILTERS_STEMS.values()),
        *((FILTERS_STEMS["more filters than pixels"], count) for count in (1, 28)),
        *(({}, count) for count in (1, 28)),
    ],
)
def test_components_are_the_directions_in_which_filters_differ_most(options, count) -> None:
    model = small_model(**options)
    weight = model.patch_embedding.weight.detach().double().numpy()  # (D, C, ph, pw)
    D, C, ph, pw = weight.shape
    filters = patch_filters(model, count)

    k = min(count, D - 1, C * ph * pw)  # subtracting the mean removes one
    assert filters.components.shape == (k, C, ph, pw)
    assert filters.shares.shape == (k,)
    assert filters.components.dtype == filters.shares.dtype == torch.float32
    assert not filters.components.requires_grad
    centred = (weight - weight.mean(axis=0)).reshape(D, -1)
    _, strengths, directions = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(filters.shares, (strengths**2 / (strengths**2).sum())[:k], rtol=1e-4)
    for component, direction in zip(filters.components.flatten(1).numpy(), directions, strict=False):
        assert abs(component @ direction) == pytest.approx(1, abs=1e-4)
        assert component[np.abs(component).argmax()] > 0
    if k < count:
        assert filters.shares.sum().item() == pytest.approx(1)


def test_stems_that_do_not_embed_pixels_are_rejected() -> None:
    for stem in ("resnet", "tokenizer"):
        with pytest.raises(UserError, match=f"the stem '{stem}' embeds patches of a feature map"):
            patch_filters(small_model(**VARIANTS[stem]))


# --- features


def directly_of_features(model: VisionTransformer, images: Tensor, layer: int) -> np.ndarray:
    """The reference: from a trace, in float64, component by component."""
    trace = model.trace(images)
    tokens = model.norm(trace[f"block{layer % model.config.depth}"])[:, model.config.num_prefix_tokens :]
    features = tokens.detach().double().numpy().reshape(-1, model.config.embed_dim)
    features = features - features.mean(axis=0)
    _, _, components = np.linalg.svd(features, full_matrices=False)
    colours = np.empty((len(features), 3))
    for channel in range(3):
        component = components[channel]
        if component[np.abs(component).argmax()] < 0:
            component = -component
        score = features @ component
        colours[:, channel] = np.clip(0.5 + score / (4 * score.std()), 0, 1)
    return colours.reshape(len(images), *model.config.grid, 3)


@of_every_shape
def test_colours_are_the_scores_of_the_first_three_components(options, shape) -> None:
    model = small_model(**options, **shape)
    images = images_of(model, 3)
    for layer in (0, -1) if shape else (1, -3):
        colours = feature_colours(model, images, layer)
        assert (colours.shape, colours.dtype) == ((3, *model.config.grid, 3), torch.float32)
        assert not colours.requires_grad
        assert 0 <= colours.min() <= colours.max() <= 1
        np.testing.assert_allclose(colours, directly_of_features(model, images, layer), atol=1e-3)


# --- principal components, against NumPy's singular value decomposition


def by_svd(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    _, strengths, components = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
    signs = [np.sign(row[np.abs(row).argmax()]) for row in components]
    return (components * np.array(signs)[:, None])[:count], (strengths**2 / (strengths**2).sum())[:count]


def test_components_equal_the_singular_value_decomposition() -> None:
    for shape, count in itertools.product([(40, 6), (6, 40), (9, 9), (2, 5)], [1, 3]):
        values = random_images(1, 1, *shape)[0, 0] * torch.linspace(1, 3, shape[1]) + 5
        components, shares = principal_components(values, count)
        expected, expected_shares = by_svd(values.double().numpy(), min(count, shape[0] - 1))
        np.testing.assert_allclose(components, expected, atol=1e-6)
        np.testing.assert_allclose(shares, expected_shares, atol=1e-9)
        assert components.dtype == torch.float64


def test_directions_without_variance_are_no_components_and_values_are_finite() -> None:
    for shape in ((30, 7), (7, 30)):
        left, right = random_images(1, 1, shape[0], 2)[0, 0], random_images(1, 1, 2, shape[1])[0, 0]
        assert len(principal_components(left @ right + 1000, 5)[0]) == 2
        for value in (0.1, 0.0):
            assert len(principal_components(torch.full(shape, value), 5)[0]) == 0
    for value in (float("nan"), float("inf")):
        with pytest.raises(UserError):
            principal_components(torch.tensor([[1.0, 2.0], [value, 0.0]]), 1)
