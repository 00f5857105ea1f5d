from typing import Any

import pytest
import torch
from torch import nn

from tests.models import random_images, randomize, small_config, small_model
from vitascope.models.encoder import SwiGLU
from vitascope.models.heads import (
    CosineHead,
    DistilledHead,
    MLPHead,
    classification_head,
    output_layers,
    pooling,
)

READOUTS: dict[str, dict[str, Any]] = {
    "class token": {"pool": "cls"},
    "class token and registers": {"pool": "cls", "num_registers": 2},
    "class and distillation token": {"distillation_token": True},
    "class and distillation token and registers": {"distillation_token": True, "num_registers": 2},
    "mean": {"pool": "mean"},
    "mean beside a class token and registers": {"pool": "mean", "class_token": True, "num_registers": 2},
    "class token and mean": {"pool": "cls_mean", "num_registers": 1},
    "map": {"pool": "map"},
    "map beside registers": {"pool": "map", "num_registers": 3},
    "map of every token": {"pool": "map", "num_registers": 3, "pool_prefix": True},
}


@pytest.mark.parametrize("options", [each for each in READOUTS.values() if each.get("pool") != "map"])
def test_pooling_joins_the_tokens_that_it_names_and_the_mean_of_the_patches(options: dict[str, Any]) -> None:
    config, tokens = small_config(**options), random_images(2, 9, 16)
    P, readout = config.num_prefix_tokens, config.readout
    mean = sum(tokens[:, P:].unbind(1)) / (9 - P)
    parts = {"cls": [tokens[:, 0]], "mean": [mean], "cls_mean": [tokens[:, 0], mean]}[readout.pool]
    parts += [tokens[:, 1]] if readout.distillation_token else []
    torch.testing.assert_close(pooling(config)(tokens), torch.cat(parts, dim=1))


