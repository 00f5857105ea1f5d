"""The models that a page holds, and their weights."""

import re

import pytest
import torch

from tests.models import small_model
from vitascope.deploy.page.packing import packed, rounded
from vitascope.deploy.server.attention_pack import to_signed_bytes
from vitascope.errors import UserError


def test_scales_of_rows_bring_every_number_within_half_a_step() -> None:
    matrix = torch.randn(5, 7) * torch.logspace(-3, 3, 5)[:, None]
    matrix[2] = 0
    levels, scales = to_signed_bytes(matrix)
    assert levels.dtype == torch.int8
    assert levels.abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127]
    error = (levels * scales[:, None] - matrix).abs()
    assert (error <= 0.501 * scales[:, None]).all()


@pytest.mark.parametrize(("rounding", "dtype"), [("fp16", torch.float16), ("int8", torch.int8)])
def test_packed_matrices_are_those_of_the_rounded_model(rounding: str, dtype: torch.dtype) -> None:
    model = rounded(small_model(), rounding)
    tensors = packed(model, rounding)
    name = "encoder.blocks.1.mlp.fc2.weight"
    found = tensors[name]
    assert found.dtype == dtype
    if rounding == "int8":
        found = found * tensors[f"{name}.scales"][:, None]
    torch.testing.assert_close(found.float(), model.state_dict()[name], atol=0, rtol=1e-6)


def test_keys_without_a_bias_have_one_of_zeros() -> None:
    model = small_model(qkv_bias="no_key")
    name = "encoder.blocks.1.attention.qkv.bias"
    queries, values = torch.randn(2, model.config.embed_dim)
    with torch.no_grad():
        model.get_parameter(name).copy_(torch.cat([queries, values]))
    assert torch.equal(packed(model, "fp16")[name], torch.cat([queries, 0 * queries, values]))


def test_only_matrices_of_a_copy_are_rounded() -> None:
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = rounded(model, "int8").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith(".weight") and before[name].ndim > 1} - {
        "positions.weight"
    }
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_that_are_not_finite_or_too_large_are_rejected() -> None:
    for name in ("encoder.blocks.0.mlp.fc1.weight", "norm.bias", "class_token"):
        model = small_model()
        with torch.no_grad():
            model.get_parameter(name).view(-1)[0] = torch.nan
        with pytest.raises(UserError, match=f"{re.escape(name)} has NaN or infinity"):
            rounded(model, "fp16")
    with torch.no_grad():
        (model := small_model()).encoder.blocks[0].mlp.fc1.weight[0, 0] = 1e5
    with pytest.raises(UserError, match="too large for float16: use weights int8"):
        rounded(model, "fp16")
