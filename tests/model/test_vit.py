import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model import law_of_models, random_images, small_config, small_model
from vitascope.errors import UserError
from vitascope.model.patches import patchify, unpatchify
from vitascope.model.vit import VisionTransformer


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def gelu(x: np.ndarray) -> np.ndarray:
    return x * np.vectorize(lambda value: (1 + math.erf(value / math.sqrt(2))) / 2)(x)


def softmax(x: np.ndarray) -> np.ndarray:
    exponential = np.exp(x - x.max(-1, keepdims=True))
    return exponential / exponential.sum(-1, keepdims=True)


def equations_1_to_4(model: VisionTransformer, image: np.ndarray) -> np.ndarray:
    """The paper's equations for one image (C, H, W), in NumPy: from pixels to logits."""
    w = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    config = model.config
    (ph, pw), eps, k = config.patch_hw, config.norm_eps, config.num_heads

    E = w["patch_embedding.weight"].reshape(config.embed_dim, -1).T
    patches = [
        image[:, top : top + ph, left : left + pw].reshape(-1)
        for top in range(0, image.shape[1], ph)
        for left in range(0, image.shape[2], pw)
    ]
    embedded = [patch @ E + w["patch_embedding.bias"] for patch in patches]
    z = np.stack([w["class_token"][0, 0], *embedded]) + w["positions.weight"][0]  # equation 1

    for index in range(config.depth):
        p = {name.split(".", 3)[3]: v for name, v in w.items() if name.startswith(f"encoder.blocks.{index}.")}
        x = layer_norm(z, p["norm1.weight"], p["norm1.bias"], eps)
        q, key, v = np.split(x @ p["attention.qkv.weight"].T + p["attention.qkv.bias"], 3, axis=-1)
        heads = []
        for head in np.split(np.arange(config.embed_dim), k):
            A = softmax(q[:, head] @ key[:, head].T / math.sqrt(len(head)))
            heads.append(A @ v[:, head])
        msa = np.concatenate(heads, axis=-1) @ p["attention.proj.weight"].T + p["attention.proj.bias"]
        z = msa + z  # equation 2
        x = layer_norm(z, p["norm2.weight"], p["norm2.bias"], eps)
        hidden = gelu(x @ p["mlp.fc1.weight"].T + p["mlp.fc1.bias"])
        z = hidden @ p["mlp.fc2.weight"].T + p["mlp.fc2.bias"] + z  # equation 3

    y = layer_norm(z[0], w["norm.weight"], w["norm.bias"], eps)  # equation 4
    return y @ w["head.weight"].T + w["head.bias"]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"image_size": (12, 40), "patch_size": (4, 8), "in_channels": 2, "num_heads": 4, "norm_eps": 1e-2},
        {"patchify": "linear", "mlp_ratio": 1.5, "depth": 1},
    ],
)
def test_the_model_is_equations_1_to_4_of_the_paper(overrides: dict[str, Any]) -> None:
    model = small_model(**overrides).double()
    images = random_images(2, model.config.in_channels, *model.config.image_hw).double()
    expected = np.stack([equations_1_to_4(model, image) for image in images.numpy()])
    np.testing.assert_allclose(model(images).detach().numpy(), expected, rtol=1e-10, atol=1e-10)


def test_mean_pooling_has_no_class_token_and_averages_the_features() -> None:
    model, images = small_model(pool="mean"), random_images(2, 3, 32, 32)
    assert model.class_token is None
    features = model.forward_features(images)
    assert features.shape == (2, 16, 16)
    torch.testing.assert_close(model.embed(images), features.mean(1))
    torch.testing.assert_close(model(images), model.head(features.mean(1)))


def test_the_class_token_is_what_the_head_reads() -> None:
    model, images = small_model(pool="cls"), random_images(2, 3, 32, 32)
    features = model.forward_features(images)
    assert features.shape == (2, 17, 16)
    torch.testing.assert_close(model.embed(images), features[:, 0])
    torch.testing.assert_close(model(images), model.head(features[:, 0]))


def test_the_mlp_head_is_applied_to_the_pooled_features() -> None:
    model, images = small_model(head="mlp"), random_images(2, 3, 32, 32)
    hidden = model.head.pre_logits(model.embed(images)).tanh()
    torch.testing.assert_close(model(images), model.head.linear(hidden))
    assert model(images).shape == (2, 5)


def test_without_a_head_the_model_gives_its_features() -> None:
    model, images = small_model(head="none"), random_images(2, 3, 32, 32)
    assert torch.equal(model(images), model.embed(images))
    assert model(images).shape == (2, 16)


@pytest.mark.parametrize("channels", [1, 4, 13])
def test_any_number_of_channels_is_taken_and_each_matters(channels: int) -> None:
    model = small_model(in_channels=channels)
    images = random_images(1, channels, 32, 32).requires_grad_()
    logits = model(images)
    assert logits.shape == (1, 5)
    (gradient,) = torch.autograd.grad(logits[0, 0], images)
    assert gradient.abs().sum((0, 2, 3)).min() > 0


