"""Token merging, and attention heads and MLP neurons pruned for real speed.

Heads and neurons are ranked by how much the loss would change without them, to first order: |sum of
activation times gradient|, image by image (Michel et al. 2019, "Are Sixteen Heads Really Better than One?",
equation 2; Molchanov et al. 2019, "Importance Estimation for Neural Network Pruning"). Each layer keeps the
same number, its best. The mean of the others stays in the bias of the layer that they fed.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.analysis.explain.attention import attending
from vitascope.errors import UserError
from vitascope.models.attention import SelfAttention
from vitascope.models.config import ViTConfig
from vitascope.models.encoder import MLP, SwiGLU
from vitascope.models.vision_model import VisionModel, evaluation_mode
from vitascope.models.vit import VisionTransformer


def merge_tokens(model: VisionModel, count: int) -> VisionTransformer:
    """A model of the same weights in which every block merges `count` patches with the most similar ones.

    0 removes merging. It needs global attention, and positions that are added to the tokens.
    """
    config = attending(model).config.replace(token_merging=count)
    return with_state(model, config, model.state_dict(), model.training)


def prune(
    model: VisionModel,
    examples: Iterable[tuple[Tensor, Tensor]],
    *,
    num_heads: int | None = None,
    mlp_ratio: float | None = None,
) -> VisionTransformer:
    """A new model, in evaluation mode, with the best heads and neurons of each layer; None keeps all.

    `examples` are normalized images (B, C, H, W) on its device and, for its loss, their classes (B,) or float
    shares of the classes (B, K); independent classes need the latter. A few hundred images are enough.
    """
    model = attending(model)
    config = pruned_config(model.config, num_heads, mlp_ratio)
    if not config.gives_classes:
        raise UserError("this model has no classes, and so no loss to rank heads and neurons by")
    watched = watch(model, examples)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if not config.block.linear_bias:  # the mean of what is left out becomes one
        config, like = config.replace(linear_bias=True), next(model.parameters())
        with torch.device("meta"):
            biased = VisionTransformer(model.config.replace(linear_bias=True)).state_dict()
        state |= {name: like.new_zeros(it.shape) for name, it in biased.items() if name not in state}
    for name, channels in watched.items():
        neurons = config.pool_mlp_dim if name.startswith("pool.") else config.mlp_dim
        kept = channels.best(config.num_heads if channels.into == "qkv" else neurons)
        narrow(state, name, channels, kept)
    return with_state(model, config, state, training=False)


def pruned_config(config: ViTConfig, num_heads: int | None, mlp_ratio: float | None) -> ViTConfig:
    """The configuration with this number of heads and this MLP ratio."""
    if num_heads is not None and num_heads > config.num_heads:
        raise UserError(f"the model has {config.num_heads} heads, so {num_heads} cannot be kept")
    if mlp_ratio is not None and mlp_ratio > config.block.mlp_ratio:
        raise UserError(f"the model has mlp_ratio {config.block.mlp_ratio:g}, so it cannot be {mlp_ratio:g}")
    fewer = num_heads is not None and num_heads < config.num_heads
    if fewer and (config.embedding.relative or config.embedding.positions == "rotary_mixed"):
        raise UserError(
            f"{config.embedding.positions} positions give each head parameters in one tensor of all layers, "
            "so that layers cannot keep different heads; prune the MLPs alone"
        )
    inner = config.norms.inner_norm
    if (fewer and inner == "all") or (mlp_ratio is not None and inner != "none"):
        raise UserError(
            f"inner_norm {inner!r} normalizes all {'heads' if fewer else 'neurons'} of a block together, so "
            "none can be left out: merge tokens instead"
        )
    if fewer:
        config = config.replace(num_heads=num_heads, head_dim=config.head_dim)
    return config if mlp_ratio is None else config.replace(mlp_ratio=mlp_ratio)


def with_state(
    source: VisionModel, config: ViTConfig, state: Mapping[str, Tensor], training: bool
) -> VisionTransformer:
    """A model of these tensors, not of copies, with the preprocessing of its source."""
    with torch.device("meta"):
        model = VisionTransformer(config)
    model.load_state_dict(dict(state), strict=True, assign=True)
    model.preprocess = source.preprocess
    return model.train(training)


class Channels:
    """The channels from layer `into` to layer `out`: their importance and their mean over examples."""

    def __init__(self, into: str, out: str, width: int) -> None:
        self.into, self.out = into, out
        self.width = width  # channels that are kept or pruned together: those of a head, or one
        self._importance: Tensor | None = None  # (C / width,), float64, summed over images
        self._sum: Tensor | None = None  # (C,), float64, over tokens
        self._tokens = 0

    def before(self, _: nn.Module, args: tuple[Tensor]) -> None:
        """Record the input (B, n, C) of the layer `out`; a forward pre-hook."""
        inputs = args[0]
        seen = inputs.detach()
        total = seen.sum(dim=(0, 1), dtype=torch.float64)
        self._sum = total if self._sum is None else self._sum + total
        self._tokens += seen.shape[0] * seen.shape[1]

        def judge(gradient: Tensor) -> None:
            by_channel = (seen * gradient).sum(dim=1)  # (B, C)
            parts = by_channel.unflatten(1, (-1, self.width)).sum(dim=2)  # (B, C / width)
            total = parts.abs().sum(dim=0, dtype=torch.float64)
            self._importance = total if self._importance is None else self._importance + total

        inputs.register_hook(judge)

    def best(self, count: int) -> Tensor:
        """The channels of the `count` most important parts, in their order, (count * width,)."""
        assert self._importance is not None
        parts = self._importance.topk(count).indices.sort().values
        return (parts[:, None] * self.width + torch.arange(self.width, device=parts.device)).flatten()

    @property
    def mean(self) -> Tensor:
        """The mean of each channel, (C,), float64."""
        assert self._sum is not None
        return self._sum / self._tokens


def watch(model: VisionTransformer, examples: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Channels]:
    """Run the examples and record every attention's heads and every MLP's neurons, by the module's name."""
    found: dict[str, Channels] = {}
    seen = 0
    with ExitStack() as hooks, evaluation_mode(model), torch.inference_mode(False), torch.enable_grad():
        for name, module in model.named_modules():
            if isinstance(module, SelfAttention):
                found[name] = Channels("qkv", "proj", model.config.head_dim)
                hooks.enter_context(module.proj.register_forward_pre_hook(found[name].before))
            elif isinstance(module, MLP | SwiGLU):
                found[name] = Channels("fc1", "fc2", 1)
                hooks.enter_context(module.fc2.register_forward_pre_hook(found[name].before))
        for images, targets in examples:
            images = images.detach().clone().requires_grad_()  # so that activations get gradients
            logits, known = model(images).float(), ~targets.isnan()
            if model.config.decision_thresholds:  # any classes may apply
                loss = F.binary_cross_entropy_with_logits(logits[known], targets[known], reduction="sum")
            else:
                loss = F.cross_entropy(logits, targets, reduction="sum")
            torch.autograd.grad(loss, images)  # none for the weights
            seen += len(images)
    if not seen:
        raise UserError("pruning needs labelled images; none given")
    return found


def narrow(state: dict[str, Tensor], name: str, channels: Channels, kept: Tensor) -> None:
    """Keep only some channels of a module; the mean of the others goes into the bias of the next layer."""
    mean = channels.mean
    width = len(mean)
    if len(kept) == width:
        return
    for kind in ("weight", "bias"):
        key = f"{name}.{channels.into}.{kind}"
        if key in state:  # queries, keys and values, or a gate and its values
            parts = state[key].split(width)
            state[key] = torch.cat([part[kept] for part in parts])
    weight, bias = f"{name}.{channels.out}.weight", f"{name}.{channels.out}.bias"
    lost = mean.clone()
    lost[kept] = 0
    state[bias] = (state[bias] + state[weight].double() @ lost).to(state[bias].dtype)
    state[weight] = state[weight][:, kept].contiguous()
