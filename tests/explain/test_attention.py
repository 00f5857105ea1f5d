"""Attention of single layers, heads and patches, and attention layer by layer."""

import itertools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.explain import MODELS, heatmap, shares
from tests.model import random_images, small_model
from vitascope import explain
from vitascope.errors import UserError
from vitascope.explain.attention import (
    AttentionStream,
    head_maps,
    layer_attention,
    patch_attention,
    stream_attention,
    to_heatmap,
)
from vitascope.explain.rollout import rollout
from vitascope.model.vit import VisionTransformer

# --- attention


of_every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def images_of(model: VisionTransformer, count: int = 3) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


def directly(model: VisionTransformer, weights: Tensor, head: int | None) -> np.ndarray:
    """The same map from a layer's traced weights (B, heads, T, T), in float64, image by image."""
    maps = []
    for each in weights.detach().double().numpy():
        maps.append(heatmap(model.config, each.mean(axis=0) if head is None else each[head]))
    return np.stack(maps)


@of_every_model
def test_shares_cover_exactly_the_pooled_tokens(options: dict[str, Any]) -> None:
    model = small_model(**options)
    share = shares(model.config)
    assert share.sum() == pytest.approx(1)
    tokens = random_images(1, model.config.num_tokens, model.config.embed_dim).requires_grad_()
    model.pool(tokens).square().sum().backward()
    assert tokens.grad is not None
    np.testing.assert_array_equal(tokens.grad[0].abs().sum(dim=1) > 0, share > 0)
    # the others are linear: of the identity, they return the shares
    if model.config.option("pool") not in ("map", "sequence"):
        pooled = model.pool(torch.eye(len(share))[None]).reshape(-1, len(share))
        np.testing.assert_allclose(pooled.mean(dim=0), share, atol=1e-7)


@of_every_model
def test_map_equals_the_traced_weights(options: dict[str, Any]) -> None:
    model = small_model(image_size=(16, 48), **options)
    images = images_of(model)
    attention = model.trace(images, attention=True).attention
    assert attention is not None
    for layer, head in itertools.product([0, 1, 2, -1, -3], [None, 0, 1]):
        heat, expected = (
            explain.attention(model, images, layer, head),
            directly(model, attention[layer], head),
        )
        message = f"layer {layer}, head {head}"
        np.testing.assert_allclose(heat, expected, atol=1e-6, rtol=1e-5, err_msg=message)


@of_every_model
def test_map_shows_only_attention_from_pooled_tokens_to_patches(options: dict[str, Any]) -> None:
    model = small_model(**options)
    images, T = images_of(model), model.config.num_tokens
    rows = torch.rand(3, T, T, generator=torch.Generator().manual_seed(0))
    others = rows.clone()
    others[:, shares(model.config) == 0] = torch.rand(T)
    others[:, :, : model.config.num_prefix_tokens] = 9.0
    heat = to_heatmap(model, images, rows)
    assert torch.equal(to_heatmap(model, images, others), heat)
    np.testing.assert_allclose(heat, [heatmap(model.config, row) for row in rows.double().numpy()], atol=1e-6)


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("options", [{}, {"pool": "mean", "num_registers": 1}])
def test_blocks_above_the_layer_are_not_run(options: dict[str, Any], layer: int) -> None:
    model = small_model(**options)
    images, run = images_of(model), []
    expected = explain.attention(model, images, layer)
    for index, block in enumerate(model.encoder.blocks):
        block.register_forward_hook(lambda module, inputs, output, index=index: run.append(index))
        if index > layer % 3:
            block.register_forward_pre_hook(fails)
    assert torch.equal(explain.attention(model, images, layer), expected)
    assert run == list(range(layer % 3 + 1))


def fails(module: Any, inputs: Any) -> None:
    raise AssertionError("a block runs that nothing needs")


def test_weights_of_a_layer_equal_the_trace() -> None:
    model = small_model(distillation_token=True).train()
    images = images_of(model)
    traced = model.eval().trace(images, attention=True).attention
    assert traced is not None
    for layer in (0, 2, -1):
        weights = layer_attention(model.train(), images, layer)
        assert model.training
        assert not weights.requires_grad
        torch.testing.assert_close(weights, traced[layer])