def test_images_need_not_be_square() -> None:
    model = small_model(image_size=(16, 40), patch_size=(4, 8))
    assert model.forward_features(random_images(2, 3, 16, 40)).shape == (2, 1 + 4 * 5, 16)


def test_turning_image_patch_kernels_and_positions_turns_nothing_in_the_output() -> None:
    wide, tall = (
        small_model(image_size=(16, 40), patch_size=(4, 8)),
        small_model(image_size=(40, 16), patch_size=(8, 4)),
    )
    weights = wide.state_dict()
    weights["patch_embedding.weight"] = weights["patch_embedding.weight"].mT
    prefix, patches = weights["positions.weight"].split([1, 20], dim=1)
    turned = patches.unflatten(1, (4, 5)).transpose(1, 2).flatten(1, 2)
    weights["positions.weight"] = torch.cat([prefix, turned], dim=1)
    tall.load_state_dict(weights)
    images = random_images(2, 3, 16, 40)
    torch.testing.assert_close(tall(images.mT), wide(images))


@law_of_models
@given(rows=st.integers(1, 6), columns=st.integers(1, 6), pool=st.sampled_from(["cls", "mean"]))
def test_other_sizes_on_the_fly_equal_resizing_the_positions_first(
    rows: int, columns: int, pool: str
) -> None:
    model, images = small_model(pool=pool), random_images(1, 3, 8 * rows, 8 * columns)
    on_the_fly = model(images)
    model.positions.resize((rows, columns))
    torch.testing.assert_close(model(images), on_the_fly)


def test_each_image_is_judged_by_itself() -> None:
    model, images = small_model(), random_images(4, 3, 32, 32)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), alone)


@pytest.mark.parametrize("pool", ["cls", "mean"])
@law_of_models
@given(order=st.permutations(range(16)))
def test_without_positions_the_order_of_patches_does_not_matter(pool: str, order: list[int]) -> None:
    model, images = small_model(pool=pool), random_images(1, 3, 32, 32)
    shuffled = unpatchify(patchify(images, (8, 8))[:, order], (4, 4), (8, 8))
    torch.nn.init.zeros_(model.positions.weight)
    in_order, out_of_order = model(torch.cat([images, shuffled]))
    torch.testing.assert_close(out_of_order, in_order, rtol=1e-4, atol=1e-5)


def test_positions_make_the_order_of_patches_matter() -> None:
    model, images = small_model(), random_images(1, 3, 32, 32)
    shuffled = unpatchify(patchify(images, (8, 8)).flip(1), (4, 4), (8, 8))
    assert (model(shuffled) - model(images)).abs().max() > 1e-2


def test_both_ways_to_embed_patches_share_their_weights() -> None:
    conv, linear = small_model(patchify="conv"), small_model(patchify="linear", seed=5)
    linear.load_state_dict(conv.state_dict())
    images = random_images(2, 3, 32, 32)
    torch.testing.assert_close(linear(images), conv(images))


@pytest.mark.parametrize("overrides", [{}, {"pool": "mean"}, {"head": "mlp"}, {"head": "none"}])
def test_a_loss_has_a_gradient_in_every_parameter(overrides: dict[str, Any]) -> None:
    model = small_model(**overrides).train()
    model(random_images(2, 3, 32, 32)).square().sum().backward()
    unused = [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    assert unused == []


def test_dropout_follows_the_position_embedding_in_training_only() -> None:
    model, images = small_model(dropout=0.5), random_images(8, 3, 32, 32)
    assert (model.embeddings(images) != 0).all()
    torch.manual_seed(0)
    zeros = (model.train().embeddings(images) == 0).double().mean()
    assert 0.4 < zeros < 0.6


def test_mixed_precision_agrees_with_float32_up_to_rounding() -> None:
    model, images = small_model(), random_images(4, 3, 32, 32)
    exact = model(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(images)
    assert (rounded.float() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 32, 32), r"images must be \(batch, 3, height, width\), not \(2, 1, 32, 32\)"),
        ((3, 32, 32), r"images must be \(batch, 3, height, width\), not \(3, 32, 32\)"),
        ((2, 32, 32, 3), r"images must be \(batch, 3, height, width\), not \(2, 32, 32, 3\)"),
        ((2, 3, 33, 32), "image 33x32 is not a multiple of patch 8; nearest: 32x32"),
        ((2, 3, 32, 45), "image 32x45 is not a multiple of patch 8; nearest: 32x48"),
        ((2, 3, 0, 32), "image 0x32"),
    ],
)
def test_images_that_do_not_fit_are_refused_with_the_numbers(shape: tuple[int, ...], message: str) -> None:
    model = small_model()
    for run in (model, model.embed, model.forward_features, model.trace):
        with pytest.raises(UserError, match=message):
            run(torch.zeros(shape))


def test_the_grid_is_rows_then_columns() -> None:
    assert VisionTransformer(small_config(patch_size=(4, 8))).grid_of(torch.zeros(1, 3, 8, 40)) == (2, 5)
