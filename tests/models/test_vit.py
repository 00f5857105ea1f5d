import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import random_images, small_config, small_model
from vitascope.errors import UserError
from vitascope.models.vit import VisionTransformer


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
    (ph, pw), eps, k = config.patch_hw, config.norms.norm_eps, config.num_heads

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
        {"mlp_ratio": 1.5, "depth": 1},
    ],
)
def test_the_model_is_equations_1_to_4_of_the_paper(overrides: dict[str, Any]) -> None:
    model = small_model(**overrides).double()
    images = random_images(2, model.config.in_channels, *model.config.image_hw).double()
    expected = np.stack([equations_1_to_4(model, image) for image in images.numpy()])
    np.testing.assert_allclose(model(images).detach().numpy(), expected, rtol=1e-10, atol=1e-10)


def test_resizing_to_a_size_that_patches_do_not_tile_is_rejected_and_changes_nothing() -> None:
    model, images = small_model(), random_images(1, 3, 32, 32)
    before = model(images)
    with pytest.raises(UserError, match="image 33x33 is not a multiple of patch 8"):
        model.resize(33)
    assert model.config == small_config()
    assert torch.equal(model(images), before)


def test_dropout_follows_the_position_embedding_in_training_only() -> None:
    model, images = small_model(dropout=0.5), random_images(8, 3, 32, 32)
    assert (model.prepare_tokens(images) != 0).all()
    torch.manual_seed(0)
    zeros = (model.train().prepare_tokens(images) == 0).double().mean()
    assert 0.4 < zeros < 0.6


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 32, 32), r"floats \(batch, 3, height, width\).* not torch.float32 \(2, 1, 32, 32\)"),
        ((3, 32, 32), r"not torch.float32 \(3, 32, 32\)"),
        ((2, 32, 32, 3), r"not torch.float32 \(2, 32, 32, 3\)"),
        ((2, 3, 33, 32), "image 33x32 is not a multiple of patch 8; nearest: 32x32"),
        ((2, 3, 32, 45), "image 32x45 is not a multiple of patch 8; nearest: 32x48"),
        ((2, 3, 0, 32), "image 0x32 is not a multiple of patch 8; nearest: 8x32"),
    ],
)
def test_images_of_a_wrong_shape_are_rejected_with_the_numbers(shape: tuple[int, ...], message: str) -> None:
    model = small_model()
    for run in (model, model.embed, model.forward_features, model.trace):
        with pytest.raises(UserError, match=message):
            run(torch.zeros(shape))


# Starting from given patch embeddings


@pytest.mark.parametrize("positions", ["learned", "rotary", "relative"])
def test_the_model_continues_from_any_block(positions: str) -> None:
    model, images = small_model(positions=positions, num_registers=1), random_images(2, 3, 32, 48)
    trace = model.trace(images)
    for index in range(3):
        before = trace[f"block{index - 1}" if index else "embeddings"]
        one = model.encode(before, (4, 6), blocks=range(index, index + 1))
        rest = model.encode(before, (4, 6), blocks=range(index, 3))
        torch.testing.assert_close(one, trace[f"block{index}"])
        torch.testing.assert_close(rest, trace["block2"])
        first = model.encode(before, (4, 6), queries=slice(0, 1), blocks=range(index, 3))
        torch.testing.assert_close(first, trace["block2"][:, :1])
    assert torch.equal(model.encode(before, (4, 6), blocks=range(3, 3)), before)


# The tokens beside the patches


def test_the_sequence_is_class_token_distillation_token_registers_patches() -> None:
    model = small_model(distillation_token=True, num_registers=2, positions="none")
    images = random_images(2, 3, 32, 32)
    tokens = model.prepare_tokens(images)
    parts = [model.class_token, model.distillation_token, model.registers]
    expected = torch.cat([*(part.expand(2, -1, -1) for part in parts), model.patch_embedding(images)], dim=1)
    assert torch.equal(tokens, expected)
    assert tokens.shape == (2, 1 + 1 + 2 + 16, 16)


def test_the_embedding_norm_follows_the_dropout() -> None:
    model = small_model(embedding_norm=True, dropout=0.5).train()
    assert (model.prepare_tokens(random_images(2, 3, 32, 32)) != 0).all()


# Every option


# Precision


