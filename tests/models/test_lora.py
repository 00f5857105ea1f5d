import copy

import pytest
import torch

from tests.models import VARIANTS, random_images, randomize, small_model
from vitascope.models.lora import add_adapters, merged
from vitascope.models.vit import VisionTransformer

OF_BLOCKS = ("plain", "no key bias", "swiglu", "post-norm", "fewer heads of the same width", "token merging")


def adapted(model: VisionTransformer, rank: int = 2) -> VisionTransformer:
    made = copy.deepcopy(model)
    add_adapters(made.encoder, rank)
    return made


@pytest.mark.parametrize("variant", OF_BLOCKS)
def test_adapters_change_nothing_at_first_and_their_merged_weights_compute_the_same(variant: str) -> None:
    model, images = small_model(**VARIANTS[variant]), random_images(2, 3, 32, 32)
    with_adapters, plain = adapted(model), copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(with_adapters(images), model(images))
        start = merged(with_adapters.state_dict())
        assert start.keys() == model.state_dict().keys()
        assert all(torch.equal(start[name], tensor) for name, tensor in model.state_dict().items())
        for part in with_adapters.encoder.modules():
            if hasattr(part, "adapter"):
                randomize(part.adapter)
        plain.load_state_dict(merged(with_adapters.state_dict()))
        expected = with_adapters(images)
        torch.testing.assert_close(plain(images), expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(model(images), expected, atol=1e-2)


def test_every_linear_layer_of_the_blocks_and_no_other_has_an_adapter_of_the_rank() -> None:
    model = adapted(small_model(depth=2, pool="map", head="mlp"), rank=3)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters() if ".adapter." in name}
    expected = {}
    for block in range(2):
        for layer, inputs, outputs in (
            ("attention.qkv", 16, 48),
            ("attention.proj", 16, 16),
            ("mlp.fc1", 16, 64),
            ("mlp.fc2", 64, 16),
        ):
            name = f"encoder.blocks.{block}.{layer}.adapter"
            expected |= {f"{name}.A.weight": (3, inputs), f"{name}.B.weight": (outputs, 3)}
    assert shapes == expected
