import pytest
import torch

from tests.models import random_images, small_model
from vitascope.errors import UserError

NAMES = ["patch_embeddings", "embeddings", "block0", "block1", "block2", "features", "pooled", "logits"]


@pytest.mark.parametrize(("pool", "pooled"), [("cls", 16), ("mean", 16), ("cls_mean", 32), ("map", 16)])
@pytest.mark.parametrize("head", ["linear", "mlp", "none"])
def test_intermediates_are_named_in_the_order_of_the_pass(pool: str, pooled: int, head: str) -> None:
    trace = small_model(pool=pool, head=head, image_size=(16, 24)).trace(random_images(2, 3, 16, 24))
    N, T = 6, 7 if pool in ("cls", "cls_mean") else 6
    assert list(trace.values) == NAMES
    assert [tuple(trace[name].shape) for name in NAMES] == [
        (2, N, 16),
        *[(2, T, 16)] * 5,
        (2, pooled),
        (2, pooled if head == "none" else 5),
    ]


def test_attention_is_kept_only_on_request() -> None:
    with pytest.raises(UserError, match=r"request them, model\.trace\(images, attention=True\)"):
        small_model().trace(random_images(1, 3, 32, 32)).attention  # noqa: B018


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("attention", ["global", "axial"])
def test_attended_tokens_are_normalized_only_in_a_pre_norm_block(
    norm: str, attention: str, asked: bool
) -> None:
    model, images = small_model(norm=norm, attention=attention, num_registers=1), random_images(2, 3, 32, 32)
    trace = model.trace(images, attention=asked)
    inputs = [trace["embeddings"], trace["block0"], trace["block1"]]
    assert len(trace.attended) == 3
    for block, tokens, attended in zip(model.encoder.blocks, inputs, trace.attended, strict=True):
        assert attended.shape == (2, 18, 16)
        assert torch.equal(attended, block.norm1(tokens) if norm == "pre" else tokens)


def test_gradients_flow_through_every_intermediate() -> None:
    model, images = small_model(), random_images(1, 3, 32, 32).requires_grad_()
    trace = model.trace(images, attention=True)
    for value in (*trace.values.values(), *trace.attended, *trace.attention):
        (to_images,) = torch.autograd.grad(value.square().sum(), images, retain_graph=True)
        (from_logits,) = torch.autograd.grad(trace["logits"][0, 0], value, retain_graph=True)
        assert to_images.abs().sum() > 0
        assert from_logits.abs().sum() > 0
    for gradient in torch.autograd.grad(trace["logits"][0, 0], trace.attended):
        assert (gradient.abs().sum(dim=2) > 0).all()  # of every token


def test_a_trace_shows_names_and_shapes() -> None:
    shown = repr(small_model().trace(random_images(2, 3, 32, 32)))
    assert shown.startswith("Trace(patch_embeddings (2, 16, 16), embeddings (2, 17, 16), block0 (2, 17, 16)")
    assert shown.endswith("logits (2, 5))")