@pytest.mark.parametrize("mlp", ["gelu", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("registers", [0, 2])
def test_map_is_the_multi_head_attention_of_torch_with_one_query(mlp: str, registers: int) -> None:
    pool = randomize(pooling(small_config(pool="map", mlp=mlp, num_heads=4, num_registers=registers))).eval()
    peer = nn.MultiheadAttention(16, 4, batch_first=True)
    peer.in_proj_weight.data = torch.cat([pool.q.weight, pool.kv.weight])
    peer.in_proj_bias.data = torch.cat([pool.q.bias, pool.kv.bias])
    peer.out_proj.load_state_dict(pool.proj.state_dict())
    tokens = random_images(2, registers + 7, 16)
    patches = tokens[:, registers:]
    attended, _ = peer(pool.query.expand(2, -1, -1), patches, patches)
    expected = attended + pool.mlp(pool.norm(attended))
    torch.testing.assert_close(pool(tokens), expected[:, 0], rtol=1e-5, atol=1e-5)
    assert isinstance(pool.mlp, SwiGLU) == (mlp == "swiglu")


def test_map_may_attend_to_every_token_with_heads_and_an_mlp_of_its_own() -> None:
    options = {"pool": "map", "num_registers": 2, "pool_prefix": True, "pool_heads": 8, "pool_mlp_ratio": 1.5}
    pool, tokens = randomize(pooling(small_config(**options))).eval(), random_images(2, 9, 16)
    others = randomize(pooling(small_config(pool="map", pool_heads=8, pool_mlp_ratio=1.5))).eval()
    assert pool.mlp.fc1.out_features == 24
    torch.testing.assert_close(pool(tokens), others(tokens))  # the same weights, where all tokens are patches
    changed = tokens.clone()
    changed[:, 0] += 1  # a register
    assert not torch.allclose(pool(changed), pool(tokens), atol=1e-3)


@pytest.mark.parametrize("options", READOUTS.values(), ids=READOUTS)
def test_pooling_reads_only_its_declared_tokens(options: dict[str, Any]) -> None:
    tokens, pool = random_images(2, 12, 16), randomize(pooling(small_config(**options)))
    assert torch.equal(pool(tokens[:, pool.queries]), pool(tokens))
    assert pool(tokens).shape == (2, 16 * small_config(**options).readout.num_pooled)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_the_last_norm_comes_before_or_after_pooling(pool: str) -> None:
    before, after = (small_model(pool=pool, pool_norm=when) for when in ("before", "after"))
    weights = before.state_dict()
    after.load_state_dict(
        {
            name.replace("norm.", "pool_norm.") if name.startswith("norm.") else name: value
            for name, value in weights.items()
        }
    )
    images = random_images(2, 3, 32, 32)
    tokens = before.encode(before.prepare_tokens(images), (4, 4))
    torch.testing.assert_close(before.embed(images), before.pool(before.norm(tokens)))
    torch.testing.assert_close(after.embed(images), before.norm(before.pool(tokens)))
    torch.testing.assert_close(after.forward_features(images), tokens)
    # One token is normalized alike in either order; a mean of normalized tokens is not a normalized mean.
    assert torch.allclose(before(images), after(images), atol=1e-5) == (pool == "cls")


@pytest.mark.parametrize("pool", ["cls", "cls_mean"])
def test_the_mlp_head_has_one_hidden_tanh_layer(pool: str) -> None:
    config = small_config(head="mlp", pool=pool)
    head, pooled = classification_head(config), random_images(2, 16 * config.readout.num_pooled)
    assert isinstance(head, MLPHead)
    randomize(head)
    hidden = torch.tanh(pooled @ head.pre_logits.weight.T + head.pre_logits.bias)
    assert hidden.shape == (2, 16)
    torch.testing.assert_close(head(pooled), hidden @ head.linear.weight.T + head.linear.bias)
    assert head(pooled).shape == (2, 5)


def test_the_distilled_head_is_the_mean_of_two_classifiers() -> None:
    head, pooled = classification_head(small_config(distillation_token=True)), random_images(2, 32)
    assert isinstance(head, DistilledHead)
    randomize(head)
    by_label = pooled[:, :16] @ head.linear.weight.T + head.linear.bias
    by_teacher = pooled[:, 16:] @ head.distillation.weight.T + head.distillation.bias
    for ours, expected in zip(head.both(pooled), (by_label, by_teacher), strict=True):
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(head(pooled), (by_label + by_teacher) / 2)
    assert (by_label - by_teacher).abs().min() > 0


@pytest.mark.parametrize("projection", [None, 7])
@torch.no_grad()
def test_cosine_head_compares_directions(projection: int | None) -> None:
    config = small_config(head="cosine", projection=projection, num_classes=5)
    head = randomize(classification_head(config))
    assert isinstance(head, CosineHead)
    pooled = random_images(3, 16)
    features = head.projection(pooled)
    cosines = torch.cosine_similarity(features[:, None], head.classes[None], dim=-1)  # (3, 5)
    torch.testing.assert_close(head(pooled), cosines * head.scale.exp() + head.bias)
    before = head(pooled)
    head.classes *= torch.arange(1, 6)[:, None]
    torch.testing.assert_close(head(pooled), before)


@pytest.mark.parametrize("options", READOUTS.values(), ids=READOUTS)
@pytest.mark.parametrize(("name", "layers"), [("linear", 1), ("mlp", 1), ("pre_logits", 0), ("none", 0)])
def test_output_layers_are_those_that_compute_logits(name: str, layers: int, options: dict[str, Any]) -> None:
    distilled = options.get("distillation_token", False)
    if distilled and name in ("mlp", "pre_logits"):
        return  # rejected: see test_config
    config = small_config(head=name, **options)
    head = randomize(classification_head(config))
    found = output_layers(head)
    assert len(found) == layers * (2 if distilled else 1)
    for layer in found:
        assert layer.out_features == config.num_classes
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    silenced = not head(random_images(2, 16 * config.readout.num_pooled)).any()
    assert silenced == bool(found)
