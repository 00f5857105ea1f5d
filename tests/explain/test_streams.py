"""Attention handed on layer by layer."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.explain import MODELS
from tests.model import random_images, small_model
from vitascope.explain.attention import AttentionStream, stream_attention
from vitascope.explain.rollout import rollout

SOME = ["class_token", "distilled_registers", "mean", "axial_mean", "window", "rotary", "post_norm"]


@pytest.mark.parametrize("name", SOME)
def test_what_is_handed_on_is_the_traced_attention_in_order(name: str) -> None:
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
def test_only_rows_that_are_read_come_of_the_last_block(read: slice) -> None:
    model, images = small_model(num_registers=1), random_images(2, 3, 32, 32)
    handed: list[Tensor] = []
    stream_attention(model, images, handed.append, read)
    traced = model.trace(images, attention=True).attention
    assert traced is not None
    assert [weights.shape for weights in handed[:-1]] == [(2, 2, 18, 18)] * 2
    torch.testing.assert_close(handed[-1], traced[-1][:, :, read])


@pytest.mark.parametrize("options", [{}, {"pool": "mean"}])
@pytest.mark.parametrize("rollout_options", [{}, {"fusion": "max"}, {"discard": 0.5}])
def test_attention_of_two_layers_is_never_there_at_once(
    options: dict[str, Any], rollout_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watched where rollout gets it: when the next layer's comes, the last one is gone."""
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


def test_model_is_run_as_in_evaluation_and_left_as_it_was() -> None:
    model, images = small_model(dropout=0.5, drop_path=0.5), random_images(2, 3, 32, 32)
    expected: list[Tensor] = []
    stream_attention(model, images, expected.append)
    handed: list[Tensor] = []
    stream_attention(model.train(), images, handed.append)
    assert model.training
    for weights, same in zip(handed, expected, strict=True):
        assert torch.equal(weights, same)
