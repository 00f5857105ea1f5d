import copy

import pytest
import torch

from tests.model import random_images, randomize, small_config
from vitascope.model.patches import ConvTokenizer, patch_embedding
from vitascope.model.tokenizer_norms import EPS, TokenizerNorm, add_norms, without_norms

TOKENIZER = {"stem": "tokenizer", "tokenizer_widths": (6, 4, 8), "tokenizer_pooling": (1, 3), "patch_size": 4}


def tokenizer_with_norms() -> ConvTokenizer:
    tokenizer = randomize(patch_embedding(small_config(**TOKENIZER)))
    assert isinstance(tokenizer, ConvTokenizer)
    add_norms(tokenizer)
    return tokenizer


def test_in_training_maps_have_a_mean_of_zero_and_a_variance_of_one_per_channel() -> None:
    norm = TokenizerNorm(4).train()
    maps = 3 * random_images(5, 4, 8, 6) + 2
    normalized = norm(maps)
    torch.testing.assert_close(normalized.mean(dim=(0, 2, 3)), torch.zeros(4), rtol=0, atol=1e-5)
    variance = maps.var(dim=(0, 2, 3), correction=0)
    expected = variance / (variance + EPS)
    torch.testing.assert_close(normalized.var(dim=(0, 2, 3), correction=0), expected, rtol=1e-4, atol=1e-5)


def test_all_layers_but_the_first_have_a_norm_whose_bias_is_trained_in_place_of_the_convolutions() -> None:
    tokenizer = tokenizer_with_norms()
    trained = {name for name, parameter in tokenizer.named_parameters() if parameter.requires_grad}
    first = {"0.conv.weight", "0.conv.bias"}
    assert trained == first | {
        f"{layer}.{part}" for layer in (1, 2, 3) for part in ("conv.weight", "norm.bias")
    }
    assert all(not layer.conv.bias.any() for layer in list(tokenizer)[1:])


def test_folded_convolutions_compute_what_norms_with_their_statistics_do() -> None:
    tokenizer, plain = tokenizer_with_norms(), patch_embedding(small_config(**TOKENIZER))
    for layer in list(tokenizer)[1:]:
        torch.nn.init.normal_(layer.norm.bias)
    for _ in range(9):
        tokenizer.train()(random_images(4, 3, 32, 32))
    images, state = random_images(2, 3, 32, 24), tokenizer.state_dict()
    before = copy.deepcopy(state)
    plain.load_state_dict(without_norms(state))  # has the same names
    torch.testing.assert_close(plain(images), tokenizer.eval()(images), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain(images), tokenizer.train()(images), atol=1e-2)
    assert all(torch.equal(state[name], before[name]) for name in before if "running" not in name)


def test_a_state_without_norms_stays_as_it_is() -> None:
    state = patch_embedding(small_config(**TOKENIZER)).state_dict()
    folded = without_norms(state)
    assert folded.keys() == state.keys()
    assert all(folded[name] is state[name] for name in state)


def test_reset_forgets_the_statistics() -> None:
    norm = TokenizerNorm(4).train()
    first = copy.deepcopy(norm.state_dict())
    norm(random_images(5, 4, 8, 6))
    assert not torch.equal(norm.running_mean, first["running_mean"])
    norm.reset()
    assert all(torch.equal(norm.state_dict()[name], value) for name, value in first.items())


@pytest.mark.parametrize("training", [False, True])
def test_a_bf16_bias_and_bf16_maps_keep_float32_statistics(training: bool) -> None:
    norm = TokenizerNorm(4).train(training)
    norm.bias.data = norm.bias.data.bfloat16()
    assert norm(random_images(5, 4, 8, 6).bfloat16()).dtype == torch.bfloat16
    assert norm.running_var.dtype == torch.float32
