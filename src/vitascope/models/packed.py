"""Linear layers whose weights are packed for oneDNN, for prediction in bf16 on a CPU.

oneDNN reorders the weights of PyTorch's linear layer at every call. Packed once, and with the GELU as a part
of the product, ViT-B/16 predicts about a tenth faster. torch.compile uses the same operators for frozen
weights.
"""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from vitascope.models.encoder import MLP
from vitascope.models.hardware import bf16_units
from vitascope.models.vit import VisionTransformer

AnyModel = TypeVar("AnyModel", bound=nn.Module)


class PackedLinear(nn.Module):
    """act(x W^T + b) in bf16 on the CPU, for prediction, rounded once: (..., I) -> (..., O)."""

    def __init__(self, linear: nn.Linear, gelu: nn.GELU | None = None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias
        self.activation, self.approximate = ("none", "") if gelu is None else ("gelu", gelu.approximate)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(
            tokens, self.weight, self.bias, self.activation, [], self.approximate
        )
        return outputs


def packing_pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing is faster: in bf16, on a CPU with units for it."""
    if device.type != "cpu" or dtype != torch.bfloat16 or bf16_units() is None:
        return False
    # ONEDNN_MAX_CPU_ISA may keep oneDNN from units that the CPU has.
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def predicting_copy(model: AnyModel, dtype: torch.dtype) -> AnyModel:
    """A copy in another precision for prediction only, its encoder packed if that is faster."""
    made = copy.deepcopy(model).to(dtype).requires_grad_(False)
    if not packing_pays(next(made.parameters()).device, dtype):
        return made
    encoders = [part.encoder for part in made.modules() if isinstance(part, VisionTransformer)]
    for module in [module for encoder in encoders for module in encoder.modules()]:
        if isinstance(module, MLP) and isinstance(module.activation, nn.GELU):
            module.register_module("fc1", PackedLinear(module.fc1, module.activation))
            module.register_module("activation", nn.Identity())
        for name, child in module.named_children():
            if type(child) is nn.Linear:  # not its subclasses
                module.register_module(name, PackedLinear(child))
    return made
