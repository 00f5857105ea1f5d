"""The paper's equations in NumPy, float64, on arrays with the names and layouts of the original JAX code.

Nothing is imported from vitascope: images are (B, H, W, C), kernels stay (D, heads, hd) and (height, width,
inputs, outputs), and every name is the JAX code's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclasses.dataclass
class Answer:
    """The results of one forward pass."""

    logits: Array
    """(B, K), or the pooled features (B, D) of a model without a head."""
    attention: list[Array]
    """Of each block, (B, heads, T, T)."""


class Tree:
    """Arrays by name below a prefix."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], place: str = "") -> None:
        self.arrays, self.place = arrays, place

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self.arrays[self.place + name], dtype=np.float64)

    def __contains__(self, name: str) -> bool:
        return any(key.startswith(self.place + name) for key in self.arrays)

    def below(self, *names: str) -> Tree:
        """The part under the first existing name."""
        return next(Tree(self.arrays, f"{self.place}{name}/") for name in names if f"{name}/" in self)


class Layer(Tree):
    """One block of the stacked arrays of all blocks."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], index: int) -> None:
        place = "Transformer/encoderblock/"
        super().__init__({key: value[index] for key, value in arrays.items() if key.startswith(place)}, place)


def forward(arrays: Mapping[str, NDArray[Any]], images: Array) -> Answer:
    """The results for images (B, H, W, C) of a model whose arrays have no prefix."""
    tree, attention = Tree(arrays), []
    x = stem(tree, images)
    x = convolve(x, tree["embedding/kernel"], same=False) + tree["embedding/bias"]
    B, gh, gw, D = x.shape
    x = x.reshape(B, gh * gw, D)
    prefix = np.broadcast_to(tree["cls"], (B, 1, D)) if "cls" in tree else x[:, :0]
    places = positions(tree, gh, gw, D)
    if places.shape[1] == gh * gw:  # of the patches only
        x = np.concatenate([prefix, x + places], axis=1)
    else:
        x = np.concatenate([prefix, x], axis=1) + places
    for block in blocks(tree):
        y, weights = attend(
            block.below("MultiHeadDotProductAttention_1", "MultiHeadDotProductAttention_0"),
            *[layer_norm(x, block.below("LayerNorm_0"))] * 2,
        )
        attention.append(weights)
        x = x + y
        y = layer_norm(x, block.below("LayerNorm_2", "LayerNorm_1"))
        x = x + mlp(y, block.below("MlpBlock_3", "MlpBlock_0"))
    x = layer_norm(x, tree.below("Transformer").below("encoder_norm"))
    y = pool(tree, x)
    if "pre_logits/" in tree:
        y = np.tanh(dense(y, tree.below("pre_logits")))
    return Answer(dense(y, tree.below("head")) if "head/" in tree else y, attention)


def stem(tree: Tree, images: Array) -> Array:
    """The ResNet of a hybrid; the images themselves if there is none."""
    if "conv_root/" not in tree:
        return images
    x = convolve(images, standardized(tree["conv_root/kernel"]), stride=2)
    x = max_pool(np.maximum(group_norm(x, tree.below("gn_root")), 0))
    stage = 1
    while f"block{stage}/" in tree:
        number = 1
        while f"block{stage}/unit{number}/" in tree:
            unit = tree.below(f"block{stage}").below(f"unit{number}")
            x = bottleneck(x, unit, stride=2 if stage > 1 and number == 1 else 1)
            number += 1
        stage += 1
    return x


def bottleneck(x: Array, unit: Tree, stride: int) -> Array:
    shortcut = x
    if "conv_proj/" in unit:
        shortcut = convolve(x, standardized(unit["conv_proj/kernel"]), stride)
        shortcut = group_norm(shortcut, unit.below("gn_proj"))
    y = convolve(x, standardized(unit["conv1/kernel"]))
    y = np.maximum(group_norm(y, unit.below("gn1")), 0)
    y = convolve(y, standardized(unit["conv2/kernel"]), stride)
    y = np.maximum(group_norm(y, unit.below("gn2")), 0)
    y = convolve(y, standardized(unit["conv3/kernel"]))
    return np.maximum(shortcut + group_norm(y, unit.below("gn3")), 0)


def standardized(kernel: Array) -> Array:
    centred = kernel - kernel.mean(axis=(0, 1, 2))
    return centred / (centred.std(axis=(0, 1, 2)) + 1e-5)


def windows(x: Array, kh: int, kw: int, stride: tuple[int, int], fill: float | None) -> Array:
    """(B, H, W, C) -> (B, H', W', C, kh, kw); `fill` pads as TensorFlow's "SAME", None not at all."""
    if fill is not None:
        padding = [(0, 0)]
        for side, kernel, step in zip(x.shape[1:3], (kh, kw), stride, strict=True):
            total = max((int(np.ceil(side / step)) - 1) * step + kernel - side, 0)
            padding.append((total // 2, total - total // 2))
        x = np.pad(x, [*padding, (0, 0)], constant_values=fill)
    return sliding_window_view(x, (kh, kw), axis=(1, 2))[:, :: stride[0], :: stride[1]]


def convolve(x: Array, kernel: Array, stride: int = 1, *, same: bool = True) -> Array:
    """With `same`, "SAME" padding; otherwise "VALID", and a stride of the kernel's size."""
    kh, kw = kernel.shape[:2]
    tiles = windows(x, kh, kw, (stride, stride) if same else (kh, kw), 0.0 if same else None)
    return np.einsum("bhwcij,ijcd->bhwd", tiles, kernel, optimize=True)


def max_pool(x: Array) -> Array:
    return windows(x, 3, 3, (2, 2), -np.inf).max(axis=(-1, -2))


def group_norm(x: Array, at: Tree) -> Array:
    B, H, W, C = x.shape
    groups = x.reshape(B, H, W, 32, C // 32)
    mean = groups.mean(axis=(1, 2, 4), keepdims=True)
    variance = groups.var(axis=(1, 2, 4), keepdims=True)
    normal = ((groups - mean) / np.sqrt(variance + 1e-6)).reshape(x.shape)
    return normal * at["scale"].reshape(C) + at["bias"].reshape(C)


def positions(tree: Tree, gh: int, gw: int, D: int) -> Array:
    for name in ("Transformer/posembed_input/pos_embedding", "Transformer/pos_embedding", "pos_embedding"):
        if name in tree.arrays:
            return tree[name]
    omega = 1 / 10_000 ** (np.arange(D // 4) / (D // 4 - 1))
    y, x = np.mgrid[:gh, :gw]
    y, x = y.reshape(-1, 1) * omega, x.reshape(-1, 1) * omega
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)[None]


def blocks(tree: Tree) -> list[Tree]:
    """The encoder's blocks in order."""
    if "Transformer/encoderblock/" in tree:
        depth = len(tree["Transformer/encoderblock/LayerNorm_0/scale"])
        return [Layer(tree.arrays, index) for index in range(depth)]
    found: list[Tree] = []
    while f"Transformer/encoderblock_{len(found)}/" in tree:
        found.append(tree.below(f"Transformer/encoderblock_{len(found)}"))
    return found


def attend(at: Tree, queries: Array, others: Array) -> tuple[Array, Array]:
    """Equations 5 to 8: the outputs for queries (B, Q, D) from others (B, T, D), and the weights."""
    q = np.einsum("bqd,dhe->bhqe", queries, at["query/kernel"]) + at["query/bias"][:, None]
    k = np.einsum("btd,dhe->bhte", others, at["key/kernel"]) + at["key/bias"][:, None]
    v = np.einsum("btd,dhe->bhte", others, at["value/kernel"]) + at["value/bias"][:, None]
    scores = np.einsum("bhqe,bhte->bhqt", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("bhqt,bhte->bqhe", weights, v)
    return np.einsum("bqhe,hed->bqd", mixed, at["out/kernel"]) + at["out/bias"], weights


def pool(tree: Tree, x: Array) -> Array:
    inlined = "probe" in tree.arrays
    if inlined or "MAPHead_0/" in tree:
        at = tree if inlined else tree.below("MAPHead_0")
        probe = np.broadcast_to(at["probe"], (len(x), 1, x.shape[2]))
        y, _ = attend(at.below("MultiHeadDotProductAttention_0"), probe, x)
        return (y + mlp(layer_norm(y, at.below("LayerNorm_0")), at.below("MlpBlock_0")))[:, 0]
    return x[:, 0] if "cls" in tree.arrays else x.mean(axis=1)


def layer_norm(x: Array, at: Tree) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6) * at["scale"] + at["bias"]


def mlp(x: Array, at: Tree) -> Array:
    h = dense(x, at.below("Dense_0"))
    h = h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return dense(h, at.below("Dense_1"))


def dense(x: Array, at: Tree) -> Array:
    return x @ at["kernel"] + at["bias"]