PRECISE: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"positions": "rotary", "num_registers": 2, "qkv_bias": "no_key"},
    "relative": {"positions": "relative"},
    "axial, relative": {"attention": "axial", "positions": "relative"},
    "window, rotary": {"attention": "window", "window": 2, "positions": "rotary"},
    "sincos, map": {"pool": "map", "positions": "sincos_2d"},
    "swiglu, layer scale, distillation": {"mlp": "swiglu", "layer_scale": 0.1, "distillation_token": True},
    "resnet": {"stem": "resnet", "resnet_layers": (1, 1), "resnet_width": 4},
    "tokenizer": {"stem": "tokenizer", "tokenizer_widths": (8, 8)},
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("options", PRECISE.values(), ids=PRECISE)
def test_bf16_agrees_with_float32_up_to_rounding(options: dict[str, Any], traced: bool) -> None:
    images = random_images(4, 3, 32, 32)

    def run(model: VisionTransformer, images: torch.Tensor) -> torch.Tensor:
        return model.trace(images, attention=True)["logits"] if traced else model(images)

    model = small_model(**options)
    exact = run(model, images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = run(model, images)
    pure = run(model.bfloat16(), images.bfloat16())
    assert pure.dtype == torch.bfloat16
    for rounded in (mixed, pure):
        assert (rounded.float() - exact).abs().max() < 0.03 * exact.abs().max()


# Compilation


COMPILED: dict[str, dict[str, Any]] = {
    "rotary": {"positions": "rotary", "num_registers": 2, "qkv_bias": "no_key"},
    "axial, relative": {"attention": "axial", "positions": "relative"},
    "window, sincos, map": {"attention": "window", "window": 2, "positions": "sincos_2d", "pool": "map"},
    "tokenizer": {"stem": "tokenizer", "tokenizer_widths": (8, 8)},
}


def compiled(model: VisionTransformer) -> Any:
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def test_training_with_dropped_patches_compiles_to_one_graph_with_its_gradients() -> None:
    options = {"depth": 1, "positions": "rotary", "patch_dropout": 0.5, "drop_path": 0.1}
    gradients = []
    for run in (compiled, lambda model: model):
        model = small_model(**options).train()
        torch.manual_seed(0)
        run(model)(random_images(2, 3, 32, 32)).square().sum().backward()
        gradients.append([value.grad for value in model.parameters()])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_an_exported_model_accepts_any_batch_size(options: dict[str, Any]) -> None:
    model, images = small_model(depth=1, **options), random_images(2, 3, 32, 32)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (1, 5):
        images = random_images(batch, 3, 32, 32)
        torch.testing.assert_close(program.module()(images), model(images))


def test_blocks_after_the_last_layer_that_is_asked_for_are_not_run() -> None:
    model, ran = small_model(), []
    for number, block in enumerate(model.encoder.blocks):
        block.register_forward_hook(lambda *_, number=number: ran.append(number))
    found = model.forward_intermediates(random_images(1, 3, 32, 32), [1, 0, 1])
    assert ran == [0, 1]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert model.forward_intermediates(random_images(1, 3, 32, 32), []) == []
    assert ran == [0, 1]


@pytest.mark.parametrize("norm", [True, False])
def test_feature_maps_of_layers_are_the_patches_of_the_intermediates(norm: bool) -> None:
    model = small_model(image_size=(24, 16), patch_size=8, num_registers=2).eval()
    images = torch.randn(2, 3, 24, 16)
    maps = model.feature_map(images, [0, -1], norm=norm)
    assert isinstance(maps, list)
    for found, tokens in zip(maps, model.forward_intermediates(images, [0, -1], norm=norm), strict=True):
        assert torch.equal(found.flatten(2).mT, tokens[:, model.config.num_prefix_tokens :])
        assert found.shape == (2, model.config.embed_dim, 3, 2)
    assert torch.equal(model.feature_map(images, [-1])[0], model.feature_map(images))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((1, 3, 32, 32), np.float32), "a tensor of normalized images, not ndarray"),
        ("photo.jpg", "not str: make it of a picture by model.preprocess.pixels"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), r"model\.preprocess\.normalize .* not torch.uint8"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.bool), "not torch.bool"),
    ],
)
def test_input_that_is_no_normalized_tensor_names_the_way_to_one(images: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        small_model()(images)
