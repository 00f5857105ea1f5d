from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.model import random_images, small_config
from tests.training.tasks import masked_task, small_module
from vitascope.errors import UserError
from vitascope.model.attention import SelfAttention
from vitascope.model.vit import VisionTransformer
from vitascope.options.groups import Masking
from vitascope.options.recipes import TrainConfig
from vitascope.training.optim import optimizer_of
from vitascope.training.tasks.autoencoder import MaskedAutoencoder
from vitascope.training.tasks.masked import body_config


def lengths(module: nn.Module, images: torch.Tensor, *fields: torch.Tensor) -> list[int]:
    """The number of tokens in each attention, in order."""
    seen: list[int] = []
    for part in module.modules():
        if isinstance(part, SelfAttention):
            part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    module(images, *fields)
    return seen


def test_encoder_gets_visible_patches_only_and_the_decoder_all() -> None:
    task = masked_task("mae", corrupt=0.75, num_registers=2)
    module, images = small_module(task), random_images(2, 3, 32, 32)
    seen = lengths(module, images, *task.hidden(0, 0, np.arange(2)))
    assert seen == [3 + 4] * 3 + [3 + 16]  # class token and registers, of 16 patches


@pytest.mark.parametrize(
    "options",
    [{}, {"stem": "tokenizer", "tokenizer_widths": (4, 4)}, {"stem": "resnet", "resnet_layers": (1,)}],
    ids=["conv", "tokenizer", "resnet"],
)
def test_hidden_patches_have_no_gradient(options: dict[str, Any]) -> None:
    module = small_module(masked_task("mae", **options))
    images = random_images(1, 3, 32, 32).requires_grad_()
    places, visible = torch.tensor([[2, 9]]), torch.tensor([[0, 1, *range(3, 9), *range(10, 16)]])
    outputs = module(images, places, visible)
    assert outputs.shape == (1, 2, 3 * 8 * 8)
    (gradient,) = torch.autograd.grad(outputs[:, 0].square().sum(), images)
    by_patch = gradient.unflatten(2, (4, 8)).unflatten(4, (4, 8)).abs().sum(dim=(0, 1, 3, 5)).flatten()
    assert (by_patch == 0).tolist() == [place in (2, 9) for place in range(16)]


@pytest.mark.parametrize("positions", ["learned", "learned_2d", "sincos_2d", "rotary", "none"])
def test_features_of_visible_patches_are_those_of_the_shorter_sequence(positions: str) -> None:
    body = small_module(masked_task("mae", positions=positions)).body
    images, everything = random_images(2, 3, 32, 32), torch.arange(16).expand(2, -1)
    z0 = body.prepare_tokens(images)
    torch.testing.assert_close(body.encode(z0, (4, 4), visible=everything), body.encode(z0, (4, 4)))
    shuffled = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i)) for i in (1, 2)])
    kept, ordered = shuffled[:, :5], shuffled[:, :5].sort(dim=1)
    one, other = body.encode(z0, (4, 4), visible=kept), body.encode(z0, (4, 4), visible=ordered.values)
    torch.testing.assert_close(one[:, 0], other[:, 0])  # the class token's state does not depend on the order
    assert not torch.allclose(one[:, 0], body.encode(z0, (4, 4))[:, 0])


def test_prediction_depends_on_the_position_of_the_hidden_patch() -> None:
    module, images = small_module(masked_task("mae")), random_images(1, 3, 32, 32)
    visible = torch.tensor([[1, 4, 6]])
    outputs = module(images, torch.tensor([[0, 2, 3, 5]]), visible)
    assert (outputs[:, 1:] - outputs[:, :-1]).abs().amax(dim=2).min() > 1e-3
    again = module(images, torch.tensor([[3, 0, 5, 2]]), visible)
    torch.testing.assert_close(again, outputs[:, [2, 0, 3, 1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stem": "overlap"}, "stem 'overlap': its patches share pixels"),
        ({"patch_dropout": 0.5}, "patch_dropout drops patches"),
        ({"attention": "axial"}, "with axial attention, the encoder needs every patch"),
        ({"attention": "window", "window": 2}, "with window attention, the encoder needs every patch"),
        ({"positions": "relative"}, "with relative positions, the encoder needs every patch"),
        (
            {"image_size": 4, "patch_size": 1, "in_channels": 1},
            "patch_size 1: .*; set patch_size to 2 or more",
        ),
    ],
)
def test_unsupported_encoder_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MaskedAutoencoder(VisionTransformer(body_config(small_config(**options))), 192, Masking(target="mae"))


def test_mask_token_has_no_weight_decay_and_the_decoder_the_full_rate() -> None:
    module = small_module(masked_task("mae"))
    config = TrainConfig(layer_decay=0.5, weight_decay=0.1).optimization
    groups = optimizer_of(module, config).param_groups
    found = {
        name: (group["weight_decay"], group["lr_scale"])
        for group in groups
        for name, parameter in module.named_parameters()
        if any(parameter is other for other in group["params"])
    }
    assert found["mask_token"][0] == 0
    assert {scale for name, (_, scale) in found.items() if name.startswith(("decoder", "head"))} == {1.0}