def test_patch_attended_by_the_class_token_is_the_warmest() -> None:
    model = small_model(depth=1, num_heads=1, embed_dim=8)
    with torch.no_grad():  # keys that are large for patches of one colour, a constant query
        model.encoder.blocks[0].attention.qkv.weight.zero_()
        model.encoder.blocks[0].attention.qkv.bias.fill_(1)
        model.positions.weight.zero_()
        model.positions.weight[0, 1 + 6] = torch.tensor([9.0] + [0.0] * 7)  # patch 6: row 1, column 2
        model.encoder.blocks[0].attention.qkv.weight[8:16, 0] = 5
        model.patch_embedding.weight.zero_()
        model.patch_embedding.bias.fill_(1)
        model.class_token.fill_(1)
        model.encoder.blocks[0].norm1.weight.fill_(1)
        model.encoder.blocks[0].norm1.bias.zero_()
    heat = explain.attention(model, images_of(model, 1))[0]
    assert divmod(int(heat.argmax()), 4) == (1, 2)
    assert heat.flatten().sort().values[-2] < 0.5


@pytest.mark.parametrize("head", [2, -1])
def test_missing_head_is_rejected_with_the_range(head: int) -> None:
    model = small_model()
    with pytest.raises(UserError, match=rf"no head {head}: each layer has 2, 0 to 1"):
        explain.attention(model, images_of(model), head=head)


def test_model_that_attends_to_no_patch_has_a_map_of_zeros() -> None:
    model = small_model(num_registers=1)
    rows = torch.zeros(2, 18, 18)
    rows[:, :, 1] = 1  # all tokens attend to the register
    assert torch.equal(to_heatmap(model, random_images(2, 3, 32, 32), rows), torch.zeros(2, 4, 4))


# --- heads


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_each_map_equals_that_of_its_layer_and_head(options: dict[str, Any]) -> None:
    model = small_model(image_size=(16, 48), **options)
    images = random_images(2, 3, 16, 48)
    maps = head_maps(model, images)
    assert maps.shape == (2, 3, 2, *model.config.grid)
    assert maps.dtype == torch.float32
    assert not maps.requires_grad
    for layer in range(3):
        for head in range(2):
            torch.testing.assert_close(maps[:, layer, head], explain.attention(model, images, layer, head))
    torch.testing.assert_close(maps.amax(dim=(3, 4)), torch.ones(2, 3, 2))


# --- patch attention


def images_for_patch_attention(model: VisionTransformer, count: int = 2) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


@of_every_model
def test_map_is_the_patchs_row_of_the_traced_weights(options: dict[str, Any]) -> None:
    model = small_model(image_size=(16, 48), **options)
    images = images_for_patch_attention(model)
    attention = model.trace(images, attention=True).attention
    assert attention is not None
    gh, gw = model.config.grid
    for (layer, head), (row, column) in itertools.product(
        [(0, None), (1, 1), (-1, 0), (-3, None)], [(0, 0), (1, 0), (0, gw - 1), (gh - 1, gw - 2)]
    ):
        weights = attention[layer].detach().double().numpy()  # (B, heads, T, T)
        heat = patch_attention(model, images, (row, column), layer, head)
        assert heat.shape == (2, gh, gw)
        assert heat.dtype == torch.float32
        assert not heat.requires_grad
        for image in range(2):
            expected = np.zeros((gh, gw))
            for k in range(gh):
                for m in range(gw):
                    query, key = (
                        model.config.num_prefix_tokens + gw * line + place
                        for line, place in ((row, column), (k, m))
                    )
                    pair = weights[image, :, query, key]
                    expected[k, m] = pair.mean() if head is None else pair[head]
            message = f"layer {layer}, head {head}, patch {(row, column)}"
            np.testing.assert_allclose(heat[image], expected / expected.max(), atol=1e-5, err_msg=message)


def test_patch_attends_within_its_window() -> None:
    model = small_model(attention="window", window=2)
    heat = patch_attention(model, images_for_patch_attention(model), (1, 2))
    assert (heat[:, :2, 2:] > 0).all()
    assert heat.sum() == heat[:, :2, 2:].sum()


