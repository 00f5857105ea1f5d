"""The ResNet, against float64 NumPy that follows vit_jax line by line; its cost, against PyTorch's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.models import law, random_images, randomize, small_resnet
from vitascope.errors import UserError
from vitascope.models.resnet import (
    DIALECTS,
    JAX,
    Bottleneck,
    Dialect,
    ResNetFeatures,
    StandardizedConv,
    max_pool,
)
from vitascope.models.resnet_config import ResNetConfig, Unit

Array = np.ndarray
RESNETS = {"r": (), "r26": (2, 2, 2, 2), "r50": (3, 4, 6, 3), "r50_s16": (3, 4, 9)}
"""The units per stage of the published stems, by name."""
SIDE = st.integers(1, 12)
dialects = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


def features(*layers: int, dialect: str = "jax", **options: Any) -> ResNetFeatures:
    return ResNetFeatures(ResNetConfig(layers=layers, **options), dialect)


def pad(images: Array, kernel: int, stride: int, value: float) -> Array:
    """Pad as TensorFlow documents "SAME": by the remainder of the side, the odd pixel at the end."""
    widths = [(0, 0), (0, 0)]
    for side in images.shape[2:]:
        total = max(kernel - (side % stride or stride), 0)
        widths.append((total // 2, total - total // 2))
    return np.pad(images, widths, constant_values=value)


def windows(images: Array, kernel: int, stride: int, value: float) -> Array:
    """(B, C, H, W) -> (B, C, ceil(H/stride), ceil(W/stride), kernel, kernel)."""
    padded = pad(images, kernel, stride, value)
    views = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), axis=(2, 3))
    return views[:, :, ::stride, ::stride]


def standardize(weight: Array, dialect: Dialect) -> Array:
    flat = weight.reshape(len(weight), -1)
    centered = flat - flat.mean(1, keepdims=True)
    variance = (centered**2).mean(1, keepdims=True)
    scale = np.sqrt(variance) + 1e-5 if dialect is JAX else np.sqrt(variance + 1e-8)
    return (centered / scale).reshape(weight.shape)


def convolve(images: Array, weight: Array, stride: int, dialect: Dialect) -> Array:
    return np.einsum(
        "bchwij,ocij->bohw",
        windows(images, weight.shape[-1], stride, 0.0),
        standardize(weight, dialect),
        optimize=True,
    )


def normalize(maps: Array, scale: Array, shift: Array, dialect: Dialect) -> Array:
    B, C, H, W = maps.shape
    grouped = maps.reshape(B, min(32, C), -1)
    centered = grouped - grouped.mean(-1, keepdims=True)
    eps = 1e-6 if dialect is JAX else 1e-5
    normal = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps)
    return normal.reshape(B, C, H, W) * scale[:, None, None] + shift[:, None, None]


class NumpyResNet:
    """vit_jax's forward pass, from our parameters by name."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], layers: tuple[int, ...], dialect: Dialect
    ) -> None:
        self.weights = {name: value.numpy() for name, value in weights.items()}
        self.layers, self.dialect = layers, dialect

    def conv_norm(self, maps: Array, conv: str, norm: str, stride: int = 1) -> Array:
        maps = convolve(maps, self.weights[f"{conv}.weight"], stride, self.dialect)
        return normalize(maps, self.weights[f"{norm}.weight"], self.weights[f"{norm}.bias"], self.dialect)

    def unit(self, maps: Array, name: str, stride: int) -> Array:
        shortcut = maps
        if f"{name}.shortcut.conv.weight" in self.weights:
            shortcut = self.conv_norm(maps, f"{name}.shortcut.conv", f"{name}.shortcut.norm", stride)
        maps = np.maximum(self.conv_norm(maps, f"{name}.conv1", f"{name}.norm1"), 0)
        maps = np.maximum(self.conv_norm(maps, f"{name}.conv2", f"{name}.norm2", stride), 0)
        return np.maximum(shortcut + self.conv_norm(maps, f"{name}.conv3", f"{name}.norm3"), 0)

    def __call__(self, images: Array) -> Array:
        stride = 2 if self.weights["root.conv.weight"].shape[-1] == 7 else 1
        maps = np.maximum(self.conv_norm(images, "root.conv", "root.norm", stride), 0)
        if stride == 2:
            maps = windows(maps, 3, 2, -np.inf).max((-2, -1))
        for s, units in enumerate(self.layers):
            for u in range(units):
                maps = self.unit(maps, f"stages.{s}.{u}", 2 if s > 0 and u == 0 else 1)
        return maps


