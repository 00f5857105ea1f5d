import pytest
import torch
from torch import nn

from tests.model import random_images, randomize, small_config
from vitascope.model.heads import MLPHead, classification_head, pooling


def test_the_class_token_represents_the_image() -> None:
    tokens = random_images(2, 5, 16)
    pool = pooling(small_config(pool="cls"))
    assert torch.equal(pool(tokens), tokens[:, 0])


def test_mean_pooling_averages_every_token() -> None:
    tokens = random_images(2, 5, 16)
    pool = pooling(small_config(pool="mean"))
    torch.testing.assert_close(pool(tokens), sum(tokens.unbind(1)) / 5)


@pytest.mark.parametrize("name", ["cls", "mean"])
def test_pooling_reads_only_the_tokens_that_it_says(name: str) -> None:
    tokens, pool = random_images(2, 5, 16), pooling(small_config(pool=name))
    assert torch.equal(pool(tokens[:, pool.read]), pool(tokens))


def test_the_linear_head_is_one_linear_layer() -> None:
    head, pooled = classification_head(small_config(head="linear")), random_images(2, 16)
    randomize(head)
    torch.testing.assert_close(head(pooled), pooled @ head.weight.T + head.bias)
    assert head(pooled).shape == (2, 5)


def test_the_mlp_head_has_one_hidden_tanh_layer() -> None:
    head, pooled = classification_head(small_config(head="mlp")), random_images(2, 16)
    assert isinstance(head, MLPHead)
    randomize(head)
    hidden = torch.tanh(pooled @ head.pre_logits.weight.T + head.pre_logits.bias)
    torch.testing.assert_close(head(pooled), hidden @ head.linear.weight.T + head.linear.bias)
    assert head(pooled).shape == (2, 5)


def test_no_head_gives_the_features_themselves() -> None:
    head, pooled = classification_head(small_config(head="none")), random_images(2, 16)
    assert torch.equal(head(pooled), pooled)
    assert not list(nn.Module.parameters(head))
