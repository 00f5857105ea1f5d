from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.models import random_images, small_config
from tests.training.tasks import TRAINABLE, examples, masked_task, noisy_set, pictures, small_module
from vitascope.analysis.report.figures import draw_masked_patches
from vitascope.data.loading import Loader
from vitascope.errors import UserError
from vitascope.models.attention import SelfAttention
from vitascope.models.vit import VisionTransformer
from vitascope.training.optimizers import optimizer_of
from vitascope.training.options.groups import Masking
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.run import Run
from vitascope.training.tasks.masked import (
    MaskedAutoencoder,
    MaskedPatchModel,
    body_config,
    corruption,
    random_mask,
)


def test_80_percent_of_corrupted_patches_are_masked_10_replaced_and_10_kept() -> None:
    places, sources, masked = corruption(0, 3, np.arange(4000), 64, 0.5)
    replaced = sources != places
    assert not (masked & replaced).any()  # no patch is of two kinds
    corrupted = (sources[:, :, None] == places[:, None, :]).any(dim=2)
    assert not (corrupted & replaced).any()  # a corrupted patch replaces no other
    kinds = torch.stack([masked, replaced, ~masked & ~replaced]).double().mean(dim=(1, 2))
    expected = torch.tensor([0.8, 0.1, 0.1]).double()
    assert ((kinds - expected).abs() < 5 * (expected * (1 - expected) / masked.numel()).sqrt()).all()


@pytest.mark.parametrize("kind", [corruption, random_mask])
def test_hidden_patches_depend_only_on_seed_epoch_and_index(kind: Callable[..., Any]) -> None:
    def draw(seed: int, epoch: int, indices: list[int]) -> Any:
        return kind(seed, epoch, np.array(indices), 64, 0.75)

    together, others = draw(7, 2, [5, 9, 1]), draw(7, 2, [1, 4, 5, 8])
    for ours, theirs in zip(together, others, strict=True):
        assert torch.equal(ours[0], theirs[2])
        assert torch.equal(ours[2], theirs[0])
    for seed, epoch, index in ((8, 2, 5), (7, 3, 5), (7, 2, 6)):
        assert not torch.equal(draw(seed, epoch, [index]).places, together.places[:1])


# Random masks


COLORS = ("mean_color", "downsampled")
TARGETS = (*COLORS, "pixels", "mae")


def test_share_that_corrupts_no_patch_or_all_is_rejected() -> None:
    for share, count in ((0.01, 0), (0.99, 16)):
        with pytest.raises(UserError, match=f"corrupt {share} of 16 patches is {count}: "):
            masked_task(corrupt=share)


# The model


@pytest.mark.parametrize("target", TARGETS)
def test_hidden_pixels_do_not_change_the_output(target: str) -> None:
    task = masked_task(target)
    module, images = small_module(task), random_images(6, 3, 32, 32)
    drawn = task.hidden(0, 0, np.arange(6))
    hidden = torch.zeros(6, 16, dtype=torch.bool)
    hidden.scatter_(1, drawn.places, drawn.masked | (drawn.sources != drawn.places))
    pixels = hidden.view(6, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)  # (B, 1, H, W)
    other = torch.where(pixels, random_images(6, 3, 32, 32, seed=9), images)
    assert torch.equal(module(other, *drawn), module(images, *drawn))
    assert not torch.equal(module(images.flip(0), *drawn), module(images, *drawn))


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_parameter_has_a_gradient_with_any_options(name: str) -> None:
    options = TRAINABLE[name]
    every_patch = "attention" in options or "relative" in options.get("positions", "")
    for target in ("mean_color",) if every_patch else ("mean_color", "mae"):
        task = masked_task(target, **options)
        module = small_module(task).train()
        torch.manual_seed(0)
        task.loss(module, examples(pictures(4, 3, 32, 32)))[0].backward()
        assert all(value.grad is not None and value.grad.any() for value in module.parameters()), target


SHARED = "its patches share pixels"
BODIES: dict[str, tuple[dict[str, Any], str]] = {  # that cannot be pre-trained, and why
    "overlap": ({"stem": "overlap"}, SHARED),
    "resnet": ({"stem": "resnet", "resnet_layers": (1,)}, SHARED),
    "tokenizer": ({"stem": "tokenizer", "tokenizer_widths": (4, 4)}, SHARED),
    "map": ({"pool": "map"}, "would not train pool.query"),
    "norm after": ({"pool_norm": "after"}, "would not train pool_norm.weight"),
    "dropout": ({"patch_dropout": 0.5}, "patch_dropout drops patches"),
}


def test_unsupported_body_is_rejected() -> None:
    for options, message in BODIES.values():
        with pytest.raises(UserError, match=message):
            MaskedPatchModel(VisionTransformer(body_config(small_config(**options))), 512)


# The task


