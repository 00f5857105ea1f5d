"""Packed layers equal the layers that they replace, on a machine with oneDNN."""

import pytest
import torch
from torch import nn

from tests.models import random_images, small_config, small_model, small_resnet
from vitascope.models import packed
from vitascope.models.encoder import MLP
from vitascope.models.packed import PackedLinear, packing_pays, predicting_copy

BF16 = torch.bfloat16

needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN has no bf16 here",
)


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "bf16_units", lambda: "AMX")


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 64])
@torch.inference_mode()
def test_a_packed_layer_equals_the_layer(bias: bool, rows: int) -> None:
    layer = nn.Linear(24, 40, bias=bias).to(BF16)
    tokens = random_images(2, rows, 24).to(BF16)
    expected = nn.functional.linear(
        tokens.float(), layer.weight.float(), layer.bias.float() if bias else None
    )
    torch.testing.assert_close(PackedLinear(layer)(tokens).float(), expected, rtol=2**-8, atol=1e-6)


@needs_onednn
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@torch.inference_mode()
def test_a_fused_activation_equals_the_activation_after_the_product(approximate: str) -> None:
    layer, gelu = nn.Linear(24, 40).to(BF16), nn.GELU(approximate=approximate)
    tokens = random_images(2, 7, 24).to(BF16)
    expected = gelu(nn.functional.linear(tokens.float(), layer.weight.float(), layer.bias.float()))
    found = PackedLinear(layer, gelu)(tokens).float()
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=1e-4)  # up to one rounding, not two
    other = nn.GELU(approximate="tanh" if approximate == "none" else "none")
    assert not torch.equal(PackedLinear(layer, other)(10 * tokens), PackedLinear(layer, gelu)(10 * tokens))


@needs_onednn
@pytest.mark.usefixtures("units")
@pytest.mark.parametrize(
    "options",
    [{}, {"mlp": "gelu_tanh"}, {"mlp": "quick_gelu"}, {"mlp": "swiglu"}, {"qkv_bias": "no_key"}],
    ids=str,
)
@torch.inference_mode()
def test_the_predicting_copy_has_the_outputs_of_the_unchanged_model(options: dict[str, str]) -> None:
    model, images = small_model(**options), random_images(3, 3, 32, 32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copied = predicting_copy(model, BF16)
    assert any(isinstance(module, PackedLinear) for module in copied.modules())
    expected = model(images)
    found = copied(images.to(BF16)).float()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert copied.embed(images.to(BF16)).dtype == BF16
    traced = copied.trace(images.to(BF16))["logits"].float()
    assert (traced - expected).abs().max() < 0.05 * expected.abs().max()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@needs_onednn
@pytest.mark.usefixtures("units")
def test_every_linear_layer_of_the_encoder_is_packed_once() -> None:
    copied = predicting_copy(small_model(), BF16)
    depth = small_config().depth
    layers = [module for module in copied.encoder.modules() if isinstance(module, PackedLinear)]
    assert len(layers) == 4 * depth
    assert [layer.activation for layer in layers].count("gelu") == depth
    assert not any(type(module) is nn.Linear for module in copied.encoder.modules())
    assert all(isinstance(m.activation, nn.Identity) for m in copied.modules() if isinstance(m, MLP))


@needs_onednn
@pytest.mark.usefixtures("units")
def test_only_bf16_on_a_cpu_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert packing_pays(cpu, BF16)
    assert not packing_pays(cpu, torch.float32)
    assert not packing_pays(torch.device("cuda"), BF16)
    monkeypatch.setattr(packed, "bf16_units", lambda: None)
    assert not packing_pays(cpu, BF16)
    copied = predicting_copy(small_model(), BF16)
    assert not any(isinstance(module, PackedLinear) for module in copied.modules())


@pytest.mark.usefixtures("units")
def test_nothing_is_packed_where_onednn_may_not_use_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert not packing_pays(torch.device("cpu"), BF16)


@pytest.mark.usefixtures("units")
def test_a_resnet_is_copied_without_packing() -> None:
    model = small_resnet()
    copied = predicting_copy(model, BF16)
    assert {type(module) for module in copied.modules()} == {type(module) for module in model.modules()}
    assert next(copied.parameters()).dtype == BF16
