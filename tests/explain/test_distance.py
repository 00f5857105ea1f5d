"""Mean attention distance against explicit sums, and what it is for attention that is known."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.explain import MODELS
from tests.model import VARIANTS, random_images, small_model, small_resnet
from vitascope.errors import UserError
from vitascope.explain import distance, heads
from vitascope.explain.attention import AttentionStream
from vitascope.explain.learned import attention_distance, uniform_distance
from vitascope.model.config import ViTConfig
from vitascope.model.vit import VisionTransformer

SHAPES = [{}, {"image_size": (16, 48)}, {"image_size": (24, 32), "patch_size": (12, 4)}]
STEMS = {name: VARIANTS[name] for name in ("resnet", "overlapping patches, stride 8x4", "linear stem")}

of_every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def images_of(model: VisionTransformer, count: int = 2) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


def centres(config: ViTConfig) -> list[tuple[float, float]]:
    """The mean row and column of each patch's pixels, patches row by row."""
    (height, width), (ph, pw), (sh, sw) = config.image_hw, config.patch_hw, config.patch_stride
    tops, lefts = range(0, height - ph + 1, sh), range(0, width - pw + 1, sw)
    return [
        (np.mean(range(top, top + ph)).item(), np.mean(range(left, left + pw)).item())
        for top in tops
        for left in lefts
    ]


def between(config: ViTConfig) -> np.ndarray:
    """Distances of all patches, (N, N)."""
    where = centres(config)
    return np.array([[np.hypot(y - v, x - u) for v, u in where] for y, x in where])


def directly(model: VisionTransformer, images: Tensor) -> np.ndarray:
    """The same from the traced weights, in float64, patch by patch."""
    attention = model.trace(images, attention=True).attention
    assert attention is not None
    P, apart = model.config.num_prefix_tokens, between(model.config)
    means = np.zeros((model.config.depth, model.config.num_heads))
    for layer, traced in enumerate(attention):
        weights = traced.detach().double().numpy()  # (B, heads, T, T)
        for head in range(weights.shape[1]):
            reached = []
            for image in range(len(weights)):
                for query in range(len(apart)):
                    row = weights[image, head, P + query, P:]
                    reached.append((row * apart[query]).sum() / row.sum())
            means[layer, head] = np.mean(reached)
    return means


def attending_to_all_alike(**options: Any) -> VisionTransformer:
    """A model whose scores are all zero."""
    model = small_model(**options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qkv" in name:
                parameter.zero_()
    return model


@of_every_model
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_distance_is_the_mean_under_the_traced_weights(
    options: dict[str, Any], shape: dict[str, Any]
) -> None:
    model = small_model(**options, **shape)
    images = images_of(model)
    reached = attention_distance(model, images)
    assert reached.shape == (3, 2)
    assert reached.dtype == torch.float32
    assert not reached.requires_grad
    np.testing.assert_allclose(reached, directly(model, images), rtol=1e-5)


@pytest.mark.parametrize("options", STEMS.values(), ids=STEMS)
def test_distance_is_in_pixels_whatever_the_stem(options: dict[str, Any]) -> None:
    model = small_model(**({"image_size": (16, 48)} | options))
    images = images_of(model)
    np.testing.assert_allclose(attention_distance(model, images), directly(model, images), rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"image_size": (16, 48)}, {"pool": "mean"}, {"distillation_token": True, "num_registers": 5}],
    ids=str,
)
@pytest.mark.parametrize("stem", [{}, *STEMS.values()], ids=["conv", *STEMS])
@pytest.mark.parametrize("attention", ["global", "axial"])
def test_attending_to_all_alike_has_the_mean_distance_of_all_pairs(
    options: dict[str, Any], stem: dict[str, Any], attention: str
) -> None:
    model = attending_to_all_alike(attention=attention, **options, **stem)
    images = images_of(model)
    reached = attention_distance(model, images)
    if attention == "global" or model.config.num_prefix_tokens == 0:
        expected = between(model.config).mean()
        np.testing.assert_allclose(reached, np.full((3, 2), expected), rtol=1e-5)
        assert uniform_distance(model, images) == pytest.approx(expected)
    else:  # by way of the prefix, rows and columns do not share alike
        np.testing.assert_allclose(reached, directly(model, images), rtol=1e-5)


