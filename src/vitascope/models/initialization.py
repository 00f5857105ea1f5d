"""Three published initializations of a ViT."""

import math

import torch
from torch import Tensor, nn

from vitascope.models.attention import SelfAttention
from vitascope.models.encoder import MLP, LayerScale, SwiGLU
from vitascope.models.heads import AttentionPool, CosineHead, PreLogits, SequencePool, output_layers
from vitascope.models.patches import ConvPatches, HybridPatches, TokenizerLayer
from vitascope.models.positions import LearnedPositions, sincos_table
from vitascope.models.relations import MixedRotary


@torch.no_grad()
def initialize(model: nn.Module, init: str, head_init: str) -> None:
    """Initialize a `VisionTransformer` by a scheme, `init`, except its norms and its ResNet stem."""
    if next(model.parameters()).is_meta:
        return  # there is nothing to fill, and trying takes a second
    {"paper": initialize_paper, "mimetic": initialize_mimetic, "timm": initialize_timm}[init](model)
    for module in model.modules():
        if isinstance(module, LayerScale):
            nn.init.constant_(module.gamma, module.start)
        elif isinstance(module, TokenizerLayer):  # as in CCT's code, whatever the scheme
            nn.init.kaiming_normal_(module.conv.weight, nonlinearity="relu")
            zero_(module.conv.bias)
        elif isinstance(module, MixedRotary):
            module.start()
    tokens = dict(model.named_parameters(recurse=False))
    if "registers" in tokens:
        nn.init.normal_(tokens["registers"], std=1e-6)
    if "distillation_token" in tokens:  # unlike the class token, or both would learn the same
        nn.init.trunc_normal_(tokens["distillation_token"], std=0.02)
    if head_init == "zero":
        zero_output(model)


def lecun_normal_(weight: Tensor) -> None:
    """Truncated normal with variance 1 / fan-in, as in flax."""
    fan_in = weight[0].numel()
    std = math.sqrt(1 / fan_in) / 0.87962566103423978  # that of a normal cut at 2 standard deviations
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def zero_(bias: Tensor | None) -> None:
    """Zero a bias, if there is one."""
    if bias is not None:
        nn.init.zeros_(bias)


def zero_output(model: nn.Module) -> None:
    """Zero the output layers: the first gradients then do not reach a trained body."""
    for layer in output_layers(model.get_submodule("head")):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def initialize_paper(model: nn.Module) -> None:
    """vit_jax's: Xavier in the blocks, LeCun in the stem, a zero head (paper, section 4.1)."""
    for module in model.modules():
        if isinstance(module, ConvPatches | HybridPatches):
            embedding = module if isinstance(module, ConvPatches) else module.projection
            lecun_normal_(embedding.weight)
            zero_(embedding.bias)
        elif isinstance(module, SelfAttention):
            for part in module.qkv.weight.chunk(3):  # each is its own layer in the paper
                nn.init.xavier_uniform_(part)
            zero_(module.qkv.bias)
            nn.init.xavier_uniform_(module.proj.weight)
            zero_(module.proj.bias)
        elif isinstance(module, MLP | SwiGLU):
            for layer in (module.fc1, module.fc2):
                nn.init.xavier_uniform_(layer.weight)
                if layer.bias is not None:
                    nn.init.normal_(layer.bias, std=1e-6)
        elif isinstance(module, AttentionPool):
            for part in (module.query[0], module.q.weight, *module.kv.weight.chunk(2), module.proj.weight):
                nn.init.xavier_uniform_(part)
            for layer in (module.q, module.kv, module.proj):
                nn.init.zeros_(layer.bias)
        elif isinstance(module, SequencePool):  # nearly the mean, at first
            nn.init.trunc_normal_(module.score.weight, std=0.02)
            nn.init.zeros_(module.score.bias)
        elif isinstance(module, PreLogits):
            lecun_normal_(module.pre_logits.weight)
            nn.init.zeros_(module.pre_logits.bias)
        elif isinstance(module, CosineHead) and isinstance(module.projection, nn.Linear):
            lecun_normal_(module.projection.weight)
            nn.init.zeros_(module.projection.bias)
    zero_output(model)
    # A relative bias starts at the size of the scores: from 0.02, short trainings never used positions.
    for name, weight in model.get_submodule("positions").named_parameters():
        nn.init.normal_(weight, std=1.0 if name in ("offsets", "prefix") else 0.02)


def initialize_mimetic(model: nn.Module) -> None:
    """The paper's, but attention starts with the products of weights that trained ViTs have.

    Learned positions start as sines and cosines. Trockman and Kolter 2023, "Mimetic Initialization of
    Self-Attention Layers", section 3.
    """
    initialize_paper(model)
    positions = model.get_submodule("positions")
    if isinstance(positions, LearnedPositions) and positions.weight is not None:
        table = sincos_table("sincos_2d", positions.grid, positions.weight.shape[2])  # (1, N, D)
        positions.weight[:, positions.covered_prefix :] = table.to(positions.weight)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            q, k, v = module.qkv.weight.chunk(3)  # (heads hd, D) each
            hd = q.shape[0] // module.num_heads
            for q_head, k_head in zip(q.split(hd), k.split(hd), strict=True):
                fill_product(q_head, k_head, random=0.7, diagonal=0.7)
            fill_product(v, module.proj.weight.mT, random=0.4, diagonal=-0.4)


def fill_product(first: Tensor, second: Tensor, random: float, diagonal: float) -> None:
    """Fill two matrices (n, D): first^T second is the best approximation of rank n of the sum of both parts.

    `random` is the size of a matrix of normals with variance 1 / D, `diagonal` that of the identity.
    """
    n, D = first.shape
    goal = torch.randn(D, D, device=first.device).mul_(random * D**-0.5)
    goal.diagonal().add_(diagonal)
    U, S, Vh = torch.linalg.svd(goal)
    rank = min(n, D)  # rows beyond it keep their values
    root = S[:rank, None].sqrt()
    first[:rank] = root * U.mT[:rank]
    second[:rank] = root * Vh[:rank]


def initialize_timm(model: nn.Module) -> None:
    """The one of timm's `vit_*` models: truncated normals of deviation 0.02; PyTorch's default stem."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            zero_(module.bias)
        elif isinstance(module, AttentionPool):
            nn.init.trunc_normal_(module.query, std=module.query.shape[-1] ** -0.5)
    for weight in model.get_submodule("positions").parameters():
        nn.init.trunc_normal_(weight, std=0.02)
    tokens = dict(model.named_parameters(recurse=False))
    if "class_token" in tokens:
        nn.init.normal_(tokens["class_token"], std=1e-6)
