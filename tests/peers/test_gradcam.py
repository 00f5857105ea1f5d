"""Grad-CAM against pytorch-grad-cam, on timm's model with the same weights.

That tool is correct if it gets the right layer and a function that turns tokens into a map. The usual
function, from its examples, is for a square grid and one class token; there every variant is compared, at
both of our layers. Other grids and registers need another function, so that they are only compared with the
formulas (tests/analysis/explain/test_gradcam.py). The tool adds 1e-6 and 1e-7 to the divisors of two
variants, squares of gradients and sums of activations: only gradients far above 1e-3 are not affected, so
that the heads here are large.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.peers.timm_models import images_for, loaded, peer_model, saved
from vitascope.analysis.explain.gradcam import Variant, grad_cam
from vitascope.models.vit import VisionTransformer

pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")
peer = pytest.importorskip("pytorch_grad_cam", reason="grad-cam is not installed (vitascope[peers])")

TOOLS: dict[Variant, Any] = {"grad-cam": peer.GradCAM, "layer-cam": peer.LayerCAM}
CLASSES = [3, 0]


def without_class_token(tokens: Tensor) -> Tensor:
    """(B, 1 + N, D) -> (B, D, rows, columns) of a square grid."""
    side = round((tokens.shape[1] - 1) ** 0.5)
    return tokens[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)


def models(case: str, folder: Path) -> tuple[VisionTransformer, nn.Module]:
    """Our model and timm's, with a head of large weights."""
    theirs = peer_model(case)
    with torch.no_grad():
        theirs.head.weight.mul_(1000)
    return loaded(saved(theirs, folder)), theirs


def by_the_tool(kind: Any, model: nn.Module, layer: nn.Module, images: Tensor) -> np.ndarray:
    """The tool's heatmaps in the size of the grid, not enlarged to the image."""

    class OnTheGrid(kind):
        def get_target_width_height(self, images: Tensor) -> tuple[int, int]:
            return self.activations_and_grads.activations[0].shape[:1:-1]

    targets = [peer.utils.model_targets.ClassifierOutputTarget(index) for index in CLASSES]
    with OnTheGrid(model, [layer], reshape_transform=without_class_token) as tool:
        return tool(images, targets)


@pytest.mark.parametrize("variant", TOOLS)
@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("timm's own test model", "blocks.2.norm1"),
        ("class token, then norm", "blocks.1.norm1"),
        ("norm, then mean", "norm"),
        ("mean, then norm", "norm"),
    ],
)
def test_maps_equal_pytorch_grad_cam(case: str, part: str, variant: Variant, tmp_path: Path) -> None:
    ours, theirs = models(case, tmp_path)
    images = images_for(ours.config)
    expected = by_the_tool(TOOLS[variant], theirs, theirs.get_submodule(part), images)
    heat = grad_cam(ours, images, CLASSES, "last", variant).numpy()
    assert heat.shape == expected.shape == (2, 4, 4)
    heat = heat - heat.min(axis=(1, 2), keepdims=True)  # as that tool scales its maps
    np.testing.assert_allclose(heat / heat.max(axis=(1, 2), keepdims=True), expected, atol=1e-3)
