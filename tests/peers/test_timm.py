from typing import Any

import pytest
import torch
from torch import nn

from tests.model import random_images, randomize
from tests.peers.names import TIMM, copy_weights, relative_error, translate
from vitascope.model.config import ViTConfig, named_config
from vitascope.model.positions import resample_positions
from vitascope.model.vit import VisionTransformer

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")

SMALL = {"embed_dim": 48, "depth": 3, "num_heads": 4}


def timm_model(config: ViTConfig, **options: Any) -> nn.Module:
    """timm's model of our configuration, every parameter random."""
    mean = {"global_pool": "avg", "class_token": False, "fc_norm": False} if config.pool == "mean" else {}
    peer = timm.models.vision_transformer.VisionTransformer(
        img_size=config.image_hw,
        patch_size=config.patch_hw,
        in_chans=config.in_channels,
        num_classes=0 if config.head == "none" else config.num_classes,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_ratio,
        **mean,
        **options,
    )
    return randomize(peer).eval()


def images_for(config: ViTConfig) -> torch.Tensor:
    return random_images(2, config.in_channels, *config.image_hw)


CONFIGS = {
    "tiny 16 at 224": named_config("vit_ti16"),
    "not square": ViTConfig(image_size=(64, 96), num_classes=7, **SMALL),
    "patches not square": ViTConfig(image_size=(64, 96), patch_size=(16, 8), num_classes=7, **SMALL),
    "patch 4 at 32, one channel": ViTConfig(
        image_size=32, patch_size=4, in_channels=1, num_classes=7, **SMALL
    ),
    "mean of the patches": ViTConfig(image_size=64, pool="mean", num_classes=7, **SMALL),
    "no head": ViTConfig(image_size=64, head="none", **SMALL),
    "no head, mean": ViTConfig(image_size=64, head="none", pool="mean", **SMALL),
    "linear patches, narrow mlp": ViTConfig(image_size=64, patchify="linear", mlp_ratio=1.5, **SMALL),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_outputs_equal_timm(config: ViTConfig) -> None:
    peer, images = timm_model(config), images_for(config)
    ours = copy_weights(peer, TIMM, VisionTransformer(config))
    assert relative_error(ours(images), peer(images)) < 1e-5
    assert relative_error(ours.forward_features(images), peer.forward_features(images)) < 1e-5
    pooled = peer.forward_head(peer.forward_features(images), pre_logits=True)
    assert relative_error(ours.embed(images), pooled) < 1e-5


@pytest.mark.parametrize("pool", ["cls", "mean"])
@torch.no_grad()
def test_tokens_and_attention_of_each_block_equal_timm(pool: str) -> None:
    config = ViTConfig(image_size=(64, 96), pool=pool, num_classes=7, **SMALL)
    peer, images = timm_model(config), images_for(config)
    ours = copy_weights(peer, TIMM, VisionTransformer(config)).trace(images, attention=True)
    attention = []
    for block in peer.blocks:
        block.attn.fused_attn = False  # timm then computes the weights, and passes them through its dropout
        block.attn.attn_drop.register_forward_hook(lambda module, args, output: attention.append(output))
    outputs: list[torch.Tensor] = []
    for block in peer.blocks:
        block.register_forward_hook(lambda module, args, output: outputs.append(output))
    peer(images)
    for index in range(config.depth):
        assert relative_error(ours[f"block{index}"], outputs[index]) < 1e-5
        assert relative_error(ours.attention[index], attention[index]) < 1e-5


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("size", [(96, 32), (64, 64), (128, 80)])
@torch.no_grad()
def test_other_image_sizes_on_the_fly_equal_timm(pool: str, size: tuple[int, int]) -> None:
    config = ViTConfig(image_size=64, pool=pool, num_classes=7, **SMALL)
    peer, images = timm_model(config, dynamic_img_size=True), random_images(2, 3, *size)
    ours = copy_weights(peer, TIMM, VisionTransformer(config))
    assert relative_error(ours(images), peer(images)) < 1e-5
    assert relative_error(ours.forward_features(images), peer.forward_features(images)) < 1e-5


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("old", [(14, 14), (4, 6)])
@pytest.mark.parametrize("new", [(24, 24), (7, 7), (14, 14), (5, 9), (6, 4)])
def test_resampled_positions_equal_timm(prefix: int, old: tuple[int, int], new: tuple[int, int]) -> None:
    positions = random_images(1, prefix + old[0] * old[1], 8)
    expected = timm.layers.resample_abs_pos_embed(
        positions, list(new), list(old), num_prefix_tokens=prefix, interpolation="bicubic", antialias=True
    )
    assert relative_error(resample_positions(positions, old, new, prefix), expected) < 1e-6


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_gradients_equal_timm(pool: str) -> None:
    config = ViTConfig(image_size=(64, 96), pool=pool, num_classes=7, **SMALL)
    peer = timm_model(config).double()
    ours = copy_weights(peer, TIMM, VisionTransformer(config).double())
    gradients = []
    for model in (ours, peer):
        images = images_for(config).double().requires_grad_()
        nn.functional.cross_entropy(model.train()(images), torch.tensor([3, 5])).backward()
        gradients.append((images.grad, {name: value.grad for name, value in model.named_parameters()}))
    (our_images, our_weights), (their_images, their_weights) = gradients
    assert relative_error(our_images, their_images) < 1e-10
    for name, gradient in translate(their_weights, TIMM, ours).items():
        assert relative_error(our_weights[name], gradient) < 1e-10, name


def test_initialization_has_the_spread_of_timm() -> None:
    torch.manual_seed(0)
    ours = VisionTransformer(named_config("vit_ti16", init="timm"))
    peer = timm.create_model("vit_tiny_patch16_224", pretrained=False)
    for name, expected in translate(peer.state_dict(), TIMM, ours).items():
        actual = ours.state_dict()[name]
        assert actual.shape == expected.shape
        if expected.min() == expected.max():  # a constant: biases, norms
            assert torch.equal(actual, expected), name
        else:  # 192 numbers are the fewest; a standard deviation is known to 5% from those
            assert actual.std().item() == pytest.approx(expected.std().item(), rel=0.2), name
            assert actual.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=0.4), name


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("vit_ti16", "vit_tiny_patch16_224"),
        ("vit_s16", "vit_small_patch16_224"),
        ("vit_s32", "vit_small_patch32_224"),
        ("vit_b8", "vit_base_patch8_224"),
        ("vit_b16", "vit_base_patch16_224"),
        ("vit_b32", "vit_base_patch32_224"),
        ("vit_l16", "vit_large_patch16_224"),
        ("vit_l32", "vit_large_patch32_224"),
        ("vit_h14", "vit_huge_patch14_224"),
    ],
)
def test_named_sizes_are_timms(ours: str, theirs: str) -> None:
    with torch.device("meta"):
        model = VisionTransformer(named_config(ours))
        peer = timm.create_model(theirs, pretrained=False, num_classes=1000)
    expected = {name: value.shape for name, value in translate(peer.state_dict(), TIMM, model).items()}
    assert {name: value.shape for name, value in model.state_dict().items()} == expected
    assert model.encoder.blocks[0].attention.num_heads == peer.blocks[0].attn.num_heads
    assert model.norm.eps == peer.norm.eps


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_a_weight_that_is_missing_or_left_over_is_refused(change: str) -> None:
    config = ViTConfig(image_size=32, num_classes=7, **SMALL)
    weights = timm_model(config).state_dict()
    if change == "missing":
        del weights["blocks.1.norm2.bias"]
    else:
        weights["reg_token"] = torch.zeros(1, 4, 48)
    with pytest.raises(KeyError, match=r"blocks\.1\.norm2\.bias" if change == "missing" else "reg_token"):
        translate(weights, TIMM, VisionTransformer(config))
