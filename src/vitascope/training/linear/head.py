"""A body up to one representation, with a linear head: an ordinary model."""

import itertools
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from vitascope.models.config import ViTConfig
from vitascope.models.engines.features import OWN, POOLS, FeaturePool, FeatureSpec
from vitascope.models.heads import output_layers
from vitascope.models.options import Outputs
from vitascope.models.sizes import ModelConfig
from vitascope.models.vision_model import VisionModel, build
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.training.linear.classifiers import Floats

EARLIER = 2 / 3
"""Depth of the second layer that is tried: where the last ones are specialized in the classes of the body's
own training, features of this depth fit other classes better."""
LARGEST_BIAS = 1e4
"""Instead of infinity, for a class that no image or every image has: exported formats may have none."""


def representations(
    config: ModelConfig, layers: Sequence[int] | None = None, pools: Sequence[FeaturePool] | None = None
) -> list[FeatureSpec]:
    """The representations of a body to try, each of which can have a head.

    Without layers, the last one and the one at two thirds of the depth; without pools, all that the body has.
    The body's own is among them unless layers or pools exclude it.

    Raises:
        UserError: no such layer or pool.
    """
    if not isinstance(config, ViTConfig) or config.readout.distillation_token:
        named = FeatureSpec(layers[0] if layers else None, pools[0] if pools else None)
        return [named.resolved(config) if layers or pools else OWN]
    own, last = FeatureSpec(config.depth - 1, cast("FeaturePool", config.readout.pool)), config.depth - 1
    if pools is None:
        both = config.readout.pool_norm == "before"  # one norm for two pooled tokens is no option of a model
        with_class_token = ("cls", "mean", "cls_mean") if both else ("cls", "mean")
        pools = cast(
            "Sequence[FeaturePool]", with_class_token if config.readout.has_class_token else ("mean",)
        )
        beside = [OWN] if layers is None and own.pool not in POOLS else []
    else:
        beside = []
    places = (last, round(EARLIER * config.depth) - 1) if layers is None else layers
    found = [FeatureSpec(*pair).resolved(config) for pair in itertools.product(places, pools)]
    return list(dict.fromkeys([*beside, *(OWN if spec == own else spec for spec in found)]))


def headed(
    config: ModelConfig, spec: FeatureSpec, class_names: tuple[str, ...], outputs: Outputs
) -> ModelConfig:
    """The configuration of a body up to a resolved representation, with a linear head of some classes.

    Raises:
        UserError: a pooling that no model with this body has.
    """
    options = {
        "num_classes": len(class_names),
        "class_names": class_names,
        "outputs": outputs,
        "thresholds": (),
    }
    if not isinstance(config, ViTConfig):
        return config.replace(**options)
    options["head"] = "linear"
    if spec.layer is not None:
        options |= {"depth": spec.layer + 1, "pool": spec.pool}
        options["class_token"] = config.readout.has_class_token
    return config.replace(**options)


def with_head(model: VisionModel, config: ModelConfig, weight: Floats, bias: Floats) -> VisionModel:
    """The model of `headed`: the weights of a body and a linear head, weight (K, D) and bias (K,)."""
    with torch.device("meta"):  # drawing random weights takes longer than all else here
        found = build(config)
    own, body = found.state_dict(), model.state_dict()
    state = {
        name: torch.empty(value.shape) if name.startswith("head.") else body[name].cpu().float().clone()
        for name, value in own.items()
    }
    found.load_state_dict(state, assign=True)
    set_head(found, weight, bias)
    found.preprocess = preprocess_of(model)
    return found.eval()


@torch.no_grad()
def set_head(model: VisionModel, weight: Floats, bias: Floats) -> None:
    """Give a model with a linear head other weights, (K, D), and biases, (K,), in place."""
    layers = output_layers(model.head)
    # A distilled head has a layer for each of two tokens, and averages their logits.
    for layer, part in zip(layers, np.split(len(layers) * weight, len(layers), axis=1), strict=True):
        layer.weight.copy_(torch.from_numpy(part))
        layer.bias.copy_(torch.from_numpy(np.clip(bias, -LARGEST_BIAS, LARGEST_BIAS)))
