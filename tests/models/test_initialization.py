import math
from typing import Any

import pytest
import torch

from tests.models import random_images, small_config
from vitascope.models.vit import VisionTransformer

WIDTH, HIDDEN, FAN_IN = 64, 256, 3 * 8 * 8


def fresh(**overrides: Any) -> VisionTransformer:
    torch.manual_seed(0)
    size = {"image_size": 64, "embed_dim": WIDTH, "depth": 2, "num_heads": 4}
    return VisionTransformer(small_config(**(size | overrides)))


def assert_std(weight: torch.Tensor, std: float) -> None:
    # 6 standard errors of a normal's standard deviation, the widest of the distributions here.
    assert weight.std().item() == pytest.approx(std, rel=6 / math.sqrt(2 * weight.numel()))
    assert abs(weight.mean().item()) < 6 * std / math.sqrt(weight.numel())


def assert_uniform(weight: torch.Tensor, limit: float) -> None:
    assert 0.98 * limit < weight.abs().max().item() <= limit * (1 + 1e-6)
    assert_std(weight, limit / math.sqrt(3))


def assert_lecun(weight: torch.Tensor, fan_in: int) -> None:
    std = math.sqrt(1 / fan_in)
    assert_std(weight, std)
    cut = 2 * std / 0.8796  # two standard deviations of the normal before it is cut
    assert 0.95 * cut < weight.abs().max().item() <= cut * 1.001


@pytest.mark.parametrize("stem", ["conv", "overlap"])
def test_paper_stem_is_lecun_normal_without_bias(stem: str) -> None:
    embedding = fresh(init="paper", stem=stem).patch_embedding
    assert_lecun(embedding.weight, FAN_IN)
    assert not embedding.bias.any()


def test_paper_projections_of_q_k_and_v_are_xavier_uniform_each() -> None:
    for block in fresh(init="paper").encoder.blocks:
        for part in block.attention.qkv.weight.chunk(3):
            assert_uniform(part, math.sqrt(6 / (WIDTH + WIDTH)))
        assert_uniform(block.attention.proj.weight, math.sqrt(6 / (WIDTH + WIDTH)))
        assert not block.attention.qkv.bias.any()
        assert not block.attention.proj.bias.any()


def test_paper_mlps_are_xavier_uniform_with_tiny_biases() -> None:
    for block in fresh(init="paper").encoder.blocks:
        for layer in (block.mlp.fc1, block.mlp.fc2):
            assert_uniform(layer.weight, math.sqrt(6 / (WIDTH + HIDDEN)))
            assert_std(layer.bias, 1e-6)


def test_paper_hidden_layer_of_the_head_is_lecun_normal() -> None:
    head = fresh(init="paper", head="mlp").head
    assert_lecun(head.pre_logits.weight, WIDTH)
    assert not head.pre_logits.bias.any()


@pytest.mark.parametrize("options", [{}, {"num_heads": 2, "head_dim": 8}, {"num_heads": 2, "head_dim": 48}])
def test_mimetic_attention_starts_like_a_trained_one(options: dict[str, Any]) -> None:
    """Each head's U_q^T U_k is 0.7 (Z + I) at its rank, U_v^T U_msa is 0.4 (Z - I), Z of variance 1 / D."""
    for block in fresh(init="mimetic", qkv_bias="no_key", **options).encoder.blocks:
        attention = block.attention
        q, k, v = attention.qkv.weight.detach().unflatten(0, (3, attention.num_heads, -1))
        rank = q.shape[1]
        for q_head, k_head in zip(q, k, strict=True):
            sizes = torch.linalg.svdvals(q_head.mT @ k_head)
            assert 0.7 < sizes[0] < 0.7 * 3.2  # the largest of Z + I is below 1 + 2
            assert sizes[rank:].max() < 1e-5
            assert (q_head.mT @ k_head).diagonal().mean() > 0.1
        scale = (attention.proj.weight.detach() @ v.flatten(0, 1)).diagonal().mean().item()
        assert -0.6 < scale < -0.1
        torch.testing.assert_close(q @ q.mT, k @ k.mT, atol=1e-5, rtol=1e-4)  # a root of each singular value


def test_mimetic_positions_start_as_sines_and_cosines() -> None:
    waves = fresh(init="paper", positions="sincos_2d")
    learned = fresh(init="mimetic", positions="learned").positions
    torch.testing.assert_close(learned.weight[:, 1:], waves.positions.table((8, 8)))
    assert learned.weight[:, :1].std() < 0.1  # the class token's


def test_timm_linear_layers_are_normal_without_bias() -> None:
    model = fresh(init="timm", head="mlp")
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(layers) == 2 * 4 + 2
    for layer in layers:
        assert_std(layer.weight, 0.02)
        assert not layer.bias.any()


@pytest.mark.parametrize("init", ["paper", "mimetic", "timm"])
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(init: str) -> None:
    torch.manual_seed(0)
    first = VisionTransformer(small_config(init=init)).state_dict()
    torch.manual_seed(0)
    again = VisionTransformer(small_config(init=init)).state_dict()
    other = VisionTransformer(small_config(init=init)).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["positions.weight"], other["positions.weight"])
    assert not torch.equal(first["encoder.blocks.0.mlp.fc1.weight"], other["encoder.blocks.0.mlp.fc1.weight"])


@pytest.mark.parametrize("init", ["paper", "mimetic", "timm"])
def test_tokenizers_start_as_in_cct(init: str) -> None:
    for layer in fresh(init=init, stem="tokenizer", tokenizer_widths=(64, 32)).patch_embedding:
        assert_std(layer.conv.weight, math.sqrt(2 / layer.conv.weight[0].numel()))
        assert not layer.conv.bias.any()


def test_paper_attention_pooling_is_xavier_uniform_in_each_projection() -> None:
    pool = fresh(init="paper", pool="map").pool
    for part in (pool.q.weight, *pool.kv.weight.chunk(2), pool.proj.weight):
        assert_uniform(part, math.sqrt(6 / (WIDTH + WIDTH)))
    for layer in (pool.q, pool.kv, pool.proj):
        assert not layer.bias.any()
    assert_uniform(pool.mlp.fc1.weight, math.sqrt(6 / (WIDTH + HIDDEN)))


@pytest.mark.parametrize("init", ["paper", "timm"])
@pytest.mark.parametrize("kind", ["learned", "learned_2d", "relative"])
def test_learned_positions_start_normal(kind: str, init: str) -> None:
    adds_to_scores = kind == "relative" and init == "paper"  # then it starts at the size of the scores
    for name, weight in fresh(init=init, positions=kind).positions.named_parameters():
        if name != "prefix":  # 12 numbers have no spread to speak of
            assert_std(weight, 1.0 if adds_to_scores else 0.02)


def test_registers_and_timms_class_token_start_tiny() -> None:
    model = fresh(init="timm", num_registers=8)
    for token in (model.registers, model.class_token, fresh(num_registers=8).registers):
        assert_std(token, 1e-6)


@pytest.mark.parametrize("init", ["paper", "timm"])
@pytest.mark.parametrize("options", [{}, {"distillation_token": True}, {"pool": "cls_mean"}, {"pool": "map"}])
def test_a_zero_head_predicts_all_classes_equally_at_first(options: dict[str, Any], init: str) -> None:
    assert not fresh(init=init, head_init="zero", **options)(random_images(2, 3, 64, 64)).any()
