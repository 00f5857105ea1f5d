import pytest
import torch
from torch import nn

from tests.model import random_images, randomize
from tests.peers.names import TORCHVISION, copy_weights, relative_error, translate
from vitascope.model.config import ViTConfig, named_config
from vitascope.model.vit import VisionTransformer

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed (vitascope[peers])")

CONFIGS = {
    "plain": ViTConfig(image_size=64, num_classes=7, embed_dim=48, depth=3, num_heads=4),
    "representation": ViTConfig(image_size=64, num_classes=7, embed_dim=48, depth=3, num_heads=4, head="mlp"),
    "patch 4 at 32": ViTConfig(image_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3, mlp_ratio=2),
    "tiny 16 at 224": named_config("vit_ti16"),
}


def torchvision_model(config: ViTConfig) -> nn.Module:
    """torchvision's model of our configuration, every parameter random."""
    peer = torchvision.models.vision_transformer.VisionTransformer(
        image_size=config.image_hw[0],
        patch_size=config.patch_hw[0],
        num_layers=config.depth,
        num_heads=config.num_heads,
        hidden_dim=config.embed_dim,
        mlp_dim=config.mlp_dim,
        num_classes=config.num_classes,
        representation_size=config.embed_dim if config.head == "mlp" else None,
    )
    return randomize(peer).eval()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_outputs_tokens_and_attention_equal_torchvision(config: ViTConfig) -> None:
    peer, images = torchvision_model(config), random_images(2, 3, *config.image_hw)
    ours = copy_weights(peer, TORCHVISION, VisionTransformer(config))

    blocks, normalized, features = [], [], []
    for layer in peer.encoder.layers:
        layer.ln_1.register_forward_hook(lambda module, args, output: normalized.append(output))
        layer.register_forward_hook(lambda module, args, output: blocks.append(output))
    peer.encoder.register_forward_hook(lambda module, args, output: features.append(output))
    logits = peer(images)

    assert relative_error(ours(images), logits) < 1e-5
    assert relative_error(ours.forward_features(images), features[0]) < 1e-5
    trace = ours.trace(images, attention=True)
    for index, layer in enumerate(peer.encoder.layers):
        x = normalized[index]
        _, weights = layer.self_attention(x, x, x, need_weights=True, average_attn_weights=False)
        assert relative_error(trace.attention[index], weights) < 1e-5
        assert relative_error(trace[f"block{index}"], blocks[index]) < 1e-5


@pytest.mark.parametrize("name", ["b_16", "b_32", "l_16", "l_32", "h_14"])
def test_named_sizes_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        model = VisionTransformer(named_config(f"vit_{name.replace('_', '')}"))
        peer = torchvision.models.get_model(f"vit_{name}", weights=None)
    expected = {key: value.shape for key, value in translate(peer.state_dict(), TORCHVISION, model).items()}
    assert {key: value.shape for key, value in model.state_dict().items()} == expected
    assert model.config.num_parameters == sum(value.numel() for value in peer.parameters())
    assert model.encoder.blocks[0].attention.num_heads == peer.encoder.layers[0].self_attention.num_heads


@pytest.mark.parametrize("name", ["b_16", "b_32", "l_16", "l_32"])
def test_parameters_and_operations_are_those_that_torchvision_publishes(name: str) -> None:
    published = torchvision.models.get_model_weights(f"vit_{name}").IMAGENET1K_V1.meta
    config = named_config(f"vit_{name.replace('_', '')}")
    assert config.num_parameters == published["num_params"]
    # Theirs are billions of multiply-adds, ours single operations.
    assert round(config.flops / 2e9, 3) == pytest.approx(published["_ops"], abs=0.001)


def test_gradients_equal_torchvision() -> None:
    config = CONFIGS["representation"]
    peer = torchvision_model(config).double()
    ours = copy_weights(peer, TORCHVISION, VisionTransformer(config).double())
    gradients = []
    for model in (ours, peer):
        images = random_images(2, 3, 64, 64).double().requires_grad_()
        nn.functional.cross_entropy(model(images), torch.tensor([3, 5])).backward()
        gradients.append((images.grad, {name: value.grad for name, value in model.named_parameters()}))
    (our_images, our_weights), (their_images, their_weights) = gradients
    assert relative_error(our_images, their_images) < 1e-10
    for name, gradient in translate(their_weights, TORCHVISION, ours).items():
        assert relative_error(our_weights[name], gradient) < 1e-10, name
