from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import by_loops, law, random_images, small_config, small_model
from vitascope.errors import UserError
from vitascope.models import attention
from vitascope.models.token_merging import MergingLayout, match
from vitascope.models.vit import VisionTransformer

KINDS: dict[str, dict[str, Any]] = {
    "class token": {},
    "class token, layer scale": {"layer_scale": 0.5},
    "mean": {"pool": "mean"},
    "mean, then norm": {"pool": "mean", "pool_norm": "after"},
    "class token and mean": {"pool": "cls_mean"},
    "map": {"pool": "map"},
    "registers": {"num_registers": 3},
    "distillation": {"distillation_token": True},
    "hybrid": {"stem": "resnet", "resnet_layers": (1,), "resnet_width": 2},
    "no positions, no key bias": {"positions": "none", "qkv_bias": "no_key"},
}
kinds = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def merging_model(count: int = 3, **options: Any) -> VisionTransformer:
    return small_model(token_merging=count, **options)


def weights_and_tokens_by_loops(
    model: VisionTransformer, z0: torch.Tensor
) -> tuple[list[np.ndarray], np.ndarray]:
    """Each block's attention of all T tokens with all T, and z_L of all, of one image; float64."""
    tokens, P, heads = z0.numpy(), model.config.num_prefix_tokens, model.config.num_heads
    groups = [{place} for place in range(len(tokens))]

    def run(layer: torch.nn.Module, values: np.ndarray) -> np.ndarray:
        return layer(torch.from_numpy(values)).numpy()

    kept = []
    for block in model.encoder.blocks:
        qkv = run(block.attention.qkv, run(block.norm1, tokens)).reshape(len(tokens), 3, heads, -1)
        q, k, v = qkv.transpose(1, 2, 0, 3)  # (heads, Q, hd)
        sizes = np.array([len(group) for group in groups])
        scores = q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5 + np.log(sizes)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        home = {member: place for place, group in enumerate(groups) for member in group}
        at = [home[member] for member in range(len(home))]
        kept.append(weights[:, at][:, :, at] / sizes[at])
        mixed = (weights @ v).transpose(1, 0, 2).reshape(len(tokens), -1)
        tokens = tokens + run(block.scale1, run(block.attention.proj, mixed))
        tokens, groups = by_loops.merge(tokens, groups, k.mean(0), P, model.config.block.token_merging)
        tokens = tokens + run(block.scale2, run(block.mlp, run(block.norm2, tokens)))
    home = {member: place for place, group in enumerate(groups) for member in group}
    return kept, tokens[[home[member] for member in range(len(home))]]


@kinds
@pytest.mark.parametrize("count", [1, 3, 7])
@torch.no_grad()
def test_the_encoder_equals_the_loops_of_the_paper(options: dict[str, Any], count: int) -> None:
    model = merging_model(count, **options).double()
    z0 = model.prepare_tokens(random_images(2, 3, 32, 32).double())
    zL = model.encode(z0, model.config.grid)
    for image in range(2):
        _, expected = weights_and_tokens_by_loops(model, z0[image])
        torch.testing.assert_close(zL[image], torch.from_numpy(expected))


@kinds
@torch.no_grad()
def test_a_trace_has_the_attention_of_all_original_tokens(options: dict[str, Any]) -> None:
    model = merging_model(5, **options).double()
    images = random_images(1, 3, 32, 32).double()
    trace = model.trace(images, attention=True)
    expected, _ = weights_and_tokens_by_loops(model, trace["embeddings"][0])
    for seen, weights in zip(trace.attention, expected, strict=True):
        torch.testing.assert_close(seen[0], torch.from_numpy(weights))
    T = model.config.num_tokens
    assert [each.shape[1] for each in trace.attended] == [T] * 3
    assert all(trace[f"block{index}"].shape[1] == T for index in range(3))


@law
@given(N=st.integers(2, 12), data=st.data())
def test_pairs_are_the_most_similar_of_the_two_sets(N: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, N // 2))
    keys = random_images(2, N, 3, seed=data.draw(st.integers(0, 99)))
    stay, leave, join = match(keys, count)
    for image in range(2):
        kept, joins = by_loops.merged_pairs(keys[image].double().numpy(), count)
        assert stay[image].tolist() == kept
        assert {int(i): int(stay[image, j]) for i, j in zip(leave[image], join[image], strict=True)} == joins


def test_merging_at_most_halves_the_patches() -> None:
    tokens = random_images(1, 8, 4)  # a prefix of 1, 7 patches
    layout = MergingLayout((7, 1), 1, pairs_per_block=100, keys=random_images(1, 8, 2))
    merged = layout.merge(tokens)
    assert merged.shape == (1, 5, 4)
    assert layout.sizes is not None
    assert layout.sizes.sum() == 8
    layout.keys = layout.keys = random_images(1, 5, 2)
    for left in (3, 2, 2):
        merged = layout.merge(merged)
        assert merged.shape[1] == left
        layout.keys = random_images(1, left, 2)
    torch.testing.assert_close(merged[:, 1], tokens[:, 1:].mean(dim=1))
    assert torch.equal(merged[:, 0], tokens[:, 0])


@torch.no_grad()
def test_only_blocks_from_the_first_on_can_be_run() -> None:
    model, images = merging_model(3), random_images(2, 3, 32, 32)
    z0, grid = model.prepare_tokens(images), model.config.grid
    trace = model.trace(images)
    torch.testing.assert_close(model.encode(z0, grid, blocks=range(2)), trace["block1"])
    assert torch.equal(model.encode(z0, grid, blocks=range(3, 3)), z0)
    with pytest.raises(
        UserError, match=r"with token_merging, block 1 cannot be run by itself.*token_merging=0"
    ):
        model.encode(trace["block0"], grid, blocks=range(1, 3))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attention": "window", "window": 2}, "attention 'window'"),
        ({"attention": "axial", "positions": "relative"}, "attention 'axial' and positions 'relative'"),
        ({"positions": "rotary"}, "positions 'rotary'"),
        ({"norm": "post"}, "norm 'post'"),
    ],
)
def test_options_that_exclude_merging_are_rejected(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"token_merging does not go with {named}: it needs"):
        small_config(token_merging=2, **options)


def test_every_kernel_weights_tokens_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = merging_model(5, pool="mean").double(), random_images(2, 3, 32, 32).double()
    answers, gradients = [], []
    for chosen in (False, True):
        monkeypatch.setattr(attention, "faster_by_matmul", lambda _, on=chosen: on)
        model.zero_grad()
        answers.append(model(images))
        answers[-1].square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(answers[0], answers[1])
    for fused, by_matmul in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, by_matmul)