@pytest.mark.parametrize("target", TARGETS)
def test_only_corrupted_patches_are_predicted(target: str) -> None:
    task, images = masked_task(target), pictures(12, 3, 32, 32)
    predictions = 0.1 * random_images(12, 8, task.target.outputs)
    drawn = task.hidden(4, 1, np.arange(10, 22))

    assert (drawn.sources != drawn.places).any() == (target != "mae")

    class Constant(torch.nn.Module):
        def forward(self, images: torch.Tensor, *fields: torch.Tensor) -> torch.Tensor:
            for field, expected in zip(fields, drawn, strict=True):
                assert torch.equal(field, expected)
            assert images.min() < -0.9  # normalized
            return predictions

    loss, sums = task.loss(Constant(), examples(images, first=10, seed=4, epoch=1))
    wanted = task.target.targets(images)
    asked = torch.stack([wanted[row, drawn.places[row]] for row in range(12)])  # (B, n, X)
    if target not in COLORS:
        expected = (predictions - asked).square().mean()
        assert sums.keys() == {"loss", "count"}
    else:
        logits = predictions.view(12, 8, asked.shape[2], 512)
        chosen = logits.log_softmax(dim=3).gather(3, asked[..., None])
        expected = -chosen.mean()
        accuracy = (logits.argmax(dim=3) == asked).float().mean()
        torch.testing.assert_close(sums["accuracy"] / sums["count"], accuracy)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums["loss"] / sums["count"], expected)
    assert sums["count"] == 12


@pytest.mark.parametrize("target", ["downsampled", "mae"])
def test_a_new_model_finds_all_colours_equally_probable_also_in_bf16(target: str) -> None:
    """A masked autoencoder's normalized pixels have a variance of 1, which its first answers miss."""
    task = masked_task(target)
    torch.manual_seed(0)
    module = task.module(VisionTransformer(task.config))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = task.loss(module, examples(pictures(4, 3, 32, 32)))
    loss.backward()
    assert loss.dtype == torch.float32
    if target in COLORS:
        assert loss.item() == pytest.approx(np.log(8**3), rel=1e-5)
    else:
        assert loss.item() > 0.9


@pytest.mark.parametrize("target", TARGETS)
def test_validation_is_the_mean_over_a_split_and_repeatable(target: str) -> None:
    task, images = masked_task(target, dropout=0.5), noisy_set(7)
    module = small_module(task).train()
    loader = Loader(images, task.preprocess, 3, workers=0)
    found = task.validate(module, loader, torch.float32)
    assert module.training
    assert found == task.validate(module, loader, torch.float32)
    assert found.keys() == ({"loss", "accuracy"} if target in COLORS else {"loss"})
    pixels = torch.from_numpy(np.stack([task.preprocess.pixels(source) for source in images.sources]))
    _, sums = task.loss(module.eval(), examples(pixels / 255))
    assert found["loss"] == pytest.approx(float(sums["loss"] / 7), rel=1e-5)
    if target in COLORS:
        assert found["accuracy"] == pytest.approx(float(sums["accuracy"] / 7))


@pytest.mark.parametrize(
    ("target", "channels"), [("mean_color", 3), ("downsampled", 1), ("pixels", 3), ("mae", 1)]
)
def test_figure_shows_hidden_patches_and_predictions(tmp_path: Path, target: str, channels: int) -> None:
    task, images = masked_task(target, in_channels=channels), noisy_set(3, channels=channels)
    shown = task.pictures(small_module(task), images)
    found = draw_masked_patches(Run(tmp_path), shown)
    assert found == {"masked": tmp_path / "figures" / "masked.png"}
    with Image.open(found["masked"]) as figure:
        assert min(figure.size) > 300
    rows, hidden, replaced, kept = shown
    assert hidden.shape == replaced.shape == kept.shape == (3, 4, 4)
    corrupted = hidden | replaced | kept
    assert ((hidden + 0 + replaced + kept).sum(axis=(1, 2)) == 8).all()  # each is one of the three
    pixels = np.stack([task.preprocess.pixels(source) for source in images.sources])
    np.testing.assert_array_equal(rows["image"], pixels)
    predicted = task.target.caption
    for name, changed in (("given", replaced), (predicted, corrupted), ("right answer", corrupted)):
        where = changed.repeat(8, axis=1).repeat(8, axis=2)[:, None] & np.ones_like(pixels, dtype=bool)
        np.testing.assert_array_equal(rows[name][~where], pixels[~where])
        answered = target not in COLORS and name == "right answer"  # with the pixels themselves
        if where.any() and not answered:
            assert (rows[name][where] != pixels[where]).mean() > 0.5
    assert (rows[predicted] != rows["right answer"]).any()


def lengths(module: nn.Module, images: torch.Tensor, *fields: torch.Tensor) -> list[int]:
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


def test_unsupported_encoder_is_rejected() -> None:
    for options, message in (
        BODIES["overlap"],
        BODIES["dropout"],
        ({"attention": "axial"}, "with axial attention, the encoder needs every patch"),
        ({"attention": "window", "window": 2}, "with window attention, the encoder needs every patch"),
        ({"positions": "relative"}, "with relative positions, the encoder needs every patch"),
        ({"image_size": 4, "patch_size": 1, "in_channels": 1}, "patch_size 1: .*; set patch_size to 2 or"),
    ):
        body = VisionTransformer(body_config(small_config(**options)))
        with pytest.raises(UserError, match=message):
            MaskedAutoencoder(body, 192, Masking(target="mae"))


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
