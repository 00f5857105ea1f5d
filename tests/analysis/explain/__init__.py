"""Models with different pooling, and the share of each token in the pooled features."""

from typing import Any

import numpy as np

from vitascope.models.config import ViTConfig

MODELS: dict[str, dict[str, Any]] = {
    "class_token": {},
    "registers": {"num_registers": 3},
    "distilled": {"distillation_token": True},
    "distilled_registers": {"distillation_token": True, "num_registers": 2},
    "mean": {"pool": "mean"},
    "mean_beside_class_token": {"pool": "mean", "class_token": True, "num_registers": 2},
    "mean_beside_registers": {"pool": "mean", "num_registers": 1},
    "map": {"pool": "map"},
    "map_beside_class_token": {"pool": "map", "class_token": True, "num_registers": 1},
    "sequence": {"pool": "sequence", "num_registers": 2},
    "class_and_mean": {"pool": "cls_mean"},
    "class_and_mean_registers": {"pool": "cls_mean", "num_registers": 4},
    "axial": {"attention": "axial"},
    "axial_distilled": {"attention": "axial", "distillation_token": True, "num_registers": 1},
    "axial_mean": {"attention": "axial", "pool": "mean"},
    "window": {"attention": "window", "window": 2, "num_registers": 1},
    "window_mean": {"attention": "window", "window": (1, 2), "pool": "mean"},
    "window_map": {"attention": "window", "window": 2, "pool": "map", "class_token": True},
    "rotary": {"positions": "rotary", "num_registers": 2, "qkv_bias": "no_key"},
    "relative": {"positions": "relative", "attention": "axial", "pool": "cls_mean"},
    "post_norm": {"norm": "post", "mlp": "swiglu"},
    "overlap": {"stem": "overlap", "distillation_token": True},
}


def shares(config: ViTConfig) -> np.ndarray:
    """The share of each token in the representation, (T,); the shares sum to one."""
    P, N = config.num_prefix_tokens, config.num_tokens - config.num_prefix_tokens
    share = np.zeros(P + N)
    match config.option("pool"):
        case "cls" if config.option("distillation_token"):
            share[[0, 1]] = 1 / 2
        case "cls":
            share[0] = 1
        case "mean" | "map" | "sequence":
            share[P:] = 1 / N
        case "cls_mean":
            share[0] = 1 / 2
            share[P:] = 1 / (2 * N)
    return share


def heatmap(config: ViTConfig, rows: np.ndarray) -> np.ndarray:
    """The heatmap of weights (T, T) between tokens: the flow from each patch to the pooled tokens."""
    received = (shares(config) @ rows)[config.num_prefix_tokens :].reshape(config.grid)
    return received / received.max()
