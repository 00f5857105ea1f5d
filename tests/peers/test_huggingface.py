import pytest
import torch
from torch import nn

from tests.model import random_images, randomize
from tests.peers.names import HUGGINGFACE, copy_weights, relative_error, translate
from vitascope.model.config import ViTConfig
from vitascope.model.vit import VisionTransformer

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="transformers 5 is not installed (vitascope[peers])"
)

CONFIGS = {
    "epsilon 1e-12": ViTConfig(
        image_size=64, num_classes=7, embed_dim=48, depth=3, num_heads=4, norm_eps=1e-12
    ),
    "epsilon 1e-6": ViTConfig(
        image_size=64, num_classes=7, embed_dim=48, depth=3, num_heads=4, norm_eps=1e-6
    ),
    "epsilon that matters": ViTConfig(image_size=64, embed_dim=48, depth=3, num_heads=4, norm_eps=0.1),
    "one channel, patch 4 at 32": ViTConfig(
        image_size=32, patch_size=4, in_channels=1, num_classes=3, embed_dim=48, depth=3, num_heads=4
    ),
    "without head": ViTConfig(image_size=64, head="none", embed_dim=48, depth=3, num_heads=4),
    "tiny 16 at 224": ViTConfig(embed_dim=192, num_heads=3, norm_eps=1e-12),
}


def huggingface_model(config: ViTConfig) -> nn.Module:
    """transformers' model of our configuration, every parameter random."""
    peer = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=config.image_hw[0],
            patch_size=config.patch_hw[0],
            num_channels=config.in_channels,
            num_labels=0 if config.head == "none" else config.num_classes,
            hidden_size=config.embed_dim,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_dim,
            layer_norm_eps=config.norm_eps,
            attn_implementation="eager",  # the one that gives attention weights
        )
    )
    return randomize(peer).eval()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_outputs_tokens_and_attention_equal_huggingface(config: ViTConfig) -> None:
    peer = huggingface_model(config)
    ours = copy_weights(peer, HUGGINGFACE, VisionTransformer(config))
    images = random_images(2, config.in_channels, *config.image_hw)
    theirs = peer(images, output_attentions=True, output_hidden_states=True)
    features = peer.vit(images).last_hidden_state
    assert relative_error(ours(images), theirs.logits) < 1e-5
    assert relative_error(ours.forward_features(images), features) < 1e-5

    trace = ours.trace(images, attention=True)
    assert relative_error(trace["logits"], theirs.logits) < 1e-5
    assert len(theirs.attentions) == len(trace.attention) == config.depth
    for our_weights, their_weights in zip(trace.attention, theirs.attentions, strict=True):
        assert relative_error(our_weights, their_weights) < 1e-5
    names = ["embeddings", *(f"block{index}" for index in range(config.depth))]
    for name, tokens in zip(names, theirs.hidden_states, strict=True):
        assert relative_error(trace[name], tokens) < 1e-5


def test_gradients_equal_huggingface() -> None:
    config = ViTConfig(image_size=64, num_classes=7, embed_dim=48, depth=3, num_heads=4, norm_eps=1e-12)
    peer = huggingface_model(config).double()
    ours = copy_weights(peer, HUGGINGFACE, VisionTransformer(config).double())
    gradients = []
    for model in (ours, peer):
        images = random_images(2, 3, 64, 64).double().requires_grad_()
        output = model(images)
        logits = output if model is ours else output.logits
        nn.functional.cross_entropy(logits, torch.tensor([3, 5])).backward()
        gradients.append((images.grad, {name: value.grad for name, value in model.named_parameters()}))
    (our_images, our_weights), (their_images, their_weights) = gradients
    # Their softmax is float32 whatever the model's dtype, so this is as close as it gets.
    assert relative_error(our_images, their_images) < 1e-5
    for name, gradient in translate(their_weights, HUGGINGFACE, ours).items():
        assert relative_error(our_weights[name], gradient) < 1e-5, name