@dialects
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2), (7, 2)])
@law
@given(C=st.integers(1, 4), H=SIDE, W=SIDE, seed=st.integers(0, 9))
def test_the_convolution_equals_numpy_for_any_image_size(
    dialect: Dialect, kernel: int, stride: int, C: int, H: int, W: int, seed: int
) -> None:
    conv = randomize(StandardizedConv(C, 5, kernel, stride, dialect).double(), seed)
    images = random_images(2, C, H, W, seed=seed).double()
    expected = convolve(images.numpy(), conv.weight.detach().numpy(), stride, dialect)
    assert expected.shape == (2, 5, -(-H // stride), -(-W // stride))
    np.testing.assert_allclose(conv(images).detach(), expected, rtol=1e-9, atol=1e-9)


@law
@given(B=st.integers(1, 3), C=st.integers(1, 3), H=SIDE, W=SIDE, share=st.sampled_from([0.0, 0.5, 1.0]))
def test_max_pooling_equals_padding_with_minus_infinity(B: int, C: int, H: int, W: int, share: float) -> None:
    maps = random_images(B, C, H, W).abs() * (torch.rand(B, C, H, W) < share)
    np.testing.assert_array_equal(max_pool(maps), windows(maps.numpy(), 3, 2, -np.inf).max((-2, -1)))


@dialects
def test_a_constant_filter_gives_zero_and_a_finite_gradient(dialect: Dialect) -> None:
    conv = StandardizedConv(4, 2, 1, dialect=dialect)
    nn.init.constant_(conv.weight, 0.5)
    output = conv(random_images(1, 4, 3, 3))
    output.sum().backward()
    assert (output == 0).all()
    assert conv.weight.grad is not None
    assert conv.weight.grad.isfinite().all()


@dialects
@pytest.mark.parametrize("layers", [(), (1,), (2, 1), (1, 2, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("size", [(32, 32), (37, 50)])
def test_features_equal_numpy(dialect: Dialect, layers: tuple[int, ...], size: tuple[int, int]) -> None:
    name = "jax" if dialect is JAX else "timm"
    model = randomize(features(*layers, width=8, dialect=name).double())
    config = ResNetConfig(layers=layers, width=8)
    images = random_images(2, 3, *size).double()
    expected = NumpyResNet(model.state_dict(), layers, dialect)(images.numpy())
    actual = model(images).detach()
    assert actual.shape == (2, config.embed_dim, *config.grid_of(size))
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("size", "grid"), [((32, 32), (8, 8)), ((9, 14), (3, 4))])
def test_features_after_the_root_of_cifar_equal_numpy(size: tuple[int, int], grid: tuple[int, int]) -> None:
    model = randomize(features(1, 2, 1, width=8, root="cifar").double())
    images = random_images(2, 3, *size).double()
    expected = NumpyResNet(model.state_dict(), (1, 2, 1), JAX)(images.numpy())
    actual = model(images).detach()
    assert model.root.conv.kernel_size == (3, 3)
    config = ResNetConfig(layers=(1, 2, 1), width=8, root="cifar")
    assert config.stride == 4
    assert config.grid_of(size) == grid
    assert actual.shape == (2, config.embed_dim, *grid)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def test_the_r50_has_the_published_size_of_a_resnet_50() -> None:
    """torchvision documents 25,557,032 parameters and 4.09 G multiply-adds, head (2048 x 1000) included."""
    assert ResNetConfig().num_parameters == 25_557_032
    assert ResNetConfig().flops / 2 == pytest.approx(4.09e9, rel=1e-3)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_unit_starts_as_its_shortcut(stride: int) -> None:
    unit = Bottleneck(Unit(8, 4, stride))
    maps = random_images(2, 8, 6, 6)
    assert torch.equal(unit(maps), unit.shortcut(maps).relu())


def test_filters_start_as_he_normal_and_norms_as_the_identity() -> None:
    torch.manual_seed(0)
    model = features(2, 1)
    for name, value in model.named_parameters():
        if "conv" in name:
            assert value.var().item() == pytest.approx(2 / value[0].numel(), rel=0.1), name
        else:
            starts_at_one = name.endswith("weight") and "norm3" not in name
            assert (value == float(starts_at_one)).all(), name


def test_an_image_has_the_same_logits_alone_and_in_a_batch() -> None:
    model, images = small_resnet(width=8).train(), random_images(4, 3, 32, 32)
    alone = torch.cat([model(images[index : index + 1]) for index in range(4)])
    torch.testing.assert_close(model(images), alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.eval()(images), alone, rtol=1e-4, atol=1e-5)


def test_a_trace_is_the_forward_pass_with_its_intermediates() -> None:
    model, images = small_resnet(), random_images(2, 3, 32, 48)
    trace = model.trace(images)
    assert {name: tuple(value.shape) for name, value in trace.values.items()} == {
        "root": (2, 4, 8, 12),
        "stage0": (2, 16, 8, 12),
        "stage1": (2, 32, 4, 6),
        "features": (2, 32, 4, 6),
        "pooled": (2, 32),
        "logits": (2, 5),
    }
    assert torch.equal(trace["logits"], model(images))
    assert torch.equal(trace["pooled"], model.embed(images))
    assert torch.equal(trace["features"], model.features(images))
    assert torch.equal(model.features.stages[0](trace["root"]), trace["stage0"])


@pytest.mark.parametrize("images", [torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(1, 1, 32, 32)])
def test_anything_but_a_batch_of_normalized_images_is_rejected(images: torch.Tensor) -> None:
    for run in (small_resnet(), small_resnet().embed, small_resnet().trace):
        with pytest.raises(UserError, match=r"normalized floats \(batch, 3, height, width\)"):
            run(images)


@dialects
def test_bf16_autocast_stays_close_to_fp32_and_trains(dialect: Dialect) -> None:
    model = small_resnet(layers=(1, 1), width=8)
    model.features = randomize(features(1, 1, width=8, dialect="jax" if dialect is JAX else "timm"))
    images = random_images(4, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
        logits.float().square().sum().backward()
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(images), rtol=0.05, atol=0.1)
    for name, value in model.named_parameters():
        assert value.grad is not None, name
        assert value.grad.dtype == torch.float32
        assert value.grad.isfinite().all(), name


@dialects
def test_weights_in_bf16_are_standardized_in_fp32(dialect: Dialect) -> None:
    conv = randomize(StandardizedConv(8, 4, 3, dialect=dialect)).bfloat16()
    images = random_images(2, 8, 5, 5).bfloat16()
    weight = dialect.standardize(conv.weight.float()).bfloat16()
    assert torch.equal(conv(images), nn.functional.conv2d(images, weight, padding=1))


def test_a_resnet_compiles_to_one_graph() -> None:
    model, images = randomize(features(1, 1, width=4)), random_images(2, 3, 30, 37)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images), model(images))