@pytest.mark.parametrize("window", [1, 2, (1, 2), (2, 4)])
def test_attention_in_windows_reaches_no_further_than_the_window(window: Any) -> None:
    model = small_model(attention="window", window=window, num_registers=2)
    images = images_of(model)
    diagonal = np.hypot(*(8 * (side - 1) for side in model.config.window))
    assert (attention_distance(model, images) <= diagonal + 1e-4).all()
    alike = attending_to_all_alike(attention="window", window=window)
    inside = small_model(image_size=tuple(8 * side for side in model.config.window))
    expected = uniform_distance(inside, images_of(inside))
    np.testing.assert_allclose(attention_distance(alike, images), np.full((3, 2), expected), rtol=1e-5)


def test_distances_are_those_of_the_images_that_are_given() -> None:
    model = small_model()
    images = random_images(2, 3, 48, 16)
    reached = attention_distance(model, images)
    expected = uniform_distance(model, images)
    model.resize((48, 16))
    torch.testing.assert_close(attention_distance(model, images), reached)
    assert expected == pytest.approx(between(model.config).mean())


def test_images_weigh_the_same_however_many_are_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    images = images_of(model, 5)
    expected = attention_distance(model, images)
    T, runs = model.config.num_tokens, []
    run = distance.stream_attention

    def counting(model: VisionTransformer, chunk: Tensor, consume: Callable[[Tensor], None]) -> None:
        runs.append(len(chunk))
        run(model, chunk, consume)

    monkeypatch.setattr(distance, "stream_attention", counting)
    for at_once, sizes in ((1, [1] * 5), (2 * 2 * T * T, [2, 2, 1])):
        monkeypatch.setattr(distance, "_WEIGHTS_AT_ONCE", at_once)
        runs.clear()
        torch.testing.assert_close(attention_distance(model, images), expected)
        assert runs == sizes


def given_weights(monkeypatch: pytest.MonkeyPatch, weights: Tensor) -> None:
    """Let every layer attend as `weights` (B, heads, T, T) say."""

    def stub(model: VisionTransformer, images: Tensor, consume: Callable[[Tensor], None]) -> None:
        for _ in range(model.config.depth):
            consume(weights)

    monkeypatch.setattr(distance, "stream_attention", stub)


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


def test_weights_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    weights = torch.full((2, 2, 17, 17), 1 / 17)
    weights[1, 1, 5, 6] = float("nan")
    given_weights(monkeypatch, weights)
    with pytest.raises(UserError, match="not finite"):
        attention_distance(model, images_of(model))


@pytest.mark.parametrize("method", [attention_distance, heads.head_maps])
@pytest.mark.parametrize("attention", ["global", "window"])
def test_one_layer_of_weights_is_there_at_a_time(
    method: Any, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("training", [True, False])
def test_model_is_run_as_in_evaluation_and_left_as_it_was(training: bool) -> None:
    model = small_model(dropout=0.5, attention_dropout=0.5, drop_path=0.5, patch_dropout=0.5)
    images = images_of(model)
    expected = attention_distance(model, images)
    model.train(training)
    torch.testing.assert_close(attention_distance(model, images), expected)
    assert model.training is training


def test_half_precision_model_has_float32_distances() -> None:
    model = small_model()
    images = images_of(model)
    expected = attention_distance(model, images)
    reached = attention_distance(model.to(torch.bfloat16), images.to(torch.bfloat16))
    assert reached.dtype == torch.float32
    torch.testing.assert_close(reached, expected, rtol=0.05, atol=0)


def test_no_images_are_refused() -> None:
    with pytest.raises(UserError, match="give at least one"):
        attention_distance(small_model(), random_images(0, 3, 32, 32))


def test_a_resnet_is_refused() -> None:
    for method in (attention_distance, uniform_distance):
        with pytest.raises(UserError, match="a ResNet has no attention to show"):
            method(small_resnet(), random_images(1, 3, 32, 32))
