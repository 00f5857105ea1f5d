"""Libra input x gradient (Mehri et al. 2025, "LibraGrad: Balancing Gradient Flow for Universally Better
Vision Transformer Attributions", CVPR).

A Transformer divides its tokens by their norms, weighs them by their own attention and gates them by
themselves. The gradient follows these factors too, so that input times gradient does not add up to the score.
Here the factors are constants of the backward pass, and each factor of a product of two activations gets half
of the gradient. The model is then an affine function of the image.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitascope.analysis.explain.heatmaps import grid_of, to_unit
from vitascope.analysis.explain.inputs import Images, as_images, call_hook
from vitascope.analysis.explain.integrated_gradients import sum_cells
from vitascope.analysis.explain.targets import TargetLike, as_target
from vitascope.arguments import checked
from vitascope.models.vision_model import VisionModel, evaluation_mode


@torch.inference_mode(False)  # the caller's inference mode has no gradients
@checked
def libra(model: VisionModel, images: Images, target: TargetLike = None, *, scaled: bool = True) -> Tensor:
    """The contribution of each patch to the target's score, with norms, attention and gates as constants.

    The sum of `pixel_contributions` over the channels and pixels of each cell; where it is negative, the heat
    is 0. The cells are those of `occlusion`. The model runs once, forward and backward, on all images
    together; gradients of its parameters are not changed.

    Raises:
        UserError: gradients that are not finite.
    """
    images = as_images(model, images)
    grid = grid_of(model, images)
    return to_unit(sum_cells(pixel_contributions(model, images, target).sum(dim=1), grid), scaled)


def pixel_contributions(model: VisionModel, images: Tensor, target: TargetLike = None) -> Tensor:
    """Each pixel times its gradient in a `LinearBackward` pass: (B, C, H, W), float32 or float64.

    The sum is the score minus that of a blank image under the constants of this one, which is the part of the
    biases, the positions and the prefix tokens.
    """
    # float32 also for a bf16 model: these are sums of many pixels.
    inputs = images.detach().to(torch.promote_types(images.dtype, torch.float32), copy=True).requires_grad_()
    call_hook()
    with torch.enable_grad(), evaluation_mode(model):
        with LinearBackward():
            pooled = model.embed(inputs.to(images.dtype))  # (B, D)
            logits = model.head(pooled)  # (B, K)
            scores = as_target(target, model.config, logits).score(pooled, logits)
        (gradient,) = torch.autograd.grad(scores.sum(), inputs)
    return gradient * inputs.detach()


class LinearBackward(TorchFunctionMode):
    """Within it, the functions of `RULES` have a linear backward pass; results change by rounding only.

    Parameters are constants too, so that a product with one is not a product of two activations.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = [_without_parameter(value) for value in args]
        kwargs = {name: _without_parameter(value) for name, value in (kwargs or {}).items()}
        if any(isinstance(value, Tensor) and value.requires_grad for value in args):
            function = RULES.get(function, function)
        return function(*args, **kwargs)


def constant(values: Tensor) -> Tensor:
    """The values without a gradient."""
    return values.detach()


def _without_parameter(value: Any) -> Any:
    return constant(value) if isinstance(value, nn.Parameter) else value


def _normalized(x: Tensor, dims: tuple[int, ...], eps: float, *, centred: bool = True) -> Tensor:
    """x, centred first, over the root of its mean square; in float32 at least, as in the kernels."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = x - x.mean(dims, keepdim=True) if centred else x
    return x * constant((x.square().mean(dims, keepdim=True) + eps).rsqrt())


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return (_normalized(x, tuple(range(-len(shape), 0)), eps) * weight + bias).to(x.dtype)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    return (_normalized(x, tuple(range(-len(shape), 0)), eps, centred=False) * weight).to(x.dtype)


def _group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    parts = _normalized(x.unflatten(1, (groups, -1)), (2, 3, 4), eps)  # (B, groups, C / groups, H, W)
    return (parts.flatten(1, 2) * weight[:, None, None] + bias[:, None, None]).to(x.dtype)


def _unit_length(x: Tensor, dim: int = 1, **_: Any) -> Tensor:
    return x / constant(torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_min(1e-12))


def _cosine(x: Tensor, y: Tensor, dim: int) -> Tensor:
    return (_unit_length(x, dim) * _unit_length(y, dim)).sum(dim)


def _gated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """x times the constant f(x) / x."""
    return lambda x, **options: x * constant(function(x, **options) / x.where(x != 0, 1))


def _attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    return F.scaled_dot_product_attention(constant(q), constant(k), v, *options)


def _product(x: Tensor, y: Any) -> Tensor:
    if not (x.requires_grad and isinstance(y, Tensor) and y.requires_grad):
        return x * y
    return (x * constant(y) + constant(x) * y) / 2


RULES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.group_norm: _group_norm,
    F.normalize: _unit_length,
    F.cosine_similarity: _cosine,
    F.scaled_dot_product_attention: _attention,
    Tensor.softmax: lambda x, dim: constant(x.softmax(dim)),
    torch.sigmoid: lambda x: constant(torch.sigmoid(x)),  # of QuickGELU
    Tensor.tanh: _gated(torch.tanh),
    F.gelu: _gated(F.gelu),
    F.silu: _gated(F.silu),
    Tensor.mul: _product,  # of SwiGLU
}
"""The functions of the models that are not piecewise linear, each with its linear backward pass."""
