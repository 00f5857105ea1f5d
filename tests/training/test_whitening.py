import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.forked import torchrun
from tests.models import random_images, randomize, small_config
from tests.training import assert_bitwise, last_state, planned, tiny_config, trainer_of
from tests.training.test_resume import TRAINED, killed
from vitascope import runs
from vitascope.data.datasets import open_data
from vitascope.errors import UserError
from vitascope.models.patches import ConvTokenizer, patch_embedding
from vitascope.models.weights.loading import from_pretrained
from vitascope.training import building
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.whitening import EPS, TokenizerNorm, add_norms, whitening_filters, without_norms

pytestmark = pytest.mark.usefixtures("without_figures")

TOKENIZER = {"stem": "tokenizer", "tokenizer_widths": [24, 8, 8], "tokenizer_pooling": [1, 2]}
TOKENIZER |= {"tokenizer_activation": "gelu"}


def whitened(data: Path, run: Path, **options: Any) -> TrainConfig:
    common = {"patch_size": 4, "whiten": "on", "checkpoint_seconds": 0.0, "ema": 0.5, "keep": "last"}
    common |= {"optimizer": "muon", "progressive": 0.5, "model_options": TOKENIZER}
    return tiny_config(data, run=str(run), **common | options)


def test_filters_make_patches_uncorrelated_with_a_variance_of_one() -> None:
    base = random_images(64, 3, 9, 9)
    images = base + 0.8 * base.roll(1, dims=1) + base.roll(1, dims=3)
    filters = whitening_filters(images)
    assert filters.shape == (24, 3, 2, 2)
    assert torch.equal(filters[12:], -filters[:12])
    rows = F.conv2d(images, filters[:12]).transpose(0, 1).flatten(1)  # (12, n)
    torch.testing.assert_close(rows @ rows.mT / rows.shape[1], torch.eye(12), rtol=0, atol=0.02)


def test_whitened_run_resumes_bitwise_and_saves_a_plain_model_of_the_same_function(data, tmp_path) -> None:
    config = whitened(data, tmp_path / "whole", epochs=2)
    whole = runs.train(config)
    run = killed(config.replace(run=str(tmp_path / "killed")))
    resumed = runs.resume(run)
    state = last_state(run, *TRAINED)
    assert_bitwise(state, last_state(tmp_path / "whole", *TRAINED))
    assert_bitwise(resumed.model.state_dict(), whole.model.state_dict())
    saved = from_pretrained(run)
    assert not any("norm.running" in name for name in saved.state_dict())
    first = "patch_embedding.0.conv.weight"
    assert torch.equal(saved.state_dict()[first], state["model"][first])
    assert torch.equal(state["model"][first][12:], -state["model"][first][:12])
    assert first not in state["optimizer"]["state"]
    mean = "patch_embedding.1.norm.running_mean"
    assert not torch.equal(state["average"][mean], state["model"][mean])
    assert state["average"][mean].any()
    again = building.start_model(building.prepare(config, open_data(config.data, seed=config.seed)))
    assert torch.equal(again.state_dict()[first], state["model"][first])
    again.load_state_dict({name.removeprefix("body."): value for name, value in state["average"].items()})
    images = random_images(2, 3, 16, 16)
    torch.testing.assert_close(saved(images), again.eval()(images), rtol=1e-3, atol=1e-4)


def test_steps_that_are_measured_for_a_budget_change_nothing(data, tmp_path) -> None:
    trainer = trainer_of(whitened(data, tmp_path / "run", minutes=1.0))
    before = copy.deepcopy(trainer.module.state_dict())
    trainer._measured_step()
    assert_bitwise(trainer.module.state_dict(), before)


def test_auto_whitens_where_the_model_allows_it(data, tmp_path) -> None:
    def decided(**options: Any) -> str:
        config = whitened(data, tmp_path / "run", **{"whiten": "auto"} | options)
        return planned(config, open_data(str(data)))[0].optimization.whiten

    assert decided() == "on"
    assert decided(model_options={}) == decided(whiten="off") == "off"


def test_a_model_that_cannot_be_whitened_is_rejected_with_advice(data, tmp_path) -> None:
    for options, message in (
        ({}, "whiten=on needs a tokenizer: add model_options stem=tokenizer; or leave it out"),
        (TOKENIZER | {"patch_bias": False}, "needs convolutions with biases"),
        (TOKENIZER | {"tokenizer_pooling": []}, "needs a first layer that does not pool"),
        (TOKENIZER | {"tokenizer_widths": [23, 8, 8]}, "needs at least 24 channels in"),
    ):
        with pytest.raises(UserError, match=message):
            planned(whitened(data, tmp_path / "run", model_options=options), open_data(str(data)))


def train_each(*configs: TrainConfig) -> None:
    for config in configs:
        runs.train(config)


def test_two_processes_save_a_plain_model_with_the_filters_of_one(data, tmp_path) -> None:
    """The rest differs a little: each process has the statistics of its own images."""
    one, *both = (
        whitened(data, tmp_path / name, steps=2, **options)
        for name, options in {
            "one": {},
            "ddp": {"parallel": "ddp"},
            "fsdp": {"parallel": "fsdp", "precision": "bf16", "optimizer": "adamw"},
        }.items()
    )
    output = tmp_path / "output.txt"
    assert torchrun(2, output, train_each, *both) == 0, output.read_text()[-4000:]
    alone = runs.train(one).model.state_dict()
    for config in both:
        two = from_pretrained(str(config.run)).state_dict()
        assert two.keys() == alone.keys()
        assert torch.equal(two["patch_embedding.0.conv.weight"], alone["patch_embedding.0.conv.weight"])
        assert all(tensor.isfinite().all() for tensor in two.values())


SMALL_TOKENIZER = {"stem": "tokenizer", "tokenizer_widths": (6, 4, 8), "tokenizer_pooling": (1, 3)}
SMALL_TOKENIZER |= {"patch_size": 4}


def tokenizer_with_norms() -> ConvTokenizer:
    tokenizer = randomize(patch_embedding(small_config(**SMALL_TOKENIZER)))
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
    tokenizer, plain = tokenizer_with_norms(), patch_embedding(small_config(**SMALL_TOKENIZER))
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
    state = patch_embedding(small_config(**SMALL_TOKENIZER)).state_dict()
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
