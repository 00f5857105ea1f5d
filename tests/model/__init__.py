"""Small models, with weights that leave nothing at zero, and the settings of property-based tests."""

from typing import Any, TypeVar

import torch
from hypothesis import settings
from torch import nn

from vitascope.model.config import ViTConfig
from vitascope.model.vit import VisionTransformer

AnyModule = TypeVar("AnyModule", bound=nn.Module)

law = settings(deadline=None, max_examples=25)  # a deadline would time the machine
law_of_models = settings(law, max_examples=8)


def small_config(**overrides: Any) -> ViTConfig:
    values: dict[str, Any] = {
        "image_size": 32,
        "patch_size": 8,
        "num_classes": 5,
        "embed_dim": 16,
        "depth": 3,
        "num_heads": 2,
    }
    return ViTConfig(**(values | overrides))


def small_model(seed: int = 0, **overrides: Any) -> VisionTransformer:
    return randomize(VisionTransformer(small_config(**overrides)), seed).eval()


@torch.no_grad()
def randomize(module: AnyModule, seed: int = 0) -> AnyModule:
    """Random numbers for every parameter: a zero or a one would hide that it is not used, or used twice."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.ndim == 1:  # biases around zero, weights of norms around one
            parameter.copy_(0.3 * noise + name.endswith("weight"))
        elif parameter.ndim == 3:  # class token and positions
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
    return module


def random_images(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
