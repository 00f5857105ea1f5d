"""Where a model looks. Every method takes normalized images (B, C, H, W) and returns heatmaps (B, gh, gw)."""

from vitascope.explain.attention import attention
from vitascope.explain.rollout import rollout

__all__ = ["attention", "rollout"]
