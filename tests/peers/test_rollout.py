"""Attention rollout against the recursion of a common tool, on timm's attention weights.

The recursion is that of Gildenblat's "vit-explain", written here from its description: from the identity,
each layer's fused heads plus the identity, halved, rows normalized to a sum of one, times the product so far;
of the result, the class token's row. It is compared where that tool is correct: for one class token. Its rows
are divided by their sums along the wrong axis, which has no effect only on the mean of heads, whose rows all
sum to one; the other fusions are compared with correct sums.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.peers.timm_models import images_for, loaded, peer_model, saved
from vitascope.explain.attention import attention
from vitascope.explain.rollout import Fusion, rollout

pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")

FUSE = {"mean": np.mean, "max": np.max, "min": np.min}
CASES = ["timm's own test model", "image not square", "no qkv bias"]


@torch.no_grad()
def weights_of(model: nn.Module, images: Tensor) -> list[np.ndarray]:
    """timm's attention weights (B, heads, T, T) of every block, before dropout."""
    caught: list[np.ndarray] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(
            lambda module, inputs, output: caught.append(inputs[0].double().numpy())
        )
    model(images)
    return caught


def vit_explain(layers: list[np.ndarray], fusion: Fusion, axis_is_right: bool) -> np.ndarray:
    """The class token's row of one image's layers (1, heads, T, T), largest value 1: (N,)."""
    T = layers[0].shape[-1]
    result = np.eye(T)
    for (weights,) in layers:
        step = (FUSE[fusion](weights, axis=0) + np.eye(T)) / 2
        sums = step.sum(axis=1)
        result = (step / (sums[:, None] if axis_is_right else sums)) @ result
    return result[0, 1:] / result[0, 1:].max()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("fusion", "right"), [("mean", False), ("max", True), ("min", True)])
def test_rollout_equals_the_recursion_on_timms_attention(
    case: str, fusion: Fusion, right: bool, tmp_path: Path
) -> None:
    theirs = peer_model(case)
    ours = loaded(saved(theirs, tmp_path))
    images = images_for(ours.config)
    heat = rollout(ours, images, fusion)
    for index, image in enumerate(images):
        expected = vit_explain(weights_of(theirs, image[None]), fusion, right).reshape(ours.config.grid)
        np.testing.assert_allclose(heat[index], expected, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_layer_map_equals_timms_attention(case: str, tmp_path: Path) -> None:
    theirs = peer_model(case)
    ours = loaded(saved(theirs, tmp_path))
    images = images_for(ours.config)
    layers = weights_of(theirs, images)
    for index, weights in enumerate(layers):
        rows = weights[:, -1, 0, 1:].reshape(2, *ours.config.grid)
        expected = rows / rows.max(axis=(1, 2), keepdims=True)
        heat = attention(ours, images, layer=index, head=ours.config.num_heads - 1)
        np.testing.assert_allclose(heat, expected, atol=1e-4)
