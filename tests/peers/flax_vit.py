"""A ViT of flax's modules, which name their arrays after their classes. Needs flax."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array


class MlpBlock(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = nn.gelu(nn.Dense(self.hidden)(x))
        return nn.Dense(x.shape[-1])(h)


class Block(nn.Module):
    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x: Array, _: Any = None) -> tuple[Array, None]:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(y, y)
        y = nn.LayerNorm()(x)
        return x + MlpBlock(self.hidden)(y), None


class Encoder(nn.Module):
    depth: int
    heads: int
    hidden: int
    learned_here: bool
    scan: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if self.learned_here:
            x = Places(name="posembed_input")(x)
        if self.scan:
            loop = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)
            x, _ = loop(self.heads, self.hidden, name="encoderblock")(x, None)
        else:
            for index in range(self.depth):
                x, _ = Block(self.heads, self.hidden, name=f"encoderblock_{index}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class Places(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        return x + self.param("pos_embedding", nn.initializers.normal(0.5), (1, *x.shape[1:]))


class MAPHead(nn.Module):
    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        probe = self.param("probe", nn.initializers.normal(1.0), (1, 1, x.shape[-1]))
        probe = jnp.tile(probe, (len(x), 1, 1))
        y = nn.MultiHeadDotProductAttention(num_heads=self.heads)(probe, x)
        return (y + MlpBlock(self.hidden)(nn.LayerNorm()(y)))[:, 0]


class Convolution(nn.Conv):
    """A convolution with standardized filters."""

    use_bias: bool = False

    def param(self, name: str, *arguments: Any, **options: Any) -> Any:
        kernel = super().param(name, *arguments, **options)
        kernel = kernel - kernel.mean(axis=(0, 1, 2))
        return kernel / (kernel.std(axis=(0, 1, 2)) + 1e-5)


class Unit(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shortcut, strides = x, (self.stride, self.stride)
        if x.shape[-1] != 4 * self.width or self.stride != 1:
            shortcut = Convolution(4 * self.width, (1, 1), strides, name="conv_proj")(x)
            shortcut = nn.GroupNorm(name="gn_proj")(shortcut)
        y = nn.relu(nn.GroupNorm(name="gn1")(Convolution(self.width, (1, 1), name="conv1")(x)))
        y = nn.relu(nn.GroupNorm(name="gn2")(Convolution(self.width, (3, 3), strides, name="conv2")(y)))
        y = nn.GroupNorm(name="gn3")(Convolution(4 * self.width, (1, 1), name="conv3")(y))
        return nn.relu(shortcut + y)


class Stage(nn.Module):
    units: int
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for index in range(self.units):
            x = Unit(self.width, 1 if index else self.stride, name=f"unit{index + 1}")(x)
        return x


class ViT(nn.Module):
    """Images (B, H, W, C) to logits (B, K); `kind` selects vit_jax's or big_vision's positions."""

    kind: str = "vit_jax"
    pool: str = "cls"
    learned: bool = True
    scan: bool = False
    pre_logits: bool = False
    resnet: tuple[int, ...] | None = None
    width: int = 32
    heads: int = 4
    hidden: int = 56
    depth: int = 2
    patch: int = 8
    classes: int = 5

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if self.resnet is not None:
            x = Convolution(32, (7, 7), (2, 2), name="conv_root")(x)
            x = nn.relu(nn.GroupNorm(name="gn_root")(x))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for index, units in enumerate(self.resnet):
                x = Stage(units, 32 * 2**index, 2 if index else 1, name=f"block{index + 1}")(x)
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, patch, "VALID", name="embedding")(x)
        B, gh, gw, D = x.shape
        x = x.reshape(B, gh * gw, D)
        if self.kind == "big_vision" and self.learned:
            x = x + self.param("pos_embedding", nn.initializers.normal(0.5), (1, gh * gw, D))
        elif self.kind == "big_vision":
            x = x + fixed_places(gh, gw, D)
        if self.pool == "cls":
            token = self.param("cls", nn.initializers.normal(0.5), (1, 1, D))
            x = jnp.concatenate([jnp.tile(token, (B, 1, 1)), x], axis=1)
        encoder = Encoder(
            self.depth, self.heads, self.hidden, self.kind == "vit_jax", self.scan, name="Transformer"
        )
        x = encoder(x)
        if self.pool == "map":
            x = MAPHead(self.heads, self.hidden)(x)
        else:
            x = x[:, 0] if self.pool == "cls" else x.mean(axis=1)
        if self.pre_logits:
            x = nn.tanh(nn.Dense(D, name="pre_logits")(x))
        return nn.Dense(self.classes, name="head")(x)


def fixed_places(gh: int, gw: int, D: int) -> Array:
    """[sin x, cos x, sin y, cos y]."""
    omega = 10_000.0 ** -(np.arange(D // 4) / (D // 4 - 1))
    y, x = (place.reshape(-1, 1) * omega for place in np.mgrid[:gh, :gw])
    return jnp.asarray(
        np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)[None], jnp.float32
    )