def test_patch_that_attends_only_to_other_tokens_has_a_map_of_zeros() -> None:
    model = small_model(depth=1, num_heads=1, positions="none", num_registers=1)
    attention = model.encoder.blocks[0].attention
    with torch.no_grad():  # the register's key is far along the queries of all
        for parameter in model.encoder.blocks[0].norm1.parameters():
            parameter.fill_(1)
        model.encoder.blocks[0].norm1.bias.zero_()
        attention.qkv.weight.zero_()
        attention.qkv.bias.fill_(1)
        attention.qkv.weight[16:32, 0] = 500
        model.class_token.fill_(1)
        model.patch_embedding.weight.zero_()
        model.patch_embedding.bias.copy_(torch.tensor([-9.0] + [1.0] * 15))
        model.registers.copy_(torch.tensor([9.0] + [0.0] * 15))
    heat = patch_attention(model, images_for_patch_attention(model), (0, 0))
    assert torch.equal(heat, torch.zeros(2, 4, 4))


@pytest.mark.parametrize("patch", [(2, 0), (-1, 0), (0, 6), (0, -1), (5, 1)])
def test_missing_patch_is_rejected_with_rows_and_columns(patch: tuple[int, int]) -> None:
    model = small_model(image_size=(16, 48))
    with pytest.raises(UserError, match=r"no patch .*the grid is 2x6, rows 0 to 1 and columns 0 to 5"):
        patch_attention(model, images_for_patch_attention(model), patch)


@pytest.mark.parametrize("head", [2, -1])
def test_missing_head_of_patch_attention_is_rejected_with_the_range(head: int) -> None:
    model = small_model()
    with pytest.raises(UserError, match=f"no head {head}: each layer has 2, 0 to 1"):
        patch_attention(model, images_for_patch_attention(model), (0, 0), head=head)


# --- streams


SOME = ["class_token", "distilled_registers", "mean", "axial_mean", "window", "rotary", "post_norm"]


@pytest.mark.parametrize("name", SOME)
def test_stream_yields_the_traced_attention_in_order(name: str) -> None:
    model, images = small_model(**MODELS[name]), random_images(2, 3, 32, 32)
    handed: list[Tensor] = []
    stream_attention(model, images, handed.append)
    traced = model.trace(images, attention=True).attention
    assert traced is not None
    assert len(handed) == len(traced) == 3
    for weights, expected in zip(handed, traced, strict=True):
        assert torch.equal(weights, expected)
        assert not weights.requires_grad


@pytest.mark.parametrize("read", [slice(0, 1), slice(0, 2), slice(None)])
def test_last_block_yields_only_the_pooled_rows(read: slice) -> None:
    model, images = small_model(num_registers=1), random_images(2, 3, 32, 32)
    handed: list[Tensor] = []
    stream_attention(model, images, handed.append, read)
    traced = model.trace(images, attention=True).attention
    assert traced is not None
    assert [weights.shape for weights in handed[:-1]] == [(2, 2, 18, 18)] * 2
    torch.testing.assert_close(handed[-1], traced[-1][:, :, read])


@pytest.mark.parametrize("options", [{}, {"pool": "mean"}])
@pytest.mark.parametrize("rollout_options", [{}, {"fusion": "max"}, {"discard": 0.5}])
def test_attention_of_only_one_layer_is_in_memory(
    options: dict[str, Any], rollout_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked where rollout receives it: the previous layer's is freed before the next one arrives."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    keep = AttentionStream.keep_attention

    def watched(stream: AttentionStream, weights: Tensor) -> None:
        alive.append(sum(each() is not None for each in made))
        made.append(weakref.ref(weights))
        keep(stream, weights)

    monkeypatch.setattr(AttentionStream, "keep_attention", watched)
    rollout(small_model(depth=4, **options), random_images(2, 3, 32, 32), **rollout_options)
    assert alive == [0] * 4


def test_nothing_else_is_kept() -> None:
    model, images = small_model(), random_images(2, 3, 32, 32)
    stream = AttentionStream(lambda weights: None)
    model.forward_features(images, stream)
    assert stream.values == {}
    assert stream.attended == []
    assert stream.attention == []
