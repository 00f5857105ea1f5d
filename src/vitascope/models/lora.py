"""Low-rank adaptation of a trained encoder (Hu et al. 2021, "LoRA", equation 3)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitascope.models.encoder import Encoder

_A, _B = ".adapter.A.weight", ".adapter.B.weight"


class Adapter(nn.Module):
    """B A x, (..., I) -> (..., O), which is added to W x; the paper's factor alpha / rank is 1.

    A (rank, I) starts with a variance of 1 / I, B (O, rank) at zero. B A is not formed in training, so that
    no gradient of the size of W is in memory.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.A = nn.Linear(layer.in_features, rank, bias=False)
        self.B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.normal_(self.A.weight, std=layer.in_features**-0.5)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.B(self.A(x))
        return change


def add_adapters(encoder: Encoder, rank: int) -> None:
    """Give each linear layer of an encoder, in attention and MLPs, an `adapter`, and add its output.

    The fused layer of queries, keys and values has one adapter, so that the three share A. The output is
    added by a hook, so that the layers keep their class and the names of their parameters.
    """
    layers = [part for part in encoder.modules() if isinstance(part, nn.Linear)]
    for layer in layers:
        layer.register_module("adapter", Adapter(layer, rank))
        layer.register_forward_hook(_add_adapter)


def _add_adapter(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """W x + B A x, equation 3."""
    return output + layer.get_submodule("adapter")(inputs[0])


@torch.no_grad()
def merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of the plain model that computes the same: W + B A in place of W, and no adapters."""
    plain = {name: tensor for name, tensor in state.items() if not name.endswith((_A, _B))}
    for name in state:
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            plain[f"{layer}.weight"] = plain[f"{layer}.weight"] + state[f"{layer}{_B}"] @ state[name]
    return plain
