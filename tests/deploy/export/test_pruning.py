import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import random_images, small_model
from vitascope.deploy.export.pruning import merge_tokens, prune
from vitascope.errors import UserError
from vitascope.models.attention import SelfAttention
from vitascope.models.encoder import MLP, SwiGLU
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.transfer import adapted, transfer

PRUNABLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"pool": "mean"},
    "map, swiglu": {"pool": "map", "mlp": "swiglu"},
    "rotary, no key bias": {"positions": "rotary", "qkv_bias": "no_key", "head_dim": 8},
    "no bias, distillation": {"qkv_bias": "none", "distillation_token": True},
    "axial, layer scale": {"attention": "axial", "layer_scale": 0.5},
    "norm of queries and keys": {"qk_norm": True, "norm_type": "rms"},
}
prunable = pytest.mark.parametrize("options", PRUNABLE.values(), ids=PRUNABLE)


def examples(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    images, labels = random_images(count, 3, 32, 32), torch.arange(count) % 5
    return [(images[:4], labels[:4]), (images[4:], labels[4:])]


def four_heads(**options: Any) -> VisionTransformer:
    return small_model(num_heads=4, **options)


def fed_layers(model: VisionTransformer) -> dict[str, tuple[nn.Linear, int]]:
    found: dict[str, tuple[nn.Linear, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention):
            found[name] = module.proj, model.config.head_dim
        elif isinstance(module, MLP | SwiGLU):
            found[name] = module.fc2, 1
    return found


def masking(kept: Tensor, mean: Tensor) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    return lambda _, inputs: (torch.where(kept, inputs[0], mean.to(inputs[0].dtype)),)


def keeping(seen: dict[str, Tensor], name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
    return lambda _, inputs, __: seen.update({name: inputs[0]})


def masked(model: VisionTransformer, num_heads: int, hidden: int) -> VisionTransformer:
    """A reference for pruning: inputs set to their mean, with scores computed image by image."""
    inputs: dict[str, list[Tensor]] = {}
    scores: dict[str, list[Tensor]] = {}
    layers = fed_layers(model)
    for images, labels in examples():
        for image, label in zip(images, labels, strict=True):
            seen: dict[str, Tensor] = {}
            hooks = [layer.register_forward_hook(keeping(seen, name)) for name, (layer, _) in layers.items()]
            loss = F.cross_entropy(model(image[None]), label[None])
            gradients = torch.autograd.grad(loss, list(seen.values()))
            for hook in hooks:
                hook.remove()
            for (name, values), gradient in zip(seen.items(), gradients, strict=True):
                inputs.setdefault(name, []).append(values[0].detach())
                parts = (values * gradient).sum(1).unflatten(1, (-1, layers[name][1])).sum(2)
                scores.setdefault(name, []).append(parts.abs().detach()[0])
    other = copy.deepcopy(model)
    for name, (layer, width) in fed_layers(other).items():
        importance = torch.stack(scores[name]).mean(0)
        count = num_heads if width > 1 else hidden
        kept = (importance >= importance.sort(descending=True).values[count - 1]).repeat_interleave(width)
        layer.register_forward_pre_hook(masking(kept, torch.cat(inputs[name]).mean(0)))
    return other


@prunable
def test_pruned_model_equals_one_whose_weakest_channels_are_their_mean(options: dict[str, Any]) -> None:
    model = four_heads(**options)
    pruned = prune(model, examples(), num_heads=2, mlp_ratio=1.5)
    assert (pruned.config.num_heads, pruned.config.mlp_dim) == (2, 24)
    images, expected = random_images(3, 3, 32, 32, seed=5), masked(model, 2, 24)
    with torch.no_grad():
        torch.testing.assert_close(pruned(images), expected(images), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(pruned(images), model(images), atol=1e-3)


def test_pruning_gives_a_model_without_biases_the_means_as_biases() -> None:
    model, images = four_heads(linear_bias=False, mlp="swiglu"), random_images(3, 3, 32, 32, seed=5)
    pruned = prune(model, examples(), num_heads=2, mlp_ratio=1.5)
    assert pruned.config.block.linear_bias
    torch.testing.assert_close(pruned(images), masked(model, 2, 24)(images), rtol=1e-4, atol=1e-4)


def test_the_mlp_of_attention_pooling_keeps_a_width_of_its_own() -> None:
    model, images = four_heads(pool="map", pool_mlp_ratio=2.0), random_images(3, 3, 32, 32)
    pruned = prune(model, examples(), mlp_ratio=1.5)
    assert (pruned.config.mlp_dim, pruned.pool.mlp.fc1.out_features) == (24, 32)
    assert pruned(images).isfinite().all()


def test_invalid_pruning_is_rejected() -> None:
    for options, asked, complaint in (
        ({}, {"num_heads": 5}, "the model has 4 heads, so 5 cannot be kept"),
        ({}, {"num_heads": 0}, "num_heads must be at least 1, not 0"),
        ({}, {"mlp_ratio": 4.5}, "the model has mlp_ratio 4, so it cannot be 4.5"),
        ({}, {"mlp_ratio": 0.01}, "gives an MLP without a hidden layer"),
        ({"positions": "relative"}, {"num_heads": 2}, "relative positions give each head parameters"),
        ({"head": "none"}, {"num_heads": 2}, "this model has no classes"),
    ):
        with pytest.raises(UserError, match=complaint):
            prune(four_heads(**options), examples(), **asked)
    with pytest.raises(UserError, match="pruning needs labelled images"):
        prune(four_heads(), [], num_heads=2)


def test_merged_model_shares_the_weights_and_merging_is_reversible() -> None:
    model, images = small_model(), random_images(2, 3, 32, 32)
    merged = merge_tokens(model, 3)
    assert merged.config.block.token_merging == 3
    assert [p.data_ptr() for p in merged.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert not torch.allclose(merged(images), model(images), atol=1e-3)
    assert torch.equal(merge_tokens(merged, 0)(images), model(images))


def test_compressed_model_can_be_saved_loaded_and_trained(tmp_path: Any) -> None:
    small = merge_tokens(prune(four_heads(), examples(), num_heads=1, mlp_ratio=2), 2)
    images = random_images(2, 3, 32, 32)
    save_pretrained(small, tmp_path)
    again = from_pretrained(tmp_path)
    assert again.config == small.config
    assert torch.equal(again(images), small(images))
    config = adapted(again.config, None, "compressed", {"num_classes": 3})
    target = VisionTransformer(config)  # type: ignore[arg-type]
    transfer(again, target, "compressed")
    assert (config.num_heads, config.head_dim, config.mlp_dim) == (1, 4, 32)  # type: ignore[union-attr]
    assert target.config.block.token_merging == 2
    target.train()(images).sum().backward()
