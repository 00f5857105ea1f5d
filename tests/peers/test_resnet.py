"""The ResNet stem of timm's hybrid ViTs, with every parameter random, against ours with the same weights."""

import pytest
import torch
from torch import nn

from tests.model import random_images, randomize
from tests.peers.comparison import relative_error
from tests.uninitialized import uninitialized
from vitascope.model.resnet import ResNetFeatures
from vitascope.model.resnet_config import ResNetConfig

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")

BACKBONES = {
    "r": "vit_tiny_r_s16_p8_224",
    "r26": "vit_small_r26_s32_224",
    "r50": "vit_large_r50_s32_224",
    "r50_s16": "vit_base_r50_s16_224",
}
"""Our name -> the hybrid of timm with that stem."""
LAYERS = {"r": (), "r26": (2, 2, 2, 2), "r50": (3, 4, 6, 3), "r50_s16": (3, 4, 9)}


def timm_embedding(name: str) -> nn.Module:
    with uninitialized():
        small = {"depth": 1, "embed_dim": 64, "num_heads": 1, "img_size": 64}
        return timm.create_model(BACKBONES[name], pretrained=False, **small).patch_embed


def timm_backbone(name: str) -> nn.Module:
    return randomize(timm_embedding(name).backbone).eval()


def our_name(theirs: str) -> str:
    """`stages.0.blocks.1.downsample.conv.weight` -> `stages.0.1.shortcut.conv.weight`."""
    if theirs.startswith(("conv.", "norm.")):  # without stages, timm's backbone is its stem
        theirs = f"stem.{theirs}"
    return theirs.replace("stem.", "root.").replace(".blocks.", ".").replace("downsample", "shortcut")


def copy_weights(peer: nn.Module, name: str) -> ResNetFeatures:
    with uninitialized():
        ours = ResNetFeatures(ResNetConfig(layers=LAYERS[name]), "timm")
    ours.load_state_dict({our_name(key): value for key, value in peer.state_dict().items()}, strict=True)
    return ours.eval()


@pytest.mark.parametrize("name", BACKBONES)
@torch.no_grad()
def test_feature_maps_equal_timm(name: str) -> None:
    peer = timm_backbone(name)
    ours = copy_weights(peer, name)
    pictures = [random_images(1, 3, *size) for size in ((96, 96), (97, 130))]
    in_fp32 = [(ours(images), peer(images)) for images in pictures]
    ours.double(), peer.double()
    for images, rounded in zip(pictures, in_fp32, strict=True):
        exact = peer(images.double())
        assert relative_error(ours(images.double()), exact) < 1e-12
        # In fp32, random layers amplify rounding to 4e-5 in the deepest: ours no more than timm's own.
        our_error, their_error = (relative_error(maps.double(), exact) for maps in rounded)
        assert our_error < max(1e-5, 2 * their_error)


def test_gradients_equal_timm() -> None:
    peer = timm_backbone("r26").double()
    ours = copy_weights(peer, "r26").double()
    gradients = []
    for model in (ours, peer):
        images = random_images(2, 3, 61, 64).double().requires_grad_()
        model(images).square().sum().backward()
        gradients.append((images.grad, {key: value.grad for key, value in model.named_parameters()}))
    (our_images, our_weights), (their_images, their_weights) = gradients
    assert relative_error(our_images, their_images) < 1e-10
    for key, gradient in their_weights.items():
        assert relative_error(our_weights[our_name(key)], gradient) < 1e-10, key


@pytest.mark.parametrize("name", BACKBONES)
def test_channels_and_grid_equal_timms_hybrid(name: str) -> None:
    embedding = timm_embedding(name)
    with torch.device("meta"):
        config = ResNetConfig(layers=LAYERS[name])
        maps = ResNetFeatures(config)(torch.empty(1, 3, 64, 64))
    assert maps.shape[1] == embedding.proj.in_channels
    assert (config.stride, config.stride) == embedding.feature_ratio
