"""Heatmaps of a model, their faithfulness, and views of its learned parts.

Common to all methods that give heatmaps:

- `model` is any classifier, or any `VisionTransformer` where attention is read (a ResNet is a `UserError`);
  it runs in evaluation mode.
- `images` are pictures, one or many (paths, bytes, Pillow images, uint8 arrays), or normalized floats (B, C,
  H, W).
- `target` is a class by number or name, one per image, or a `Target`; None is the predicted class. An
  unknown one is a `UserError`.
- The result is float32 (B, grid_h, grid_w), never below 0, each image's largest value 1, or 0 without
  evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitascope.analysis.explain.attention import attention, head_maps, patch_attention
from vitascope.analysis.explain.gradcam import grad_cam
from vitascope.analysis.explain.integrated_gradients import integrated_gradients
from vitascope.analysis.explain.learned import (
    attention_distance,
    feature_colours,
    patch_filters,
    position_similarity,
)
from vitascope.analysis.explain.lens import Lens, lens
from vitascope.analysis.explain.libra import libra
from vitascope.analysis.explain.methods import DEFAULT_METHOD, METHODS, heatmap
from vitascope.analysis.explain.occlusion import occlusion
from vitascope.analysis.explain.patching import patching
from vitascope.analysis.explain.rollout import gradient_rollout, rollout
from vitascope.analysis.explain.targets import ClassDifference, ClassScore, FeatureCosine, Target

if TYPE_CHECKING:
    from vitascope.analysis.explain.faithfulness.compare import compare
    from vitascope.analysis.explain.faithfulness.evidence import Evidence, evidence
    from vitascope.analysis.explain.faithfulness.results import Comparison
    from vitascope.analysis.explain.figures import draw

__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "ClassDifference",
    "ClassScore",
    "Comparison",
    "Evidence",
    "FeatureCosine",
    "Lens",
    "Target",
    "attention",
    "attention_distance",
    "compare",
    "draw",
    "evidence",
    "feature_colours",
    "grad_cam",
    "gradient_rollout",
    "head_maps",
    "heatmap",
    "integrated_gradients",
    "lens",
    "libra",
    "occlusion",
    "patch_attention",
    "patch_filters",
    "patching",
    "position_similarity",
    "rollout",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # On first use (PEP 562): SciPy and matplotlib take longer to import than a picture to predict.
    from vitascope.analysis.explain import figures
    from vitascope.analysis.explain.faithfulness import compare, evidence, results

    modules = {"draw": figures, "compare": compare, "Comparison": results}
    return getattr(modules.get(name, evidence), name)


def __dir__() -> list[str]:
    return sorted(__all__)
